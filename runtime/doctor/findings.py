"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass

GOOD, FACT, FAILED = "good", "fact", "failed"


@dataclass(frozen=True)
class Finding:
    """What was looked at and how it is.

    Attributes:
        name: what was looked at.
        state: "good", "failed", or "fact": something that is not here, which is no error.
        detail: what was found.
        fix: what to do about a failure; empty for the others.
    """

    name: str
    state: str
    detail: str
    fix: str = ""
