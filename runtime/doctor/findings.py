"""A finding: one line of what the doctor prints."""

from __future__ import annotations

from dataclasses import dataclass

GOOD, FACT, FAILED = "good", "fact", "failed"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: name of the check.
        state: "good", "failed", or "fact" for something that is not here and need not be.
        detail: what was found.
        fix: how to fix a failure; empty for the others.
    """

    name: str
    state: str
    detail: str
    fix: str = ""
