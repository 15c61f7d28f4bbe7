"""What one graph covers: a component, a block, a stack or a model, whole or in parts."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from exporter.common.errors import InputError
from exporter.common.plain_numbers import plain
from exporter.spec.catalogue import ModelConfig
from exporter.spec.limits import is_count

UNIT_KINDS = ("block", "stack", "model", "component")
COMPONENTS = ("prepare_qkv", "repeat_kv", "attention", "merge_project", "swiglu_mlp", "rms_norm")
LOGITS = ("last", "all")
CACHES = ("in_place", "growing")


@dataclass(frozen=True)
class Unit:
    """What one graph covers: a component, a block, a stack of blocks, or a whole model.

    Attributes:
        kind: "component", "block", "stack" or "model".
        component: name of the component where the kind is "component", else None.
        first_layer: index, in the model, of the first block covered; blocks are numbered from 0 inside the graph.
        n_layers: blocks covered; 1 for a component.
        logits: for a model, "last" (each row's last real token) or "all".
        cache: "in_place" is one buffer per tensor with a fixed capacity. "growing", for a model, is a past of P rows
            in and a present of P + T rows out, as optimum and onnxruntime-genai use it.
    """

    kind: str
    component: str | None = None
    first_layer: int = 0
    n_layers: int = 1
    logits: str = "last"
    cache: str = "in_place"

    @classmethod
    def parse(
        cls,
        text: str,
        config: ModelConfig,
        layers: str | None = None,
        logits: str | None = None,
        cache: str = "in_place",
    ) -> Unit:
        """Reads a unit, layers, logits and cache as a user writes them; the cache decides the default logits.

        Raises:
            InputError: the unit or component is unknown, or this model or unit does not have the layers.
        """
        kind, _, component = text.partition(":")
        if kind not in UNIT_KINDS or (":" in text and kind != "component"):
            raise InputError(f"unit: got {text!r}, expected block, stack, model or component:NAME")
        if kind == "component" and component not in COMPONENTS:
            raise InputError(f"component: got {component!r}, expected one of {', '.join(COMPONENTS)}")
        if cache not in CACHES:
            raise InputError(f"cache: got {cache!r}, expected one of {', '.join(CACHES)}")
        if cache == "growing" and (kind != "model" or logits == "last"):
            raise InputError(
                f"cache: got growing for unit {text} with logits {logits}, "
                "expected a model with all logits, as its drivers"
            )
        if logits is None:
            logits = "all" if cache == "growing" else "last"
        if logits not in LOGITS:
            raise InputError(f"logits: got {logits!r}, expected one of {', '.join(LOGITS)}")
        if logits != "last" and kind != "model":
            raise InputError(
                f"logits: got {logits!r} for unit {text}, expected a model; other units return hidden states"
            )
        single = kind in ("block", "component")
        first, stop = _parse_layers(layers, config.n_layers, single)
        if single and stop - first != 1:
            raise InputError(
                f"layers: got {layers!r} for unit {text}, expected one layer such as {first}:{first + 1}; "
                "use the unit stack for several"
            )
        if kind == "model" and first:
            raise InputError(
                f"layers: got {layers!r} for a model, which starts at layer 0; use the unit stack for a slice"
            )
        return cls(kind, component or None, first, stop - first, logits, cache)

    @property
    def has_cache(self) -> bool:
        """Whether the unit decodes over its own cache, updated in place."""
        return self.kind != "component" and self.cache == "in_place"

    def __str__(self) -> str:
        if self.kind == "component":
            return f"component:{self.component}"
        return f"{self.kind} of layers {self.first_layer}:{self.first_layer + self.n_layers}"


def _parse_layers(layers: str | None, n_layers: int, single: bool) -> tuple[int, int]:
    if layers is None:
        return (0, 1) if single else (0, n_layers)
    match = re.fullmatch(r"(?:(\d+):)?(\d+)", layers, re.ASCII)
    if match is None:
        raise InputError(f"layers: got {layers!r}, expected a count N or a range A:B of whole numbers")
    bounds = (int(match[1] or 0), int(match[2]))
    if not 0 <= bounds[0] < bounds[1] <= n_layers:
        raise InputError(f"layers: got {layers!r}, expected 0 <= A < B <= {n_layers}, the layers of this model")
    return bounds


Bounds = tuple[int, int]  # first layer of a part of a model, and the layer after its last, counted within the unit


def part_bounds(n_layers: int, n_parts: int) -> tuple[Bounds, ...]:
    """Cuts layers into consecutive parts of nearly equal length; longer parts come first.

    Raises:
        InputError: n_parts is below 1 or above the number of layers.
    """
    n_parts = plain(n_parts)
    if not is_count(n_parts) or n_parts > n_layers:
        raise InputError(f"parts: got {n_parts!r}, expected 1 to {n_layers}, the layers of this unit")
    length, longer = divmod(n_layers, n_parts)  # the first `longer` parts have one layer more
    starts = [part * length + min(part, longer) for part in range(n_parts + 1)]
    return tuple(itertools.pairwise(starts))
