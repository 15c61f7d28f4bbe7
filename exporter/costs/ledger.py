"""The ledger of a model's costs, by component, with the calculation of each number. It is arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from exporter.spec.catalogue import ModelConfig, WidthRule
from exporter.spec.dtypes import DTYPES
from exporter.spec.parameters import COMPONENT_OF_WEIGHT, block_weight_shapes, weight_shapes
from exporter.spec.unit import Unit

_TITLES = {
    "attention_norm": "attention norm",
    "attention.q_proj": "query projection",
    "attention.k_proj": "key projection",
    "attention.v_proj": "value projection",
    "attention.o_proj": "output projection",
    "ffn_norm": "MLP norm",
    "mlp.gate_proj": "gate projection",
    "mlp.up_proj": "up projection",
    "mlp.down_proj": "down projection",
}


@dataclass(frozen=True)
class Row:
    """One weight matrix of a block.

    Attributes:
        component: the component that it belongs to.
        name: its name for people.
        calculation: its shape as text, inputs × outputs.
        parameters: number of its values.
    """

    component: str
    name: str
    calculation: str
    parameters: int


@dataclass(frozen=True)
class Ledger:
    """All costs of one model. Parameters are counts, sizes are bytes.

    Attributes:
        config: the model's geometry.
        rows: the weights of one block.
        width_steps: pairs (calculation, result) that lead to the MLP width; empty where no rule is known.
    """

    config: ModelConfig
    rows: tuple[Row, ...]
    width_steps: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, config: ModelConfig, rule: WidthRule | None = None) -> Ledger:
        """Returns the ledger of a model; `rule` is the rule that gives its MLP width, where one is known."""
        rows = tuple(_rows(config))
        return cls(config, rows, tuple(rule.steps(config.hidden_size)) if rule else ())

    def component_parameters(self, component: str) -> int:
        """Returns the parameters of one component of one block."""
        return sum(row.parameters for row in self.rows if row.component == component)

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.component for row in self.rows))

    @property
    def block_parameters(self) -> int:
        return sum(row.parameters for row in self.rows)

    @property
    def embedding_parameters(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def head_parameters(self) -> int:
        """Stored parameters of the output head: 0 where it is tied to the embedding."""
        return 0 if self.config.tie_word_embeddings else self.embedding_parameters

    @property
    def model_parameters(self) -> int:
        """Stored parameters of the whole model."""
        unit = Unit("model", n_layers=self.config.n_layers)
        return sum(math.prod(shape) for shape in weight_shapes(self.config, unit).values())

    @property
    def gelu_mlp(self) -> dict[str, int]:
        """Parameters of a two-matrix GELU MLP at this model's width and at the classic width 4d."""
        d, width = self.config.hidden_size, self.config.intermediate_size
        return {"same_width": 2 * d * width, "width_4d": 2 * d * 4 * d}

    def cache_bytes_per_token(self, dtype: str) -> int:
        """Returns the KV-cache bytes of one token of one sequence in all layers."""
        return 2 * self.config.n_layers * self.config.n_kv_heads * self.config.head_dim * DTYPES[dtype].n_bytes

    def flops_per_token(self, past_len: int) -> int:
        """Returns the floating-point operations of one decoded token that reads past_len + 1 keys, at batch 1.

        Each weight of a matrix product costs 2; the embedding look-up costs none. Each key costs 4 · H · D: the product
        Q Kᵀ and the product with V.
        """
        norms = self.component_parameters("attention_norm") + self.component_parameters("ffn_norm")
        matrices = self.config.n_layers * (self.block_parameters - norms) + self.embedding_parameters
        attention = 4 * self.config.n_heads * self.config.head_dim * (past_len + 1) * self.config.n_layers
        return 2 * matrices + attention

    def bytes_per_token(self, past_len: int, dtype: str) -> int:
        """Returns the bytes that one decoded token must move at batch 1.

        It reads every weight once, one row of the embedding, and past_len rows of cache. It writes one row of cache.
        """
        width = DTYPES[dtype].n_bytes
        rows = self.config.n_layers * self.block_parameters + self.config.hidden_size + self.config.hidden_size
        return (rows + self.embedding_parameters) * width + self.cache_bytes_per_token(dtype) * (past_len + 1)

    def to_dict(self, past_len: int) -> dict:
        """Returns the ledger as JSON data."""
        layers = self.config.n_layers
        return {
            "config": self.config.to_dict(),
            "mlp_width": [{"calculation": calculation, "result": result} for calculation, result in self.width_steps],
            "components": {
                component: {
                    "rows": [
                        {"name": row.name, "calculation": row.calculation, "parameters": row.parameters}
                        for row in self.rows
                        if row.component == component
                    ],
                    "per_block": self.component_parameters(component),
                    "all_blocks": self.component_parameters(component) * layers,
                    "per_block_bytes": {
                        name: self.component_parameters(component) * dtype.n_bytes for name, dtype in DTYPES.items()
                    },
                }
                for component in self.components
            },
            "gelu_mlp": {
                name: {"parameters": count, "bytes": {key: count * dtype.n_bytes for key, dtype in DTYPES.items()}}
                for name, count in self.gelu_mlp.items()
            },
            "block_parameters": self.block_parameters,
            "all_blocks_parameters": self.block_parameters * layers,
            "embedding_parameters": self.embedding_parameters,
            "final_norm_parameters": self.config.hidden_size,
            "head_parameters": self.head_parameters,
            "model_parameters": self.model_parameters,
            "model_bytes": {name: self.model_parameters * dtype.n_bytes for name, dtype in DTYPES.items()},
            "kv_cache": {
                name: {
                    "bytes_per_token": self.cache_bytes_per_token(name),
                    "context_length": self.config.context_length,
                    "bytes_per_sequence": self.cache_bytes_per_token(name) * self.config.context_length,
                }
                for name in DTYPES
            },
            "decode_token": {
                "past_len": past_len,
                "flops": self.flops_per_token(past_len),
                "bytes": {name: self.bytes_per_token(past_len, name) for name in DTYPES},
            },
        }


def _rows(config: ModelConfig) -> Iterator[Row]:
    for weight, shape in block_weight_shapes(config).items():
        name = weight.removesuffix(".weight")
        yield Row(COMPONENT_OF_WEIGHT[name], _TITLES[name], _calculation(config, name, shape), math.prod(shape))


def _calculation(config: ModelConfig, name: str, shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return f"{shape[0]:,}"
    outputs, inputs = shape
    if name in ("attention.k_proj", "attention.v_proj"):
        return f"{inputs:,} × ({config.n_kv_heads} × {config.head_dim})"
    return f"{inputs:,} × {outputs:,}"
