"""Runs code in a forked child: nothing is loaded again, and the parent survives whatever happens to the child."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import torch


def fork(body: Callable[[], int | None], output: int | None = None) -> int:
    """Starts `body` in a forked child; returns the child's process id.

    Args:
        body: function whose result is the child's exit code; the code is 99 where it raises.
        output: descriptor for the child's output; None drops the output.
    """
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # a fork has no OpenMP threads, and waiting for them never ends
            null = os.open(os.devnull, os.O_RDWR)
            for stream, target in ((0, null), (1, output), (2, output)):
                os.dup2(null if target is None else target, stream)
            sys.stderr = sys.__stderr__  # pytest's stream captures
            os._exit(body() or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(99)
    return child


def run_in_child(body: Callable[[], int | None]) -> int:
    """Runs `body` in a forked child; returns its exit code, 99 where it raised, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(body), 0)[1])
