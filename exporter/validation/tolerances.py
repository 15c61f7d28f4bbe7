"""The tolerances: the largest error that each comparison allows, with the reason and the largest error measured.

There are three tables, all of them in this file and written by hand:

* OUTPUTS has the tolerance of a graph's outputs and cache rows, by the two backends compared, dtype and kind of unit.
  The error is max |a − b| over real tokens, relative to the rms of the reference.
* OPERATIONS has the budget of one operation, by kind and dtype. The operation gets the reference's own inputs, and the
  error is relative to the rms of the value's token.
* AGREEMENT has the floor of token agreement on real text, by dtype.

Where the numbers come from: `python -m benchmarks.own.measured_errors` runs every backend over many random seeds, and
over the real weights of a checkpoint. It writes the largest errors to measured_errors.json in this folder. Each
number of OUTPUTS and OPERATIONS is above the largest error of its row; a number of OUTPUTS is at most 100 times that
error. The tests check both. `python -m benchmarks.own.token_agreement` measures the third table.

How to renew them: after a change of the graph, of a backend or of the scenarios, run
`python -m benchmarks.own.measured_errors --checkpoint build/checkpoints/smollm2-135m`. It overwrites
measured_errors.json. Run tests/exporter/validation/test_tolerances.py next; where it fails, find the cause of the new
error, and change the number here only if the error is right. Commands and tests read both files through this module
only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from exporter.spec.unit import Unit
from exporter.validation.cpu_graph import TWIN, cpu_dtype

MEASURED_FILE = "measured_errors.json"


@dataclass(frozen=True)
class Tolerance:
    """What a comparison allows; errors are relative to the reference's rms.

    Attributes:
        allowed: largest error that passes, in any scenario.
        measured: largest error measured with random weights, by scenario.
        reason: cause of the error, in words.
    """

    allowed: float
    measured: dict[str, float]
    reason: str


_FLOAT32 = "float32 sums taken in another order"
_FLOAT16 = "results rounded to half between operators, against float32 arithmetic over the same half weights"
_BFLOAT16 = "results rounded to bfloat16 after each layer, 8 times as coarse as half"
_TWIN = f"the {TWIN} of the graph: {_FLOAT32}"
_BOTH = "both round to half, each in its own places"

VALIDATION_STAGE = ("eager", "onnxruntime")  # the two backends that every export compares

# Stage → dtype → (tolerance by kind of unit, reason), for random weights. Real weights may need a control: see
# control.py.
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


def tolerance(stage: tuple[str, str], unit: Unit, dtype: str) -> Tolerance:
    """Returns the tolerance for a unit's outputs and cache rows between two backends.

    Args:
        stage: the names of both backends, in either order. "tensorrt" has the tolerance of "interpreter", which runs
            the same network. An engine may fuse operations and so round less often. Its own errors were not measured.
        unit: the unit that both run.
        dtype: the bundle's dtype.
    """
    first, second = sorted(("interpreter" if name == "tensorrt" else name for name in stage), key=_ORDER.index)
    if first == second:
        first, second = "eager", "interpreter"
    allowed, reason = OUTPUTS[first, second][dtype]
    measured = _measured()["outputs"].get(f"{first}-{second}", {}).get(unit.kind, {}).get(dtype, {})
    return Tolerance(allowed[unit.kind], measured, reason)


_ORDER = ("eager", "onnxruntime", "interpreter")


# --- operations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """The error that one operation may make on the reference's own inputs.

    Attributes:
        error: largest |a − b| relative to the rms of the value's token or to the value's own size, whichever is larger.
        differing: share of elements that may differ from the definition in bits. It is 1 where sums may be taken in any
            order.
        reason: cause of the error, in words.
    """

    error: float
    differing: float
    reason: str


_NAMES = {
    "exact": "real visible cos sin embedding last_token reshape_q reshape_k reshape_v q_heads k_heads v_heads "
    "keys values merged hidden_states_out",
    "norm": "attention_norm ffn_norm norm",
    "projection": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head logits",
    "rope": "rope_q rope_k",
    "scores": "scores",
    "attention": "heads",
    "silu": "silu",
    "product": "product",
    "residual": "residual",
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}

# Half a unit in the last place, the largest error of rounding once.
_HALF_ULP = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}

# Kind → error allowed in half units in the last place for fp32, fp16 and bf16, share that may differ in bits for fp16
# and bf16, reason. An error of 1 is that of rounding once.
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

# onnxruntime's CPU attention keeps scores in half. Their rounding error grows with their size: it is 1.6e-2 at scores
# of 35.
_HALF_SCORES = ("onnxruntime", "attention", "fp16")
_HALF_SCORES_BUDGET = 80.0

# onnxruntime multiplies packed integers by their scales in float32 and skips the graph's rounding of the weight to
# half. The result is closer to the checkpoint. It differs from the definition by 1.1e-3, and the error of rounding once
# is 4.9e-4.
_PACKED_WEIGHTS = ("onnxruntime", "projection", "fp16")
_PACKED_WEIGHTS_BUDGET = 4.0


def operation_kind(name: str) -> str:
    """Returns the kind of a named value, such as "projection" for "blocks.3.mlp.up_proj"."""
    return _KINDS[name.rpartition(".")[2]]


def operation_budget(name: str, dtype: str, backend: str, integer_weights: bool = False) -> Budget:
    """Returns the budget of the operation that computes a named value on a backend.

    Args:
        name: name of the value.
        dtype: the bundle's dtype. On onnxruntime, the budget is for the dtype that onnxruntime computes in.
        backend: "onnxruntime" or "interpreter".
        integer_weights: whether the graph's weights are stored in integers.
    """
    kind = operation_kind(name)
    fp32, fp16, bf16, differing, reason = OPERATIONS[kind]
    computed_in = cpu_dtype(dtype) if backend == "onnxruntime" else dtype
    allowed = {"fp32": fp32, "fp16": fp16, "bf16": bf16}[computed_in]
    if (backend, kind, dtype) == _HALF_SCORES:
        allowed = _HALF_SCORES_BUDGET
    if integer_weights and (backend, kind, dtype) == _PACKED_WEIGHTS:
        allowed = _PACKED_WEIGHTS_BUDGET
    bitwise = differing if computed_in != "fp32" else 1.0
    return Budget(allowed * _HALF_ULP[computed_in], bitwise, reason)


@cache
def _measured() -> dict:
    return json.loads(resources.files("exporter.validation").joinpath(MEASURED_FILE).read_text(encoding="utf-8"))


def measured_operation_errors() -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Returns the largest error measured of each kind of operation, over random and real weights.

    The keys are backend, dtype, kind, and then "error" or "differing".
    """
    return _measured()["operations"]


def measured_output_errors() -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Returns the largest error measured of outputs and cache rows, over random weights.

    The keys are stage, kind of unit, dtype and scenario.
    """
    return _measured()["outputs"]


# --- tokens -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgreementFloor:
    """The least agreement with transformers in float32, where both decode the same real text.

    Attributes:
        top1: least share of positions where both find the same token most likely.
        largest_kl: largest KL divergence allowed at any position, in nats.
        measured: share and largest divergence of the worst backend, on SmolLM2-135M
            (benchmarks/records/agreement.json).
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
    """Returns the floor for a bundle's dtype."""
    return AGREEMENT[dtype]
