"""Runs the launches of a step over cache rows, and checks that the outputs are finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engines.library.dlpack import DeviceRows, DeviceTensor
from exporter.bundle.bundle import Bundle
from exporter.common.errors import NumericalError
from exporter.spec.feeds import step_feeds
from exporter.steppers.protocol import Cache
from runtime.device_io import DeviceIO
from runtime.policy.launches import Launch


class Launcher:
    """Runs steps of one bundle over one cache. The caller has checked that the inputs fit."""

    def __init__(self, bundle: Bundle, device_io: DeviceIO, cache: Cache) -> None:
        contract = bundle.manifest.contract
        self._folder, self._device_io, self._cache = bundle.folder, device_io, cache
        self._input_name, self._output_name = contract.step_inputs[0].name, contract.step_outputs[0].name

    def run(
        self,
        launches: Sequence[Launch],
        sequences: Mapping[int, Any],
        past_lens: Mapping[int, int],
        names: Mapping[int, str],
        on_device: bool,
    ) -> dict[int, Any]:
        """Runs launches one after another. The launches of a row come in the order of its tokens.

        Args:
            launches: which cache rows run together.
            sequences: cache row → its new tokens int64 [T], or hidden states [T, E].
            past_lens: cache row → tokens that it holds.
            names: cache row → name of its sequence in an error message.
            on_device: whether the outputs stay on the device.

        Returns:
            Cache row → logits [V] of its last token, or hidden states [T, E].

        Raises:
            NumericalError: an output holds inf or NaN.
        """
        outputs: dict[int, list] = {}
        for launch in launches:
            batch = [_piece(sequences[row], launch) for row in launch.rows]
            seq_lens = [len(sequence) for sequence in batch]
            on_device_input = isinstance(batch[0], DeviceTensor)
            feeds = step_feeds(
                self._input_name,
                DeviceRows(batch, launch.width) if on_device_input else _right_padded(batch, launch.width),
                np.array([past_lens[row] + launch.start for row in launch.rows], np.int64),
                np.array(seq_lens, np.int64),
            )
            output, host_output = self._device_io.run(feeds, self._cache, launch.first, on_device)
            self._check_finite(host_output, launch, seq_lens, names)
            for index, row in enumerate(launch.rows):
                piece = self._device_io.real_output(output, index, seq_lens[index])
                outputs.setdefault(row, []).append(piece)
        return {row: self._device_io.joined(pieces) for row, pieces in outputs.items()}

    def _check_finite(self, output: np.ndarray, launch: Launch, seq_lens: list[int], names: Mapping[int, str]) -> None:
        """Checks the real tokens of a launch in a host copy of its output.

        Raises:
            NumericalError: some hold inf or NaN. The message names their sequences.
        """
        if np.isfinite(output).all():
            return
        bad = [
            names[row]
            for index, row in enumerate(launch.rows)
            if not np.isfinite(self._device_io.real_output(output, index, seq_lens[index])).all()
        ]
        if bad:
            raise NumericalError(
                f"{self._output_name}: inf or NaN in {', '.join(bad)}; the session is as before this step; "
                f"find the layer and operation with `python -m engines compare {self._folder} --audit`, "
                "or export with dtype bf16 or fp32"
            )


def _piece(sequence: Any, launch: Launch) -> Any:
    """Returns the tokens of a sequence that a launch takes."""
    start, stop = launch.start, launch.start + launch.width
    if start == 0 and len(sequence) <= stop:
        return sequence
    return sequence.elements(start, stop) if isinstance(sequence, DeviceTensor) else sequence[start:stop]


def _right_padded(sequences: list[np.ndarray], width: int) -> np.ndarray:
    """Stacks sequences [T, …] of up to `width` tokens into one zero-padded batch [B, width, …]."""
    batch = np.zeros((len(sequences), width, *sequences[0].shape[1:]), sequences[0].dtype)
    for row, sequence in enumerate(sequences):
        batch[row, : len(sequence)] = sequence
    return batch
