"""A small, seeded soak of benchmarks/campaigns: no wrong token and no lost slot, whatever fails."""

from __future__ import annotations

import os

import pytest

from benchmarks.campaigns.openings import Opening, check_nothing_left, open_and_close
from benchmarks.campaigns.soak import CAPACITY, MAX_BATCH, Server, slope_per_hour
from exporter.common.errors import CheckFailed
from runtime import DecodeSession
from tests.support.slot_sessions import on_onnxruntime, on_the_tensorrt_double

pytestmark = pytest.mark.slow


def served(open_backend, bundle, n_requests: int) -> Server:
    with open_backend(bundle, max_batch=MAX_BATCH, cache_capacity=CAPACITY) as session:
        server = Server(session, seed=0)
        server.run(lambda number: number < n_requests)
    return server


@pytest.mark.parametrize(
    ("open_backend", "unit", "n_requests"),
    [(on_onnxruntime, "model", 60), (on_onnxruntime, "stack", 15), (on_the_tensorrt_double, "model", 10)],
    ids=["onnxruntime-model", "onnxruntime-stack", "double-model"],
)
def test_threads_faults_and_bad_requests_at_random_give_no_wrong_token_and_lose_no_slot(
    tiny_bundle, open_backend, unit, n_requests
):
    counts = served(open_backend, tiny_bundle(unit), n_requests).counts
    assert counts["requests"] == n_requests and counts["outputs checked"] > 4 * n_requests
    kinds = {name.split(":")[0] for name in counts}
    assert kinds >= {"steps", "finished", "refused"}  # other kinds depend on the order of the threads
    assert n_requests < 60 or "fault" in kinds


def test_a_soak_finds_a_wrong_token(tiny_bundle, monkeypatch):
    """A state is imported without its cache rows, so its sequence continues from zeros."""
    with on_onnxruntime(tiny_bundle("model"), max_batch=MAX_BATCH, cache_capacity=CAPACITY) as session:
        server = Server(session, seed=0)
        monkeypatch.setattr(session._cache, "write", lambda *_: None)
        with pytest.raises(CheckFailed, match="off by"):
            server.run(lambda number: number < 60)


def test_the_slope_is_taken_from_the_second_half():
    assert slope_per_hour([(0, 0), (1, 900), (2, 1000), (3, 1010), (4, 1020)]) == pytest.approx(36_000)


def test_openings_give_right_outputs_and_leave_nothing_open(tiny_bundle, tmp_path):
    opened = open_and_close([tiny_bundle("model"), tiny_bundle("stack")], 40, tmp_path)
    assert sum(opened["kinds"].values()) == 40
    assert sum(name.startswith("refused") for name in opened["kinds"]) == 5


def test_openings_find_a_file_that_stays_open(tiny_bundle, tmp_path, monkeypatch):
    left = []
    close = DecodeSession.close
    monkeypatch.setattr(
        DecodeSession, "close", lambda session: (left.append(os.open(os.devnull, os.O_RDONLY)), close(session))
    )
    with pytest.raises(CheckFailed, match="descriptors grew"):
        open_and_close([tiny_bundle("model")], 20, tmp_path)
    for descriptor in left:
        os.close(descriptor)


def test_openings_find_a_wrong_output(tiny_bundle, monkeypatch):
    step = DecodeSession.step
    monkeypatch.setattr(
        DecodeSession, "step", lambda session, inputs: {slot: x + 1e-3 for slot, x in step(session, inputs).items()}
    )
    with pytest.raises(CheckFailed, match="off by"):
        Opening(tiny_bundle("model")).open("eager", closed_by_an_error=False)


def test_openings_find_growing_memory():
    tenths = [{"descriptors": 9, "threads": 3, "resident_bytes": 10**8 + tenth * 24_000 * 100} for tenth in range(10)]
    with pytest.raises(CheckFailed, match="bytes an opening"):
        check_nothing_left(tenths, 1000)
    check_nothing_left(tenths[:1] * 10, 1000)
