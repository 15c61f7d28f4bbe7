"""The exceptions that the three stages raise on purpose. Any other exception is a bug.

The commands turn them into one line on stderr and an exit code: 2 for bad input, 1 for a check that failed.
"""


class InputError(ValueError):
    """The caller asked for something impossible: a bad argument, shape, name or length."""


class CheckpointError(InputError):
    """A checkpoint folder is missing, damaged, incomplete or of another architecture."""


class BundleError(InputError):
    """A bundle or one of its files is missing, damaged, of a newer format, or differs from its manifest."""


class BackendError(InputError):
    """A requested backend, provider or device is not here or cannot run this bundle."""


class CheckFailed(RuntimeError):
    """A comparison or a check found a difference; the message names it."""


class NumericalError(RuntimeError):
    """A step produced inf or NaN for a row that holds real tokens."""


def together(subject: str, problems: list[str]) -> str:
    """Returns a message with every problem of one subject.

    A single problem is on the same line, several are below it.
    """
    if len(problems) == 1:
        return f"{subject}: {problems[0]}"
    return f"{subject}: {len(problems)} problems:\n  " + "\n  ".join(problems)
