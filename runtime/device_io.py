"""Takes a caller's tensors from device memory, and gives outputs back there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from engines.library.dlpack import DeviceTensor, is_device_tensor
from exporter.common.errors import InputError
from exporter.spec.tensors import SEQUENCE, TensorSpec
from exporter.steppers.protocol import OnDevice, Stepper
from runtime.inputs import as_array
from runtime.policy.launches import Launch


class DeviceIO:
    """Moves inputs and outputs between a caller and a stepper, on the host or on the device."""

    def __init__(self, stepper: Stepper, output: TensorSpec, takes_tokens: bool) -> None:
        """Prepares the transfers.

        Args:
            stepper: the stepper that runs the steps.
            output: the output of a step.
            takes_tokens: whether the inputs are token ids. These are always checked on the host.
        """
        self._stepper, self._output, self._takes_tokens = stepper, output, takes_tokens
        self._returns_last = output.name == "logits"

    def take(self, x: Any) -> np.ndarray | DeviceTensor:
        """Returns a caller's input as a host array, or as hidden states that stay on the device.

        Raises:
            InputError: it is not an array, or it is on the device and the backend takes host arrays only.
        """
        if not is_device_tensor(x):
            return as_array(x, "input")
        if not isinstance(self._stepper, OnDevice):
            raise InputError(
                f"device tensors: got one for the {self._stepper.backend} backend, expected numpy arrays; "
                "open it with backend='tensorrt'"
            )
        tensor = self._stepper.import_tensor(x)
        return self._stepper.to_host(tensor) if self._takes_tokens else tensor

    @property
    def max_seq_len(self) -> int | None:
        """The most new tokens of a sequence that one launch takes; None means any number."""
        return self._stepper.max_seq_len

    def check_rows(
        self, launches: Sequence[Launch], pieces: Sequence[Launch], seq_lens: Sequence[int], width: int
    ) -> None:
        """Checks that the result of a step over rows can be one tensor on the device.

        Args:
            launches: the launches of the step, before they are cut into pieces.
            pieces: the launches that run.
            seq_lens: real tokens of each row.
            width: tokens of the widest row, padding included.

        Raises:
            InputError: the bundle returns logits of all tokens, or the rows do not run together at their full width.
        """
        if self._returns_last and SEQUENCE in self._output.axes:
            raise InputError(
                "device tensors: this bundle returns logits of all tokens, expected the last; "
                "export it with logits='last'"
            )
        in_pieces = len(pieces) != len(launches) and not self._returns_last and len(set(seq_lens)) > 1
        if len(launches) > 1 or launches[0].width != width or in_pieces:
            raise InputError(
                "device tensors: this step needs its rows apart or trimmed, expected one run; "
                "use slots, or trim x to its longest row"
            )

    def joined(self, pieces: Sequence[Any]) -> Any:
        """Returns a row's output from the outputs of its pieces, in order."""
        return pieces[-1] if self._returns_last or len(pieces) == 1 else self.one_after_another(pieces)

    def one_after_another(self, tensors: Sequence[Any]) -> Any:
        """Returns one tensor with the tensors one after another along their first axis."""
        if isinstance(tensors[0], np.ndarray):
            return np.concatenate(tensors)
        assert isinstance(self._stepper, OnDevice), "`take` refuses device tensors for other steppers"
        return self._stepper.join(tensors)

    def run(self, feeds: Mapping[str, Any], cache: Any, first_row: int, on_device: bool) -> tuple[Any, np.ndarray]:
        """Runs one step; returns its output where the caller wants it, and in host memory."""
        if not on_device:
            output = self._stepper.run(feeds, cache, first_row)[self._output.name]
            return output, output
        assert isinstance(self._stepper, OnDevice), "`take` refuses device tensors for other steppers"
        output = self._stepper.run_on_device(feeds, cache, first_row)[self._output.name]
        return output, self._stepper.to_host(output)

    def real_output(self, output: np.ndarray | DeviceTensor, index: int, seq_len: int) -> Any:
        """Returns one row's logits [V] of its last token, or hidden states [T, E] of its real tokens.

        Args:
            output: the output of a launch.
            index: the row's place in the launch.
            seq_len: real tokens of the row.
        """
        if self._output.name == "logits" and SEQUENCE not in self._output.axes:
            return output.part(index) if isinstance(output, DeviceTensor) else output[index]
        if isinstance(output, DeviceTensor):
            real = output.part(index, seq_len)
            return real.part(seq_len - 1) if self._output.name == "logits" else real
        return output[index, seq_len - 1] if self._output.name == "logits" else output[index, :seq_len]


def all_on_device(inputs: Iterable[Any]) -> bool:
    """Whether the inputs of a step are on the device.

    Raises:
        InputError: some are on the device and some on the host.
    """
    on_device = [is_device_tensor(x) for x in inputs]
    if any(on_device) and not all(on_device):
        raise InputError("step: got inputs on the host and on the device, expected one or the other")
    return any(on_device)
