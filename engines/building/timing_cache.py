"""The timing cache of a build: a file with kernel timings that TensorRT reads and extends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from exporter.common.errors import InputError
from exporter.placing.files import put_file_in_place
from exporter.placing.temporaries import temporary_file


def load_timing_cache(path: Path, config: Any, say: Callable[[str], None]) -> None:
    """Gives the builder config the timing cache of a file. A missing or unusable file gives a new cache."""
    content = path.read_bytes() if path.is_file() else b""
    cache = config.create_timing_cache(content)
    if cache is None or not config.set_timing_cache(cache, False):
        say(f"warning: timing cache {path} is damaged or from another TensorRT; it will be replaced")
        config.set_timing_cache(config.create_timing_cache(b""), False)


def save_timing_cache(path: Path, config: Any) -> None:
    """Replaces the file in one step with the timings that the builder config has after the build.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        with temporary_file(path.parent, path.name) as temporary:
            temporary.write_bytes(memoryview(config.get_timing_cache().serialize()))
            put_file_in_place(temporary, path)
    except InputError as error:
        raise InputError(f"timing cache {path}: {error}") from None
