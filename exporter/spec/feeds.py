"""The feeds of one causal step: positions, write indices and mask from lengths alone."""

from __future__ import annotations

from typing import Any

import numpy as np


def step_feeds(
    name: str, x: Any, past_lens: np.ndarray, seq_lens: np.ndarray, left_pad: np.ndarray | int = 0
) -> dict[str, Any]:
    """Returns the feeds of one step over right-padded rows.

    Args:
        name: name of the graph's first input, "input_ids" or "hidden_states".
        x: token ids int64 [B, T] or hidden states [B, T, E]. Row b is real up to seq_lens[b] and padding from there on.
            It is an array, or a tensor of the stepper's own kind.
        past_lens: int64 [B], the cache rows in use before the step.
        seq_lens: int64 [B], the new tokens of each row, 1 to T.
        left_pad: int64 [B] or 0, the leading cache rows of each sequence that are padding.

    Returns:
        `name`, `position_ids` int64 [B, T] (0 at pads), `write_indices` int64 [B],
        `attention_mask` int64 [B, L] with L the longest total length.
    """
    first_real = np.broadcast_to(left_pad, past_lens.shape)[:, None]
    steps = np.arange(x.shape[1])
    rows = past_lens[:, None] + steps
    total_lens = (past_lens + seq_lens)[:, None]
    cached = np.arange(total_lens.max())
    return {
        name: x,
        "position_ids": np.where((rows >= first_real) & (steps < seq_lens[:, None]), rows - first_real, 0),
        "write_indices": past_lens.astype(np.int64),
        "attention_mask": ((cached >= first_real) & (cached < total_lens)).astype(np.int64),
    }


def real_tokens(feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Which tokens of the step are real: bool [B, T], those whose own cache row the mask allows."""
    mask, starts = feeds["attention_mask"], feeds["write_indices"]
    rows = starts[:, None] + np.arange(feeds["position_ids"].shape[1])
    return (rows < mask.shape[1]) & (np.take_along_axis(mask, np.minimum(rows, mask.shape[1] - 1), axis=1) == 1)
