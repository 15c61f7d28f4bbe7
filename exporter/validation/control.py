"""Judging by a control: the eager definition in another arithmetic shows how far weights amplify rounding."""

from __future__ import annotations

import dataclasses

import numpy as np

from exporter.validation.comparison import Comparison, compare
from exporter.validation.recording import Recording
from exporter.validation.tolerances import CONTROL_FACTOR, Tolerance


def judge_by_control(comparisons: list[Comparison], reference: Recording, control: Recording) -> list[Comparison]:
    """Widens what is allowed of each tensor to CONTROL_FACTOR times the control's own largest error in any scenario."""
    strayed: dict[str, float] = {}
    for comparison in compare(reference, control, Tolerance(0.0, {}, "control")):
        strayed[comparison.tensor] = max(strayed.get(comparison.tensor, 0.0), comparison.max_error)
    return [
        dataclasses.replace(c, allowed=max(c.allowed, CONTROL_FACTOR * strayed[c.tensor]))
        if np.isfinite(strayed[c.tensor])
        else c
        for c in comparisons
    ]
