"""How many processors a process may use, in made-up control groups; and that onnxruntime gets that number."""

from __future__ import annotations

import os

import onnxruntime
import pytest

from exporter.common import processors
from exporter.common.processors import usable_processors
from exporter.steppers import onnxruntime_stepper
from runtime import DecodeSession

V2 = {"proc/self/cgroup": "0::/pods/one\n"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/pods/one\n4:memory:/other\n0::/\n"}
MOUNT = "sys/fs/cgroup"


def v1(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    place = f"{MOUNT}/{folder}"
    return {f"{place}/cpu.cfs_quota_us": f"{quota}\n", f"{place}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({**V2, f"{MOUNT}/pods/one/cpu.max": "max 100000\n"}, 8),
        ({**V2, f"{MOUNT}/pods/one/cpu.max": "300000 100000\n"}, 3),
        ({**V2, f"{MOUNT}/pods/one/cpu.max": "350000 100000\n", f"{MOUNT}/cpu.max": "max 100000\n"}, 3),
        ({**V2, f"{MOUNT}/pods/one/cpu.max": "max 100000\n", f"{MOUNT}/pods/cpu.max": "200000 100000\n"}, 2),
        ({**V2, f"{MOUNT}/cpu.max": "100000 50000\n"}, 2),
        ({**V2, f"{MOUNT}/cpu.max": "50000 100000\n"}, 1),
        ({**V2, f"{MOUNT}/cpu.max": "9900000 100000\n"}, 8),
        ({**V2, f"{MOUNT}/cpu.max": "words that are none\n"}, 8),
        ({**V2, f"{MOUNT}/cpu.max": "0 0\n"}, 8),
        ({**V1, **v1("cpu,cpuacct/pods/one", -1)}, 8),
        ({**V1, **v1("cpu,cpuacct/pods/one", 400_000)}, 4),
        ({**V1, **v1("cpu", 200_000)}, 2),
        ({"proc/self/cgroup": "3:cpuset:/x\n", **v1("cpu", 200_000)}, 8),
        ({"proc/self/cgroup": "0::/../../up\n", f"{MOUNT}/cpu.max": "200000 100000\n"}, 2),
    ],
    ids=str,
)
def test_the_smallest_quota_counts(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_processors(tmp_path) == expected


def test_an_affinity_to_fewer_processors_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert usable_processors(tmp_path) == 1 and processors.limited_threads() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(processors, "usable_processors", lambda: 8)
    assert processors.limited_threads() is None


@pytest.mark.parametrize(
    ("threads", "limit", "expected"), [(None, None, 0), (None, 3, 3), (2, 3, 2), (5, 3, 5), (1, None, 1)]
)
def test_onnxruntime_gets_the_threads_that_were_asked_for_or_the_quota(
    tiny_bundle, monkeypatch, threads, limit, expected
):
    monkeypatch.setattr(onnxruntime_stepper, "limited_threads", lambda: limit)
    made = []

    class Session(onnxruntime.InferenceSession):
        def __init__(self, graph, options, **named):
            made.append(options.intra_op_num_threads)
            super().__init__(graph, options, **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    with DecodeSession.open(tiny_bundle("block").folder, cache_capacity=16, threads=threads) as session:
        assert made == [expected]
        assert ("thread" in session.description) == (threads is not None)
