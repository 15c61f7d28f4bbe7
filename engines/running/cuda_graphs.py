"""CUDA graphs of decode steps: captured on first use, replayed afterwards, limited in number."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engines.library.cuda import Cuda

GRAPH_BUCKET = 256  # total lengths up to the next multiple of this share a graph, because the length is a shape
MAX_GRAPHS = 256
RESERVE_BYTES = 1 << 28  # of device memory, which graphs leave to others
MAX_COUNTED = 4096  # keys whose uses are counted

GraphKey = tuple[int, ...]  # what a graph fixes: the cache, its first row, the batch, and the padded total length


def bucket_length(length: int, longest: int) -> int:
    """Returns the next multiple of GRAPH_BUCKET, at most the longest mask of the profile."""
    return min(-(-length // GRAPH_BUCKET) * GRAPH_BUCKET, longest)


class CudaGraphs:
    """The steps of one engine that can be repeated, each with an execution context of its own.

    A graph is valid only while the shapes and addresses of its context stay the same. TensorRT-RTX holds the graph of a
    context itself; there, running the context is the replay.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._graphs: OrderedDict[GraphKey, _Repeated] = OrderedDict()
        self._uses: Counter[GraphKey] = Counter()  # steps without a graph

    def __len__(self) -> int:
        return len(self._graphs)

    def replay(self, key: GraphKey) -> Any | None:
        """Queues the step of a key, and returns its context. Returns None where there is no such step yet."""
        if key not in self._graphs:
            return None
        self._graphs.move_to_end(key)  # the least recently used graph is the first
        repeated = self._graphs[key]
        repeated.replays += 1
        repeated.launch()
        return repeated.context

    def is_worth(self, key: GraphKey) -> bool:
        """Counts a step that has no graph. Returns whether it should get one: it came before, and there is memory.

        Makes room first: the graph that was used least goes, where the limit is reached.
        """
        if len(self._uses) >= MAX_COUNTED and key not in self._uses:
            self._uses.clear()
        self._uses[key] += 1
        if self._uses[key] < 2:
            return False
        while self._graphs and (len(self._graphs) >= MAX_GRAPHS or self._cuda.free_bytes() < RESERVE_BYTES):
            self._drop(min(self._graphs, key=lambda other: self._graphs[other].replays))
            for repeated in self._graphs.values():
                repeated.replays //= 2  # else a graph of the past would stay for ever
        return self._cuda.free_bytes() >= RESERVE_BYTES

    def capture(self, key: GraphKey, context: Any, work: Callable[[], None]) -> None:
        """Captures what `work` queues in a context, without running it.

        Raises:
            RuntimeError: the capture failed; nothing is kept, and the stream is as before.
        """
        graph = self._cuda.capture(work)
        self._graphs[key] = _Repeated(context, lambda: self._cuda.launch(graph), graph)

    def keep(self, key: GraphKey, context: Any, work: Callable[[], None]) -> None:
        """Keeps a context that captures its step itself. `work` runs it."""
        self._graphs[key] = _Repeated(context, work)

    def _drop(self, key: GraphKey) -> None:
        self._cuda.synchronize()
        graph = self._graphs.pop(key).graph
        if graph is not None:
            self._cuda.destroy_graph(graph)

    def free(self) -> None:
        """Drops all graphs, also where one of them raises."""
        with contextlib.ExitStack() as freeing:
            for key in list(self._graphs):
                freeing.callback(self._drop, key)


@dataclass
class _Repeated:
    """A step that can be repeated. `graph` is None where the context holds the graph itself."""

    context: Any
    launch: Callable[[], None]
    graph: Any = None
    replays: int = 0
