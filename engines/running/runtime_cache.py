"""The runtime cache of TensorRT-RTX: kernels that it compiled for an engine here, in a file beside the engine.

The file is one line of JSON, a line feed, and the cache. The line says which engine and version the cache is of, and
has its checksum. A file that does not fit is not used, and the next one replaces it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from exporter.bundle.engine_records import EngineRecord, runtime_cache_name
from exporter.common.documents import is_inside
from exporter.common.errors import InputError
from exporter.placing.files import put_file_in_place
from exporter.placing.temporaries import temporary_file

log = logging.getLogger(__name__)


class RuntimeCacheFile:
    """The file of one engine's runtime cache."""

    def __init__(self, folder: Path, record: EngineRecord) -> None:
        self._path = folder / runtime_cache_name(record.file)
        self._origin = {"backend": record.backend, "version": record.version, "engine_sha256": record.sha256}
        self._saved: str | None = None  # checksum of the cache in the file

    def load(self, cache: Any) -> bool:
        """Loads the file into an `IRuntimeCache`. Returns whether it was there and fits."""
        try:
            if not is_inside(self._path, self._path.parent):
                raise ValueError("it is a link out of its folder")
            header, _, content = self._path.read_bytes().partition(b"\n")
            checksum = hashlib.sha256(content).hexdigest()
            if json.loads(header) != self._origin | {"sha256": checksum}:
                raise ValueError("it is of another engine or version, or it is damaged")
            if not cache.deserialize(content):
                raise ValueError("TensorRT-RTX refuses it here")
        except FileNotFoundError:
            return False
        except (OSError, ValueError, RecursionError) as error:
            log.info("runtime cache %s: not used, %s; kernels are compiled again", self._path, error)
            return False
        self._saved = checksum
        return True

    def save(self, cache: Any) -> None:
        """Replaces the file where the cache changed. A folder that cannot be written is no error, only slower."""
        content = bytes(cache.serialize() or b"")
        checksum = hashlib.sha256(content).hexdigest()
        if not content or checksum == self._saved:
            return
        header = json.dumps(self._origin | {"sha256": checksum}).encode()
        try:
            if not is_inside(self._path, self._path.parent):
                raise InputError("it is a link out of its folder")
            with temporary_file(self._path.parent, self._path.name) as temporary:
                temporary.write_bytes(header + b"\n" + content)
                put_file_in_place(temporary, self._path)
        except (OSError, InputError) as error:
            log.info("runtime cache %s: not saved, %s; the next session compiles kernels again", self._path, error)
            return
        self._saved = checksum
