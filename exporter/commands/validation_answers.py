"""The two answers of a validation in words, and the arguments that limit the second."""

from __future__ import annotations

import argparse

from exporter.common import terminal
from exporter.validation.comparison import meaning_sentence


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that limit what the dtype and format of a whole model may cost."""
    parser.add_argument(
        "--max-kl",
        type=float,
        metavar="NATS",
        help="fail where the KL divergence from the float32 definition is larger at any position (default: report it)",
    )
    parser.add_argument(
        "--min-agreement",
        type=float,
        metavar="SHARE",
        help="fail where fewer tokens than this share, 0 to 1, agree with the float32 definition (default: report it)",
    )


def say_answers(section: dict) -> None:
    """Prints both answers of a validation, and what it warns of.

    Args:
        section: the validation's section of report.json.
    """
    for line in answers(section):
        terminal.say(line)


def answers(section: dict) -> list[str]:
    """Returns both answers in sentences, and what the validation warns of."""
    meaning, cost = section["meaning"], section["cost"]
    lines = [meaning_sentence(meaning), *(f"  {line}" for line in meaning["failures"]), _cost(cost)]
    lines += [f"  {line}" for line in cost["failures"]] + [f"  note: {line}" for line in cost["warnings"]]
    return lines


def _cost(cost: dict) -> str:
    error = "results that are not finite" if cost["max_error"] is None else f"{cost['max_error']:.1e} of rms at most"
    parts = [f"what does {cost['dtype']} cost? {error}"]
    largest = cost["largest_value"]
    if cost["headroom"] is not None:
        parts.append(
            f"largest value {largest['value']:,.0f} at {largest['name']}, {cost['headroom']:,.1f} times below 65,504"
        )
    agreement = cost["agreement"]
    if agreement is not None:
        parts.append(
            f"{agreement['top1']:.1%} of {agreement['n_prompts'] * agreement['n_tokens']} tokens agree, "
            f"KL at most {agreement['largest_kl']:.1e} nats"
        )
    return "; ".join(parts)
