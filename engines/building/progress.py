"""Shows the progress of a build on stderr, and stops the build on a signal, through TensorRT's IProgressMonitor."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from exporter.common import signals, terminal


class BuildProgress:
    """Shows the phases of a build inside a `with` block. A signal (Ctrl-C) makes TensorRT stop at its next step.

    Attributes:
        monitor: object for `IBuilderConfig.progress_monitor`.
        interrupted: number of the signal that arrived; None where none did.
    """

    def __init__(self, trt: Any) -> None:
        self.interrupted: int | None = None
        steps = TextColumn("{task.completed}/{task.total}")
        columns = (TextColumn("{task.description}"), BarColumn(), steps, TimeElapsedColumn())
        hidden = not terminal.stderr.is_terminal
        self._bars = Progress(*columns, console=terminal.stderr, disable=hidden, transient=True)
        self.monitor = _monitor(trt, self)
        self._tasks: dict[str, Any] = {}

    def phase_started(self, name: str, parent: str | None, steps: int) -> None:
        self._tasks[name] = self._bars.add_task(("  " if parent else "") + name, total=steps)

    def step_done(self, name: str, step: int) -> bool:
        """Shows a step. Returns False to make TensorRT stop."""
        if name in self._tasks:
            self._bars.update(self._tasks[name], completed=step + 1)
        return self.interrupted is None

    def phase_ended(self, name: str) -> None:
        if name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))

    def __enter__(self) -> BuildProgress:
        self._bars.start()
        self._signals = contextlib.ExitStack()
        self._signals.enter_context(signals.on_signal(self._interrupt))
        return self

    def _interrupt(self, number: int) -> None:
        self.interrupted = number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.close()
        self._bars.stop()

    def raise_if_interrupted(self) -> None:
        if self.interrupted is not None:
            raise signals.Stopped(self.interrupted)


def _monitor(trt: Any, progress: BuildProgress) -> Any:
    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.phase_started(phase_name, parent_phase, num_steps)

        def phase_finish(self, phase_name: str) -> None:
            progress.phase_ended(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return progress.step_done(phase_name, step)

    return Monitor()
