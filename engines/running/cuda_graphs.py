"""CUDA graphs of decode steps: captured on first use, replayed afterwards, limited in number."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from engines.library.cuda import Cuda

GRAPH_BUCKET = 256  # total lengths up to the next multiple of this share a graph, because the length is a shape
MAX_GRAPHS = 32

GraphKey = tuple[int, ...]


def graph_key(profile: int, mask_shape: tuple[int, ...], addresses: Sequence[int]) -> GraphKey:
    """Returns everything that a graph fixes: profile, batch, padded total length, and the addresses of the cache rows.

    A replay reads tokens, positions, write indices and the mask from the input buffers, whose addresses never change.
    """
    return (profile, *mask_shape, *addresses)


def padded_to_bucket(mask: np.ndarray, longest: int) -> np.ndarray:
    """Pads a mask [B, L] with zeros to the next multiple of GRAPH_BUCKET, at most to the longest of the profile."""
    length = min(-(-mask.shape[1] // GRAPH_BUCKET) * GRAPH_BUCKET, longest)
    return np.ascontiguousarray(np.pad(mask, ((0, 0), (0, length - mask.shape[1]))))


class CudaGraphs:
    """The steps of one engine that can be repeated, each with an execution context of its own.

    A graph is valid only while the shapes and addresses of its context stay the same. TensorRT-RTX holds the graph of a
    context itself; there, running the context is the replay.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._graphs: OrderedDict[GraphKey, _Repeated] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def replay(self, key: GraphKey) -> Any | None:
        """Queues the step of a key, and returns its context. Returns None where there is no such step yet."""
        if key not in self._graphs:
            return None
        self._graphs.move_to_end(key)  # the least recently used graph is the first
        repeated = self._graphs[key]
        repeated.launch()
        return repeated.context

    def make_room(self) -> None:
        """Drops the least recently used graph where the limit is reached."""
        if len(self._graphs) >= MAX_GRAPHS:
            self._drop(next(iter(self._graphs)))

    def capture(self, key: GraphKey, context: Any, work: Callable[[], None]) -> None:
        """Captures what `work` queues in a context, without running it.

        Raises:
            RuntimeError: the capture failed; nothing is kept, and the stream is as before.
        """
        graph = self._cuda.capture(work)
        self._graphs[key] = _Repeated(context, partial(self._cuda.launch, graph), graph)

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


@dataclass(frozen=True)
class _Repeated:
    """A step that can be repeated. `graph` is None where the context holds the graph itself."""

    context: Any
    launch: Callable[[], None]
    graph: Any = None
