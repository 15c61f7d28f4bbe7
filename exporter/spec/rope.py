"""Rotary position embedding: frequencies, Llama 3.1 scaling, and the float32 rotation table.

Features (2i, 2i+1) of a head are one complex number, turned by e^{i·pos·f_i} with f_i = theta^(-2i/head_dim)
(Su et al., "RoFormer", 2021; adjacent pairs as in Meta's Llama reference code).
"""

from __future__ import annotations

import math

import numpy as np

from exporter.spec.catalogue import ModelConfig, RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Angular step per position of each feature pair: float64 [D/2], radians."""
    freqs = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return freqs if scaling is None else _scale_llama3(freqs, scaling)


def _scale_llama3(freqs: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Slows long wavelengths by `factor`, keeps short ones, and blends between them (Llama 3.1's `use_scaled_rope`)."""
    turns = scaling.original_context_length * freqs / (2 * math.pi)  # turns within the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)  # 0: slowed, 1: kept
    return (1 - blend) * freqs / scaling.factor + blend * freqs


def rotation_table(config: ModelConfig, max_positions: int) -> np.ndarray:
    """The rotation R of every position: float32 [2 · max_positions, D/2, 2], (cos, sin) last.

    Angles are computed in float64 and rounded once: in half precision, cos is off by more than 0.7 at position 4,095.
    """
    angles = np.outer(
        np.arange(2 * max_positions), frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    )
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
