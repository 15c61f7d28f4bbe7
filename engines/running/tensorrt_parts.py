"""Runs a unit in several engines as one, on one stream.

Each part reads its hidden states from the output buffer of the part before it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engines.library.cuda import Cuda
from engines.library.dlpack import DeviceTensor
from engines.running.choose_engine import find_engine
from engines.running.tensorrt_stepper import TensorRTStepper, open_tensorrt
from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import EngineRecord
from exporter.common.errors import BundleError
from exporter.spec.tensors import Contract
from exporter.steppers.parts_stepper import PartsCache, PartsStepper, open_parts
from exporter.steppers.protocol import OnDevice


class TensorRTParts(PartsStepper[TensorRTStepper], OnDevice):
    """The engines of consecutive parts.

    Attributes:
        max_batch, max_seq_len: largest number of sequences and of new tokens in a step that every part takes.
        cache_capacity: cache rows per sequence, the same for every part.
    """

    max_seq_len: int

    def __init__(self, contract: Contract, steppers: Sequence[TensorRTStepper]) -> None:
        super().__init__(contract, steppers)
        for previous, stepper in itertools.pairwise(steppers):
            stepper.follow(previous)
        self.max_batch = min(stepper.max_batch for stepper in steppers)
        self.max_seq_len = min(stepper.max_seq_len for stepper in steppers)
        self.cache_capacity = steppers[0].cache_capacity

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(super().close)  # closes the stream after the buffers of all parts are freed
            for stepper in self.steppers:
                closing.callback(stepper.free)

    def import_tensor(self, x: Any) -> DeviceTensor:
        return self.steppers[0].import_tensor(x)

    def to_host(self, tensor: DeviceTensor) -> np.ndarray:
        return self.steppers[-1].to_host(tensor)

    def join(self, tensors: Sequence[DeviceTensor]) -> DeviceTensor:
        return self.steppers[-1].join(tensors)

    def run_on_device(self, feeds: Mapping[str, Any], cache: PartsCache, first_row: int = 0) -> dict[str, DeviceTensor]:
        return self.steppers[-1].run_on_device(self._advance(feeds, cache, first_row), cache.parts[-1], first_row)


def find_engines(
    bundle: Bundle, cache_capacity: int | None, verify: str = "graph", allow_host_code: bool = False
) -> list[EngineRecord]:
    """Returns the engine of each graph of a bundle that can be used here.

    Args:
        bundle: an opened bundle.
        cache_capacity: capacity that the engines must have; None takes any.
        verify: "full" also checks the checksums of the engines' files.
        allow_host_code: whether the engines may run code of their own on the CPU.

    Raises:
        BackendError: no engine of a graph can be used; the message has the reason for each one.
        BundleError: an engine is not the file that was built, or the engines have different cache capacities.
    """
    records = [find_engine(part, cache_capacity, verify, allow_host_code) for part in bundle.parts]
    capacities = sorted({record.decode_capacity() for record in records})
    if len(capacities) > 1:
        problem = f"its parts' engines have cache capacities {capacities}, expected one"
        raise BundleError(f"bundle {bundle.folder}: {problem}; build again")
    return records


def open_engines(bundle: Bundle, records: Sequence[EngineRecord], cuda: Cuda) -> TensorRTStepper | TensorRTParts:
    """Returns a stepper for the engines that `find_engines` has chosen.

    Raises:
        BackendError: TensorRT is not usable here.
        BundleError: an engine does not load, or has other tensors than the bundle.
    """
    chosen = iter(records)
    stepper = open_parts(bundle, lambda part: open_tensorrt(part, next(chosen), cuda))
    return TensorRTParts(bundle.manifest.contract, stepper.steppers) if isinstance(stepper, PartsStepper) else stepper
