"""The identity of a graph: everything that decides its nodes, its tensors and its contract."""

from __future__ import annotations

from dataclasses import dataclass, replace

from exporter.common.errors import InputError
from exporter.spec.catalogue import ModelConfig
from exporter.spec.dtypes import lookup_dtype
from exporter.spec.limits import check_max_positions
from exporter.spec.parameters import weight_shapes
from exporter.spec.tensors import Contract, graph_contract, part_contract
from exporter.spec.unit import Bounds, Unit
from exporter.spec.weight_formats import WeightFormat


@dataclass(frozen=True)
class GraphSpec:
    """What is exported, without the values of its weights. Equal specs give equal graphs.

    The constructor checks nothing: a manifest builds a spec from a file first and checks it afterwards. `checked` is
    for values that a user gave.

    Attributes:
        config: the geometry of the whole model.
        unit: the part of the model that the graph covers.
        dtype: dtype name of weights, hidden states and cache. References also use "fp64".
        max_positions: N. Positions 0 to 2N − 1 have a rotation, and a cache holds at most N rows.
        float32_attention: whether the inputs of attention are cast to float32, and its result back to `dtype`.
        weight_format: the integer format of the projections and the output head; None stores them in `dtype`.
    """

    config: ModelConfig
    unit: Unit
    dtype: str
    max_positions: int
    float32_attention: bool = False
    weight_format: WeightFormat | None = None

    @classmethod
    def checked(
        cls,
        config: ModelConfig,
        unit: Unit,
        dtype: str = "fp16",
        max_positions: int | None = None,
        attention_dtype: str | None = None,
        weight_format: WeightFormat | None = None,
    ) -> GraphSpec:
        """Returns a spec whose values are checked and whose defaults are filled in.

        Args:
            config: the geometry of the whole model.
            unit: the part of the model that the graph covers.
            dtype: "fp16", "fp32" or "bf16".
            max_positions: None means 8,192, or the context of the model where that is shorter.
            attention_dtype: None means `dtype`; "fp32" computes attention in float32, and the rest in `dtype`.
            weight_format: the integer format of the matrices; None stores them in `dtype`.

        Raises:
            InputError: a dtype, the number of positions or the format is not one that can be exported.
        """
        lookup_dtype(dtype)
        if attention_dtype not in (None, dtype, "fp32"):
            raise InputError(f"attention dtype: got {attention_dtype!r}, expected {dtype} or fp32")
        max_positions = check_max_positions(max_positions, config)
        if weight_format is not None:
            weight_format.check(config)
        float32_attention = attention_dtype not in (None, dtype)
        return cls(config, unit, dtype, max_positions, float32_attention, weight_format)

    @property
    def attention_dtype(self) -> str:
        """The dtype name that attention is computed in."""
        return "fp32" if self.float32_attention else self.dtype

    @property
    def contract(self) -> Contract:
        """The inputs and outputs of the graph."""
        return graph_contract(self.config, self.unit, self.dtype)

    def part_contract(self, bounds: Bounds) -> Contract:
        """The inputs and outputs of one part of the graph; cache tensors keep the numbers of the whole unit."""
        if bounds == (0, self.unit.n_layers):
            return self.contract
        return part_contract(self.config, self.unit, self.dtype, bounds)

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights of the unit: canonical name → shape, [out, in] for projections."""
        return weight_shapes(self.config, self.unit)

    def in_dtype(self, dtype: str) -> GraphSpec:
        """The same graph in another dtype, such as the float32 reference of a half-precision graph."""
        return replace(self, dtype=dtype)

    def in_place(self) -> GraphSpec:
        """The same graph with a cache that is updated in place."""
        return replace(self, unit=replace(self.unit, cache="in_place"))
