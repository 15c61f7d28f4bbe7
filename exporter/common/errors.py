"""The exceptions that the three stages raise on purpose; everything else that escapes is a defect.

The commands turn them into one line on stderr and an exit code: 2 for bad input, 1 for a check that failed.
"""


class InputError(ValueError):
    """The caller asked for something that cannot be: a bad argument, shape, name or length."""


class CheckpointError(InputError):
    """A checkpoint folder is missing, damaged, incomplete or of another architecture."""


class BundleError(InputError):
    """A bundle or one of its files is missing, damaged, of a newer format, or not what its manifest says."""


class BackendError(InputError):
    """A backend, provider or device was asked for that is not here or cannot run this bundle."""


class CheckFailed(RuntimeError):
    """A comparison or a check ran to its end and found a difference; the message names it."""


class NumericalError(RuntimeError):
    """A step produced inf or NaN for a row that holds real tokens."""


def together(subject: str, problems: list[str]) -> str:
    """A message that names every problem of one subject: one on the line itself, several below it."""
    if len(problems) == 1:
        return f"{subject}: {problems[0]}"
    return f"{subject}: {len(problems)} problems:\n  " + "\n  ".join(problems)
