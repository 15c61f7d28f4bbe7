"""The soak of benchmarks/campaigns, small and seeded: no wrong token and no lost slot, whatever fails."""

from __future__ import annotations

import pytest

from benchmarks.campaigns.soak import CAPACITY, MAX_BATCH, Server, slope_per_hour
from exporter.errors import CheckFailed
from tests.slot_sessions import on_onnxruntime, on_the_tensorrt_double


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
def test_threads_faults_and_bad_requests_at_random_give_no_wrong_token_and_lose_no_slot(tiny_bundle, open_backend, unit, n_requests):
    counts = served(open_backend, tiny_bundle(unit), n_requests).counts
    assert counts["requests"] == n_requests and counts["outputs checked"] > 4 * n_requests
    kinds = {name.split(":")[0] for name in counts}
    assert kinds >= {"steps", "finished", "refused"} and (n_requests < 60 or "fault" in kinds)  # what else came up, threads decide


def test_a_soak_notices_a_wrong_token(tiny_bundle, monkeypatch):
    """A state that is imported without its rows: its sequence goes on from zeros."""
    with on_onnxruntime(tiny_bundle("model"), max_batch=MAX_BATCH, cache_capacity=CAPACITY) as session:
        server = Server(session, seed=0)
        monkeypatch.setattr(session._cache, "write", lambda *_: None)
        with pytest.raises(CheckFailed, match="off by"):
            server.run(lambda number: number < 60)


def test_the_slope_is_that_of_the_second_half():
    assert slope_per_hour([(0, 0), (1, 900), (2, 1000), (3, 1010), (4, 1020)]) == pytest.approx(36_000)
