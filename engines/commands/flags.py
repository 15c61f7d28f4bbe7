"""Adds the flags of the command line to errors of library functions, which name arguments."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from exporter.common.errors import CheckFailed, InputError

FLAGS = {  # argument of a library function → flag of a command
    "allow_host_code": "--allow-host-code",
    "backend": "--backend",
    "max_batch": "--max-batch",
    "max_seq_len": "--max-seq-len",
    "cache_capacity": "--cache-capacity",
    "min_shapes": "--min-shapes",
    "opt_shapes": "--opt-shapes",
    "max_shapes": "--max-shapes",
    "workspace_mib": "--workspace",
    "builder_optimization_level": "--builder-optimization-level",
    "timing_cache": "--timing-cache",
    "version_compatible": "--version-compatible",
    "hardware_compatibility": "--hardware-compatibility",
    "strip_plan": "--strip-plan",
    "refit": "--refit",
    "profiling_verbosity": "--profiling-verbosity",
}


@contextlib.contextmanager
def flags_in_errors() -> Iterator[None]:
    """Adds to an error the flags of the arguments that its message names."""
    try:
        yield
    except (InputError, CheckFailed) as error:
        flags = flags_of(str(error))
        if flags:
            error.args = (f"{error} (on the command line: {', '.join(flags)})",)
        raise


def flags_of(message: str) -> list[str]:
    """The flags of the arguments in a message. An argument that is also an English word counts only before "="."""
    return [flag for name, flag in FLAGS.items() if re.search(rf"\b{name}" + (r"\b" if "_" in name else "="), message)]
