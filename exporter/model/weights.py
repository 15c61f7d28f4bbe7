"""Sources of weights: one interface that reads one tensor, or a slice of its rows or columns, at a time.

Names are canonical. Projections are [out, in], and rows of q and k are in Meta's order (adjacent RoPE pairs).
"""

from __future__ import annotations

import hashlib
import threading
from typing import Protocol

import torch
from torch import Tensor, nn

from exporter.common.errors import InputError
from exporter.common.plain_numbers import is_whole, plain
from exporter.model.components import canonical_name, eager_module
from exporter.spec.catalogue import ModelConfig
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.parameters import weight_shapes
from exporter.spec.unit import Unit

TORCH_DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class WeightSource(Protocol):
    """Weights of a whole model or of a part of it, by canonical name."""

    description: dict  # the entry of the manifest, such as {"source": "random", "seed": 0}
    has_own_head: bool  # whether the source of a tied model has a separate output head, "lm_head.weight"

    def read(self, name: str, columns: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        """Returns a tensor [out, in] or [out] in its stored dtype.

        Args:
            name: canonical name of the weight.
            columns: the slice of the last axis.
            rows: the slice of the first axis of a matrix.
        """
        ...


class RandomWeights:
    """Reproducible random weights. Each tensor depends on the seed and its own name only.

    Projections are N(0, 1/in), which keeps activations near 1. Vectors are spread around 1, so that a missing norm
    shows.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        seed = plain(seed)
        if not is_whole(seed) or seed < 0:
            raise InputError(f"seed: got {seed!r}, expected a whole number of at least 0")
        self.description = {"source": "random", "seed": seed}
        self.has_own_head = False
        self._seed = seed
        self._last: tuple[str, Tensor] | None = None  # several threads read the slices of one tensor after each other
        self._lock = threading.Lock()
        self._shapes = weight_shapes(config, Unit("model", n_layers=config.n_layers))

    def read(self, name: str, columns: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        with self._lock:
            if self._last is None or self._last[0] != name:
                self._last = (name, self._draw(name))
            noise = self._last[1]
        return (noise[columns] if noise.dim() == 1 else noise[rows, columns]).clone()

    def _draw(self, name: str) -> Tensor:
        shape = self._shapes[name]
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            noise.mul_(0.1).add_(1.0)
        elif name != "embedding.weight":
            noise.mul_(shape[-1] ** -0.5)
        return noise


class RoundedWeights:
    """The weights of another source, rounded to a bundle's dtype and widened to float32: those of its reference."""

    def __init__(self, weights: WeightSource, dtype: str) -> None:
        self.description, self.has_own_head = weights.description, weights.has_own_head
        self._weights, self._dtype = weights, TORCH_DTYPES[dtype]

    def read(self, name: str, columns: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        return self._weights.read(name, columns, rows).to(self._dtype).float()


def load_eager(spec: GraphSpec, weights: WeightSource) -> nn.Module:
    """Returns the eager module of a unit, its parameters filled from `weights` in the spec's dtype, ready to run."""
    dtype = TORCH_DTYPES[spec.dtype]
    with torch.device("meta"):
        module = eager_module(spec.config, spec.unit, spec.max_positions)
    stored = {name: weights.read(name).to(dtype) for name in spec.weight_shapes}
    if spec.config.tie_word_embeddings and spec.unit.kind == "model":
        own_head = weights.read("lm_head.weight").to(dtype) if weights.has_own_head else None
        stored["lm_head.weight"] = stored["embedding.weight"] if own_head is None else own_head
    names = {parameter: canonical_name(spec.unit, parameter) for parameter in module.state_dict()}
    assert set(names.values()) == set(stored), "every weight of the spec is a parameter of the eager module"
    state = {parameter: stored[name] for parameter, name in names.items()}
    module.load_state_dict(state, assign=True)
    return module.eval().requires_grad_(False)
