"""The agreement of two backends on real text, token by token. It shows how numerical error changes decoded text.

The reference is one backend's greedy continuation of each prompt. The candidate is given the same tokens, step by step,
and its logits are compared with the reference's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np

from exporter.spec.feeds import step_feeds
from exporter.steppers.protocol import Stepper

PROMPTS_FILE = "prompts.txt"


@dataclass(frozen=True)
class Agreement:
    """The agreement of a candidate's tokens with the reference's.

    Attributes:
        n_prompts, n_tokens: number of prompts, and of tokens after each prompt.
        top1: share of positions where both find the same token most likely.
        greedy_length: number of tokens before the first that differs from the reference, mean over prompts; n_tokens
            where all are equal.
        shortest_greedy_length: the smallest such number of any prompt.
        kl, largest_kl: mean and largest KL divergence of the candidate's distribution from the reference's, in nats.
    """

    n_prompts: int
    n_tokens: int
    top1: float
    greedy_length: float
    shortest_greedy_length: int
    kl: float
    largest_kl: float


def prompts() -> list[str]:
    """Returns the fixed prompts, which are the lines of a file."""
    return resources.files("exporter.measuring").joinpath(PROMPTS_FILE).read_text(encoding="utf-8").splitlines()


def measure_agreement(reference: np.ndarray, candidate: np.ndarray) -> Agreement:
    """Compares logits of the same positions: fp32 or fp64 [prompts, tokens, V]."""
    same = reference.argmax(-1) == candidate.argmax(-1)
    lengths = np.where(same.all(1), same.shape[1], (~same).argmax(1))
    kl = _kl_divergence(reference, candidate)
    return Agreement(
        n_prompts=same.shape[0],
        n_tokens=same.shape[1],
        top1=float(same.mean()),
        greedy_length=float(lengths.mean()),
        shortest_greedy_length=int(lengths.min()),
        kl=float(kl.mean()),
        largest_kl=float(kl.max()),
    )


def _kl_divergence(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """Returns Σ p · (log p − log q) over the vocabulary, at every position."""
    log_p, log_q = _log_softmax(reference), _log_softmax(candidate)
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def greedy_logits(
    stepper: Stepper, prompts: Sequence[Sequence[int]], n_tokens: int, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    """Continues prompts greedily in one batch, also after end tokens.

    Returns:
        Tokens: int64 [prompts, n_tokens], and the logits that they were chosen from: fp32 [prompts, n_tokens, V].
    """
    return _decode(stepper, prompts, n_tokens, capacity, None)


def forced_logits(stepper: Stepper, prompts: Sequence[Sequence[int]], tokens: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the logits of a backend that is given the reference's tokens.

    Args:
        stepper: the backend.
        prompts: the tokens of each prompt.
        tokens: int64 [prompts, n_tokens], the reference's tokens.
        capacity: cache rows per prompt.

    Returns:
        Logits: fp32 [prompts, n_tokens, V].
    """
    return _decode(stepper, prompts, tokens.shape[1], capacity, tokens)[1]


def _decode(
    stepper: Stepper, prompts: Sequence[Sequence[int]], n_tokens: int, capacity: int, forced: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(prompt) for prompt in prompts])
    x = np.zeros((len(prompts), lengths.max()), np.int64)
    for row, prompt in enumerate(prompts):
        x[row, : len(prompt)] = prompt
    cache = stepper.new_cache(len(prompts), capacity)
    past_lens, seq_lens = np.zeros_like(lengths), lengths
    tokens, logits = [], []
    for step in range(n_tokens):
        found = stepper.run(step_feeds("input_ids", x, past_lens, seq_lens), cache)["logits"]
        if found.ndim == 3:  # a model that returns all logits
            found = found[np.arange(len(found)), seq_lens - 1]
        logits.append(found)
        tokens.append(logits[-1].argmax(-1) if forced is None else forced[:, step])
        past_lens, seq_lens, x = past_lens + seq_lens, np.ones_like(lengths), tokens[-1][:, None]
    cache.free()
    return np.stack(tokens, 1), np.stack(logits, 1)
