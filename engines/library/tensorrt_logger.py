"""A TensorRT logger that keeps what was said, by severity, and prints nothing."""

from __future__ import annotations

from typing import Any


def create_logger(trt: Any) -> Any:
    """A logger for a TensorRT module that keeps what was said, by severity, and prints nothing."""

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message.strip())
            elif severity == trt.ILogger.WARNING:
                self.warnings.append(message.strip())

    return Logger()
