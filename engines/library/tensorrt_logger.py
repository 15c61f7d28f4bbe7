"""A TensorRT logger that keeps errors and warnings, and prints nothing."""

from __future__ import annotations

from typing import Any

LONGEST_REASON = 300  # characters


def create_logger(trt: Any) -> Any:
    """Returns a logger for a TensorRT module. The logger keeps errors and warnings, and prints nothing."""

    class Logger(trt.ILogger):
        """Keeps what TensorRT logs.

        Attributes:
            warnings: all warnings, in order.
        """

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.warnings: list[str] = []
            self._errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self._errors.append(message.strip())
            elif severity == trt.ILogger.WARNING:
                self.warnings.append(message.strip())

        def reason(self) -> str:
            """Returns why a call just failed: the first error since the last reason, because it causes the later ones.

            The errors are forgotten, so that the next call that fails gets a reason of its own.
            """
            errors, self._errors = self._errors, []
            first = next((line for error in errors for line in error.splitlines() if line), "no reason given")
            return first[:LONGEST_REASON]

    return Logger()
