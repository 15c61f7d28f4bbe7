"""Model geometries: the validated config every stage shares, and the catalogue of known models.

Nothing here imports more than the standard library.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass

from exporter.common.errors import InputError
from exporter.common.plain_numbers import make_plain

LARGEST_COUNT = 2**31 - 1  # larger sizes are mistakes, and tensors cannot index them
MOST_LAYERS = 10_000  # a file decides the number, and every tensor of every layer is listed
LARGEST_WHOLE = 2**53  # a float does not hold every larger whole number


def short(value: object) -> str:
    """Returns a value as text for a message, shortened: a hostile file may hold very long values."""
    try:
        text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a number of over 30 digits"
    except RecursionError:
        text = "something nested very deeply"
    return text if len(text) <= 80 else text[:80] + "…"


def _check_count(subject: str, value: object, largest: int = LARGEST_COUNT) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise InputError(f"{subject}: got {short(value)}, expected a whole number from 1 to {largest:,}")


def _check_number(subject: str, value: object) -> None:
    largest = LARGEST_WHOLE if isinstance(value, int) else sys.float_info.max
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= largest:
        raise InputError(f"{subject}: got {short(value)}, expected a finite number above 0")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1 frequency scaling ("llama3"): long wavelengths are slowed by `factor`, short wavelengths are kept.

    Attributes:
        factor: divisor of the frequencies whose wavelength exceeds `original_context_length / low_freq_factor`.
        low_freq_factor: see `factor`.
        high_freq_factor: wavelengths below `original_context_length / high_freq_factor` keep their frequency.
        original_context_length: tokens of the context the model was first trained on.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192

    def __post_init__(self) -> None:
        make_plain(self, *(field.name for field in dataclasses.fields(self)))
        for field in ("factor", "low_freq_factor", "high_freq_factor"):
            _check_number(f"rope_scaling {field}", getattr(self, field))
        _check_count("rope_scaling original_context_length", self.original_context_length)
        if self.factor < 1:
            raise InputError(f"rope_scaling factor: got {self.factor}, expected at least 1")
        if self.low_freq_factor >= self.high_freq_factor:
            raise InputError(
                f"rope_scaling: got low_freq_factor {self.low_freq_factor} "
                f"and high_freq_factor {self.high_freq_factor}, expected 0 < low < high; "
                "the blend between both bands is undefined otherwise"
            )


@dataclass(frozen=True)
class ModelConfig:
    """The geometry of one Llama-architecture model: everything the graph depends on, and nothing else.

    Raises:
        InputError: two fields contradict each other; the message names both numbers.
    """

    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        make_plain(self, *(field.name for field in dataclasses.fields(self)))
        _check_count("config n_layers", self.n_layers, MOST_LAYERS)
        for field in (
            "hidden_size",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "context_length",
        ):
            _check_count(f"config {field}", getattr(self, field))
        for field in ("rope_theta", "norm_eps"):
            _check_number(f"config {field}", getattr(self, field))
        if not isinstance(self.tie_word_embeddings, bool):
            raise InputError(
                f"config tie_word_embeddings: got {short(self.tie_word_embeddings)}, expected true or false"
            )
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise InputError(f"config rope_scaling: got {self.rope_scaling!r}, expected a RopeScaling or None")
        if self.n_heads % self.n_kv_heads:
            raise InputError(
                f"config heads: got n_heads {self.n_heads} and n_kv_heads {self.n_kv_heads}, "
                "expected n_heads to be a multiple of n_kv_heads; each KV head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise InputError(
                f"config head_dim: got {self.head_dim}, expected an even number; RoPE rotates pairs of features"
            )

    @property
    def n_rep(self) -> int:
        """Query heads per KV head."""
        return self.n_heads // self.n_kv_heads

    def to_dict(self) -> dict:
        """The config as plain JSON data; `from_dict` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict) -> ModelConfig:
        """Reads a config that `to_dict` wrote, and refuses unknown and missing keys.

        Raises:
            InputError: a key is unknown or missing, or the values contradict each other.
        """
        data = dict(_known_keys(cls, data, "config"))
        if data.get("rope_scaling") is not None:
            data["rope_scaling"] = RopeScaling(**_known_keys(RopeScaling, data["rope_scaling"], "config rope_scaling"))
        return cls(**data)


