"""The folder of one case: its input, files outside of it, and checks that those were neither read nor changed."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.campaigns.hostile_input.doors import INPUT, OUTPUT, OUTSIDE
from benchmarks.campaigns.hostile_input.values import SECRET

FORBIDDEN_EVENTS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "pty.spawn",
)
FORBIDDEN_PATHS = ("/etc/hostname", "/proc/self/environ", "/proc/self/mem", "/dev/zero")
LONG_AGO = 946_684_800  # an access time that any read updates


class Watch:
    """Watches the audit events of a process: opened files and started programs. One is enough, since hooks stay."""

    def __init__(self) -> None:
        self.outside = ""
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple) -> None:
        if not self.outside:
            return
        if event in FORBIDDEN_EVENTS:
            self.seen.append(f"{event} {arguments[0]!r}"[:200])
        elif event == "open" and isinstance(arguments[0], str):
            path = os.path.realpath(arguments[0])
            if path.startswith(self.outside) or path in FORBIDDEN_PATHS or arguments[0] in FORBIDDEN_PATHS:
                self.seen.append(f"open {arguments[0]}")


@dataclass
class Sandbox:
    """A folder with a case's input, an empty output folder, an empty working folder, and secrets outside of them."""

    root: Path
    watch: Watch
    files: list[Path] = field(default_factory=list)

    def make(self) -> Path:
        """Empties the folder; returns the place for the input."""
        shutil.rmtree(self.root, ignore_errors=True)
        for name in (OUTPUT, OUTSIDE, "cwd", "tmp"):
            (self.root / name).mkdir(parents=True)
        outside = self.root / OUTSIDE
        (outside / "secret.bin").write_bytes((SECRET.encode() + b"\0" * 22) * 5000)
        (outside / "secret.json").write_text(
            f'{{"format_version": "{SECRET}", "eos_token_id": "{SECRET}", "files": ["{SECRET}"]}}'
        )
        self.files = [outside / "secret.bin", outside / "secret.json"]
        return self.root / INPUT

    @contextlib.contextmanager
    def closed(self, faults: list[str], said: list[str]) -> Iterator[None]:
        """Captures the body's output, then checks the folder.

        Args:
            faults: list that receives the faults.
            said: list that receives the text written to stderr.
        """
        for path in self.files:
            os.utime(path, (LONG_AGO, path.stat().st_mtime))
        before = {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in self.files}
        names = set(os.listdir(self.root))
        tempfile.tempdir = str(self.root / "tmp")
        self.watch.seen, self.watch.outside = [], str(self.root / OUTSIDE)
        streams = _Streams(self.root / "tmp" / "native")
        try:
            with streams:
                yield
        finally:
            self.watch.outside = ""
            said.append(streams.messages)
        faults += [f"forbidden: {event}" for event in self.watch.seen]
        faults += [f"outside: {path.name} was read" for path in self.files if path.stat().st_atime > LONG_AGO + 1]
        after = {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in self.files}
        faults += [f"outside: {path.name} was changed" for path in self.files if after[path] != before[path]]
        new = set(os.listdir(self.root)) - names | set(os.listdir(self.root / "cwd"))
        new |= set(os.listdir(self.root / OUTSIDE)) - {path.name for path in self.files}
        faults += [f"written outside of the output folder: {name}" for name in sorted(new)]
        if SECRET in streams.text:
            faults.append("the secret is in the messages")
        if self._secret_in_outputs():
            faults.append("the secret is in the output folder")

    def _secret_in_outputs(self) -> bool:
        files = (path for path in (self.root / OUTPUT).rglob("*") if path.is_file() and path.stat().st_size < 2**26)
        return any(SECRET.encode() in path.read_bytes() for path in files)


class _Streams:
    """Captures stdout and stderr, encoded as in a UTF-8 terminal, and file descriptor 2 for C++ libraries."""

    def __init__(self, native: Path) -> None:
        self._native, self.text, self.messages = native, "", ""

    def __enter__(self) -> _Streams:
        sys.stdout.flush()
        self._kept = sys.stdout, sys.stderr, os.dup(2)
        self._file = os.open(self._native, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(self._file, 2)
        self._out, self._err = io.BytesIO(), io.BytesIO()
        self._texts = (
            io.TextIOWrapper(self._out, "utf-8", errors="strict", write_through=True),
            io.TextIOWrapper(self._err, "utf-8", errors="backslashreplace", write_through=True),
        )
        sys.stdout, sys.stderr = self._texts
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr, descriptor = self._kept
        os.dup2(descriptor, 2)
        os.close(descriptor)
        os.lseek(self._file, 0, os.SEEK_SET)
        native = os.read(self._file, 2**22)
        os.close(self._file)
        self.messages = self._err.getvalue().decode("utf-8", "replace")
        self.text = "".join(
            part.decode("utf-8", "replace") for part in (self._out.getvalue(), self._err.getvalue(), native)
        )
