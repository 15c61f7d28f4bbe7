"""The peak memory that a process reports is its own."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from exporter.common.memory import peak_memory_bytes
from tests.conftest import ROOT

REPORT = "from exporter.common.memory import peak_memory_bytes; print(peak_memory_bytes())"


def test_a_small_process_that_a_large_one_starts_reports_its_own_peak():
    ballast = np.ones(50_000_000)  # 400 MB
    child = subprocess.run([sys.executable, "-c", REPORT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 1e6 < int(child.stdout) < 200e6 < ballast.nbytes < peak_memory_bytes()


def test_the_peak_stays_when_the_memory_is_given_back():
    before = peak_memory_bytes()
    np.ones(2 * before // 8)
    assert peak_memory_bytes() > 2 * before
