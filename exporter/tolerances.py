"""The tolerance ledger: what each comparison may differ by, beside the largest difference measured and the reason.

Errors are max |a − b| over real tokens, relative to the rms of the reference. Commands and tests read only this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from exporter.contract import Unit


@dataclass(frozen=True)
class Tolerance:
    """An allowed error and where it comes from; both relative to the reference's rms."""

    allowed: float
    measured: float
    reason: str


_FLOAT32 = "float32 sums taken in another order"
_FLOAT16 = "eager rounds every operator's result to half; onnxruntime keeps float32 between fused operators"

EAGER_VS_ONNXRUNTIME: dict[tuple[str, str], Tolerance] = {
    **{(unit, "fp32"): Tolerance(1e-4, 0.0, _FLOAT32) for unit in ("block", "stack", "model", "component")},
    **{(unit, "fp16"): Tolerance(1e-2, 0.0, _FLOAT16) for unit in ("block", "stack", "model", "component")},
}


def eager_vs_onnxruntime(unit: Unit, dtype: str) -> Tolerance:
    """The tolerance of a unit's onnxruntime outputs and cache rows against eager; bf16 is compared as its float32 twin."""
    return EAGER_VS_ONNXRUNTIME[unit.kind, "fp32" if dtype == "bf16" else dtype]
