"""Checks what a caller gives to a step before anything is written. The checks are the same on every backend.

Hidden states may be host arrays or device tensors. Tokens are on the host when they reach this module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from engines.library.dlpack import DeviceTensor
from exporter.bundle.manifest import Manifest
from exporter.common.errors import InputError
from exporter.spec.dtypes import numpy_dtype


def as_array(x: object, subject: str) -> np.ndarray:
    """Returns what a caller gave as a host array.

    Args:
        x: what the caller gave.
        subject: its name in an error message.

    Raises:
        InputError: it is not a rectangular array, it asks for its gradient, or it has masked elements, which numpy
            would drop the mask of.
    """
    if _has_mask(x):
        raise InputError(f"{subject}: got an array with masked elements; fill them, or leave them out and give lengths")
    if getattr(x, "requires_grad", False):
        raise InputError(f"{subject}: got a tensor that asks for its gradient; give tensor.detach()")
    try:
        return np.asarray(_view_of_bfloat16(x))
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"{subject}: got no rectangular array ({error}); pad the rows on the right and give lengths"
        ) from None


def _has_mask(x: object) -> bool:
    """Whether an array, or one in lists or tuples, has masked elements."""
    if isinstance(x, np.ma.MaskedArray):
        return bool(np.ma.is_masked(x))
    return isinstance(x, list | tuple) and any(_has_mask(y) for y in x if isinstance(y, list | tuple | np.ndarray))


def _view_of_bfloat16(x: Any) -> Any:
    """Returns torch's bfloat16 tensors on the host as arrays, which torch itself does not; anything else as it is."""
    if str(getattr(x, "dtype", "")) != "torch.bfloat16":
        return x
    torch = sys.modules["torch"]  # it made the tensor
    return x.contiguous().view(torch.int16).numpy().view(numpy_dtype("bf16"))


class InputChecker:
    """Checks callers' arrays and turns them into rows of a step.

    A row is token ids int64 [T], or hidden states [T, E] in the bundle's dtype.

    Attributes:
        takes_tokens: whether the bundle is a model.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.takes_tokens = manifest.unit.kind == "model"
        self._dtype_name, self._dtype = manifest.dtype, numpy_dtype(manifest.dtype)
        self._hidden_size, self._vocab_size = manifest.config.hidden_size, manifest.config.vocab_size

    def one_token(self, x: np.ndarray | DeviceTensor) -> tuple[np.ndarray | DeviceTensor, bool]:
        """Returns a batch with an axis of one token, and whether x lacked it: tokens [B], or hidden states [B, E]."""
        hidden = (self._hidden_size,)
        if x.ndim != (1 if self.takes_tokens else 2) or (not self.takes_tokens and x.shape[1:] != hidden):
            return x, False
        axes = (x.shape[0], 1, *x.shape[1:])
        return (x.whole(*axes) if isinstance(x, DeviceTensor) else x.reshape(axes)), True

    def batch(self, x: np.ndarray | DeviceTensor) -> np.ndarray | DeviceTensor:
        """Checks dtype and shape of a batch, [B, T] or [B, T, E], and returns it.

        Raises:
            InputError: the dtype or the shape is wrong.
        """
        if not self._fits(x, n_axes=2):
            subject, expected = "hidden states", f"{self._dtype_name} [B, T, {self._hidden_size}]"
            if self.takes_tokens:
                subject, expected = "tokens", "integers [B, T] (decode: [B])"
            raise InputError(f"{subject}: got {x.dtype} {list(x.shape)}, expected {expected}")
        if 0 in x.shape:
            raise InputError(f"input: got shape {list(x.shape)}, expected at least one sequence and one token")
        return x

    def _fits(self, x: np.ndarray | DeviceTensor, n_axes: int) -> bool:
        """Whether x has `n_axes` axes for tokens, or one more for hidden states, in a dtype that the bundle takes."""
        if self.takes_tokens:
            return x.ndim == n_axes and x.dtype.kind in "iu"
        return x.ndim == n_axes + 1 and x.shape[-1] == self._hidden_size and x.dtype == self._dtype

    def lengths(self, lengths: Sequence[int] | np.ndarray | None, batch: int, width: int) -> list[int]:
        """Returns the number of real tokens in each row; None means that all are real.

        Raises:
            InputError: there is not one length for each row, or a length is outside 1 … width.
        """
        if lengths is None:
            return [width] * batch
        lengths = as_array(lengths, "lengths")
        if lengths.shape != (batch,) or lengths.dtype.kind not in "iu":
            raise InputError(
                f"lengths: got {lengths.dtype} {list(lengths.shape)}, expected integers [{batch}], one for each row"
            )
        if lengths.min() < 1 or lengths.max() > width:
            raise InputError(f"lengths: got {lengths.tolist()}, expected 1 to {width}, the tokens of a row")
        return lengths.tolist()

    def sequence(self, x: np.ndarray | DeviceTensor, name: str) -> np.ndarray | DeviceTensor:
        """Checks one sequence, [T] or [T, E], and returns it.

        Raises:
            InputError: the dtype or the shape is wrong, or a token is not in the vocabulary.
        """
        if not self._fits(x, n_axes=1) or 0 in x.shape:
            expected = "integers [T]" if self.takes_tokens else f"{self._dtype_name} [T, {self._hidden_size}]"
            raise InputError(f"{name}: got {x.dtype} {list(x.shape)}, expected {expected}, at least one token")
        return self.real(x, name)

    def real(self, x: np.ndarray | DeviceTensor, name: str) -> np.ndarray | DeviceTensor:
        """Checks the real tokens of a sequence and returns them as int64. Hidden states are returned as they are.

        Raises:
            InputError: a token is not in the model's vocabulary.
        """
        if isinstance(x, DeviceTensor) or not self.takes_tokens:
            return x
        wrong = (x < 0) | (x >= self._vocab_size)
        if wrong.any():
            step = int(np.flatnonzero(wrong)[0])
            raise InputError(
                f"tokens: got {x[step]} in {name} at {step}, expected 0 to {self._vocab_size - 1}, "
                "the model's vocabulary"
            )
        return x.astype(np.int64, copy=False)
