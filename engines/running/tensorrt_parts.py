"""A unit in several engines run as one: on one stream, each part reading hidden states where the one before leaves them."""

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
        max_batch, max_seq_len, cache_capacity: what every part takes.
    """

    def __init__(self, contract: Contract, steppers: Sequence[TensorRTStepper]) -> None:
        super().__init__(contract, steppers)
        for previous, stepper in itertools.pairwise(steppers):
            stepper.follow(previous)
        self.max_batch = min(stepper.max_batch for stepper in steppers)
        self.max_seq_len = min(stepper.max_seq_len for stepper in steppers)
        self.cache_capacity = steppers[0].cache_capacity

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(super().close)  # the stream, once nothing of any part is left on it
            for stepper in self.steppers:
                closing.callback(stepper.free)

    def import_tensor(self, x: Any) -> DeviceTensor:
        return self.steppers[0].import_tensor(x)

    def to_host(self, tensor: DeviceTensor) -> np.ndarray:
        return self.steppers[-1].to_host(tensor)

    def run_on_device(self, feeds: Mapping[str, Any], cache: PartsCache, first_row: int = 0) -> dict[str, DeviceTensor]:
        return self.steppers[-1].run_on_device(self._advance(feeds, cache, first_row), cache.parts[-1], first_row)


def find_engines(bundle: Bundle, cache_capacity: int | None, verify: str = "graph") -> list[EngineRecord]:
    """The engine of each graph of a bundle that can be used here; raises as `find_engine`.

    Raises:
        BundleError: the parts' engines have different cache capacities.
    """
    records = [find_engine(part, cache_capacity, verify) for part in bundle.parts]
    capacities = sorted({record.decode_capacity() for record in records})
    if len(capacities) > 1:
        raise BundleError(
            f"bundle {bundle.folder}: its parts' engines have cache capacities {capacities}, expected one; build again"
        )
    return records


def open_engines(bundle: Bundle, records: Sequence[EngineRecord], cuda: Cuda) -> TensorRTStepper | TensorRTParts:
    """A stepper over the engines that `find_engines` has chosen; raises as `open_tensorrt`."""
    chosen = iter(records)
    stepper = open_parts(bundle, lambda part: open_tensorrt(part, next(chosen), cuda))
    return TensorRTParts(bundle.manifest.contract, stepper.steppers) if isinstance(stepper, PartsStepper) else stepper
