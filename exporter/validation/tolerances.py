"""The tolerance ledger: what each comparison may differ by, beside the largest difference measured and the reason.

Two tables. Outputs: stage × unit × dtype, max |a − b| over real tokens relative to the rms of the reference. Operations: kind
× dtype × backend, what one operation may err by on the reference's own inputs, relative to the rms of the value's token.
What was measured, by scenario and by operation, over seeds and real weights, is in measured_errors.json, which
`python -m benchmarks.own.measured_errors` writes. Commands and tests read only this module.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from exporter.spec.unit import Unit

MEASURED_FILE = "measured_errors.json"


@dataclass(frozen=True)
class Tolerance:
    """An allowed error and where it comes from; both relative to the reference's rms.

    Attributes:
        allowed: the largest error that passes, in any scenario.
        measured: the largest error seen with random weights, by scenario.
        reason: what makes the error.
    """

    allowed: float
    measured: dict[str, float]
    reason: str


_FLOAT32 = "float32 sums taken in another order"
_FLOAT16 = "results rounded to half between operators, against float32 arithmetic over the same half weights"
_BFLOAT16 = "results rounded to bfloat16 after each layer, 8 times as coarse as half"
_TWIN = "the float32 twin of the graph: float32 sums taken in another order"
_BOTH = "both round to half, each in its own places"

# Stage → dtype → (what is allowed of each kind of unit, why). Random weights; real ones are judged by control, see below.
OUTPUTS: dict[tuple[str, str], dict[str, tuple[dict[str, float], str]]] = {
    ("eager", "onnxruntime"): {
        "fp32": ({"component": 1e-4, "block": 1e-4, "stack": 1e-4, "model": 1e-4}, _FLOAT32),
        "fp16": ({"component": 9e-3, "block": 6e-3, "stack": 9e-3, "model": 6e-3}, _FLOAT16),
        "bf16": ({"component": 1e-4, "block": 1e-4, "stack": 1e-4, "model": 1e-4}, _TWIN),
    },
    ("eager", "interpreter"): {
        "fp32": ({"component": 1e-4, "block": 1e-4, "stack": 1e-4, "model": 1e-4}, _FLOAT32),
        "fp16": ({"component": 9e-3, "block": 9e-3, "stack": 3e-2, "model": 1.2e-2}, _FLOAT16),
        "bf16": ({"component": 7e-2, "block": 7e-2, "stack": 2.5e-1, "model": 1e-1}, _BFLOAT16),
    },
    ("onnxruntime", "interpreter"): {
        "fp32": ({"component": 1e-4, "block": 1e-4, "stack": 1e-4, "model": 1e-4}, _FLOAT32),
        "fp16": ({"component": 1.2e-2, "block": 1.2e-2, "stack": 3e-2, "model": 1.5e-2}, _BOTH),
        "bf16": ({"component": 7e-2, "block": 7e-2, "stack": 2.5e-1, "model": 1e-1}, _BFLOAT16),
    },
}

# Trained weights can make a scenario ill-conditioned: SmolLM2's activations reach 24,000 = 60 × rms after block 3, and a
# relative change of 1e-6 in the input of its 30 blocks moves their output by up to 2e-4 of rms. No arithmetic meets a fixed
# bound there (measured: whole model fp16 3.0e-2, stack of its first 8 blocks fp16 1.1e-1 and fp32 3.4e-4). A graph that
# misses the table is therefore also judged against a control: the eager definition itself in another arithmetic (half for
# half graphs, float64 for float32 ones). The graph may be this many times as far from the reference as the control is:
# the reference strays as well, and which way each rounds is chance (2.1 times was seen, on the first 8 blocks at bf16).
CONTROL_FACTOR = 4.0


def tolerance(stage: tuple[str, str], unit: Unit, dtype: str) -> Tolerance:
    """What two backends may differ by in a unit's outputs and cache rows.

    Args:
        stage: the names of both backends, in either order. "tensorrt" is judged as "interpreter", which runs the same
            network; an engine may fuse, and so round less often. Nothing was measured on its hardware.
        unit: what they run.
        dtype: of the bundle.
    """
    first, second = sorted(("interpreter" if name == "tensorrt" else name for name in stage), key=_ORDER.index)
    if first == second:
        first, second = "eager", "interpreter"
    allowed, reason = OUTPUTS[first, second][dtype]
    measured = _measured()["outputs"].get(f"{first}-{second}", {}).get(unit.kind, {}).get(dtype, {})
    return Tolerance(allowed[unit.kind], measured, reason)


_ORDER = ("eager", "onnxruntime", "interpreter")


# --- operations ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """What one operation may err by, given the reference's own inputs.

    Attributes:
        error: max |a − b| relative to the rms of the value's token or the value's own size, whichever is larger.
        differing: share of elements that may differ from the definition's bit pattern, where each operation rounds once and
            in a fixed order; 1 where sums may be taken in any order.
        reason: what makes the error.
    """

    error: float
    differing: float
    reason: str


_KINDS = {
    "real": "exact", "visible": "exact", "cos": "exact", "sin": "exact", "embedding": "exact", "last_token": "exact",
    "reshape_q": "exact", "reshape_k": "exact", "reshape_v": "exact", "q_heads": "exact", "k_heads": "exact", "v_heads": "exact",
    "keys": "exact", "values": "exact", "merged": "exact", "hidden_states_out": "exact",
    "attention_norm": "norm", "ffn_norm": "norm", "norm": "norm",
    "q_proj": "projection", "k_proj": "projection", "v_proj": "projection", "o_proj": "projection", "gate_proj": "projection",
    "up_proj": "projection", "down_proj": "projection", "lm_head": "projection", "logits": "projection",
    "rope_q": "rope", "rope_k": "rope", "scores": "scores", "heads": "attention", "silu": "silu", "product": "product",
    "residual": "residual",
}  # fmt: skip

_ULP = {
    "fp32": 2.0**-24,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
}  # half a unit in the last place: what rounding once may cost

# Kind → what is allowed in half units of the last place, at fp32 / fp16 / bf16, and the share that may differ in bits at fp16
# and bf16. A figure of 1 is rounding once and nothing else.
OPERATIONS: dict[str, tuple[float, float, float, float, str]] = {
    "exact": (0.0, 0.0, 0.0, 0.0, "moved, not computed"),
    "norm": (16.0, 2.4, 2.4, 0.01, "two roundings, one before the weight; float32 statistics"),
    "projection": (512.0, 1.2, 1.2, 1.0, "a float32 sum in any order, rounded once"),
    "rope": (8.0, 1.2, 1.2, 0.01, "float32 rotation, rounded once"),
    "scores": (256.0, 24.0, 24.0, 1.0, "queries and keys each scaled by a rounded root of the scale, and rounded"),
    "attention": (512.0, 8.0, 8.0, 1.0, "rounded scores and weights; a float32 sum, rounded once"),
    "silu": (256.0, 2.4, 2.4, 1.0, "sigmoid and product each rounded"),
    "product": (2.0, 1.2, 1.2, 0.01, "rounded once"),
    "residual": (2.0, 1.2, 1.2, 0.01, "rounded once"),
}

# onnxruntime's CPU attention keeps scores in half: their rounding error grows with their size, 1.6e-2 at scores of 35.
_HALF_SCORES = ("onnxruntime", "attention", "fp16")
_HALF_SCORES_BUDGET = 80.0


def operation_kind(name: str) -> str:
    """The kind of a named value, such as "projection" for "blocks.3.mlp.up_proj"."""
    return _KINDS[name.rpartition(".")[2]]


# onnxruntime multiplies packed integers by their scales in float32 and never rounds the weight to half, as the graph says:
# closer to the checkpoint, and 1.1e-3 from the definition where rounding once costs 4.9e-4.
_PACKED_WEIGHTS = ("onnxruntime", "projection", "fp16")
_PACKED_WEIGHTS_BUDGET = 4.0


def operation_budget(name: str, dtype: str, backend: str, integer_weights: bool = False) -> Budget:
    """What the operation that makes a named value may err by on a backend.

    A bfloat16 bundle runs on onnxruntime as its float32 twin and is held to float32 there.
    """
    kind = operation_kind(name)
    *ulps, differing, reason = OPERATIONS[kind]
    through = "fp32" if (backend, dtype) == ("onnxruntime", "bf16") else dtype
    allowed = (
        _HALF_SCORES_BUDGET if (backend, kind, dtype) == _HALF_SCORES else ulps[("fp32", "fp16", "bf16").index(through)]
    )
    if integer_weights and (backend, kind, dtype) == _PACKED_WEIGHTS:
        allowed = _PACKED_WEIGHTS_BUDGET
    bitwise = differing if through != "fp32" else 1.0
    return Budget(allowed * _ULP[through], bitwise, reason)


@cache
def _measured() -> dict:
    return json.loads(resources.files("exporter.validation").joinpath(MEASURED_FILE).read_text(encoding="utf-8"))


def measured_operation_errors() -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """The largest error measured of each operation: backend → dtype → kind → {"error", "differing"}; real weights included."""
    return _measured()["operations"]


def measured_output_errors() -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """The largest error measured of outputs and cache rows: stage → unit → dtype → scenario; random weights."""
    return _measured()["outputs"]


# --- tokens ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgreementFloor:
    """What teacher-forced decoding of real text must reach against transformers in float32.

    Attributes:
        top1: least share of positions with the same most likely token.
        largest_kl: largest KL divergence at any position, nats.
        measured: top-1 and largest KL of the worst backend, on SmolLM2-135M (benchmarks/records/agreement.json).
    """

    top1: float
    largest_kl: float
    measured: tuple[float, float]


AGREEMENT = {
    "fp32": AgreementFloor(1.0, 1e-8, (1.0, 2.8e-10)),
    "fp16": AgreementFloor(0.97, 2e-3, (0.997, 2.6e-4)),
    "bf16": AgreementFloor(0.94, 5e-2, (0.962, 1.9e-2)),
}


def agreement_floor(dtype: str) -> AgreementFloor:
    return AGREEMENT[dtype]