def _known_keys(kind: type, data: object, subject: str) -> dict:
    if not isinstance(data, dict):
        raise InputError(f"{subject}: got {type(data).__name__}, expected an object")
    fields = dataclasses.fields(kind)
    unknown = set(data) - {field.name for field in fields}
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    if unknown or required - set(data):
        raise InputError(
            f"{subject}: unknown keys {short(sorted(unknown))}, missing keys {sorted(required - set(data))}"
        )
    return data


@dataclass(frozen=True)
class WidthRule:
    """The rule that gives the width of a Llama MLP from the hidden size (FeedForward in Meta's reference code).

    Attributes:
        multiplier: `ffn_dim_multiplier`; None skips its step.
        multiple_of: the width is rounded up to a multiple of this.
    """

    multiplier: float | None
    multiple_of: int

    def steps(self, hidden_size: int) -> list[tuple[str, int]]:
        """The derivation as (calculation, result) pairs, one for each step; the last result is the width."""
        quadruple = 4 * hidden_size
        width = 2 * quadruple // 3
        steps = [(f"4 × {hidden_size:,}", quadruple), (f"⌊2/3 × {quadruple:,}⌋", width)]
        if self.multiplier is not None:
            scaled = int(self.multiplier * width)
            steps.append((f"⌊{self.multiplier} × {width:,}⌋", scaled))
            width = scaled
        rounded = self.multiple_of * math.ceil(width / self.multiple_of)
        steps.append((f"{self.multiple_of:,} × ⌈{width:,} / {self.multiple_of:,}⌉", rounded))
        return steps

    def width(self, hidden_size: int) -> int:
        """The MLP width of a model with this hidden size."""
        return self.steps(hidden_size)[-1][1]


WIDTH_RULES: dict[str, WidthRule] = {
    "llama3-8b": WidthRule(1.3, 1024),
    "llama3-70b": WidthRule(1.3, 4096),
    "llama3.1-8b": WidthRule(1.3, 1024),
    "llama3.1-70b": WidthRule(1.3, 4096),
    "llama3.1-405b": WidthRule(1.2, 4096),
    "llama3.2-1b": WidthRule(1.5, 256),
    "llama3.2-3b": WidthRule(1.0, 256),
    "smollm2-135m": WidthRule(None, 256),
}


def _llama3(
    name: str, hidden_size: int, n_layers: int, n_heads: int, scaling: float | None = None, tied: bool = False
) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden_size,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=hidden_size // n_heads,
        intermediate_size=WIDTH_RULES[name].width(hidden_size),
        vocab_size=128_256,
        context_length=8_192 if scaling is None else 131_072,
        rope_theta=500_000.0,
        rope_scaling=None if scaling is None else RopeScaling(factor=scaling),
        tie_word_embeddings=tied,
    )


CATALOGUE: dict[str, ModelConfig] = {
    "llama3-8b": _llama3("llama3-8b", 4096, 32, 32),
    "llama3-70b": _llama3("llama3-70b", 8192, 80, 64),
    "llama3.1-8b": _llama3("llama3.1-8b", 4096, 32, 32, scaling=8.0),
    "llama3.1-70b": _llama3("llama3.1-70b", 8192, 80, 64, scaling=8.0),
    "llama3.1-405b": _llama3("llama3.1-405b", 16384, 126, 128, scaling=8.0),
    "llama3.2-1b": _llama3("llama3.2-1b", 2048, 16, 32, scaling=32.0, tied=True),
    "llama3.2-3b": _llama3("llama3.2-3b", 3072, 28, 24, scaling=32.0, tied=True),
    "smollm2-135m": ModelConfig(
        hidden_size=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        intermediate_size=WIDTH_RULES["smollm2-135m"].width(576),
        vocab_size=49_152,
        context_length=8_192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    ),
}


def lookup(name: str) -> ModelConfig:
    """Returns the config of a model in the catalogue.

    Raises:
        InputError: the catalogue has no such model; the message lists its models.
    """
    if name not in CATALOGUE:
        known = ", ".join(CATALOGUE)
        raise InputError(
            f"model: got {name!r}, expected one of {known}; for another model give the folder of its checkpoint"
        )
    return CATALOGUE[name]
