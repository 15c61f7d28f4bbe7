"""The TensorRT stepper with strict doubles of CUDA and TensorRT, on a machine without a GPU."""

from __future__ import annotations

import copy
import dataclasses
import shutil

import numpy as np
import pytest

from engines.running.choose_engine import find_engine
from engines.running.cuda_graphs import GRAPH_BUCKET
from engines.running.tensorrt_stepper import TensorRTStepper
from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import EngineRecord
from exporter.common.errors import BackendError, BundleError, InputError
from exporter.spec.feeds import step_feeds
from exporter.steppers.eager_stepper import EagerStepper
from exporter.validation.recording import record_run as record_scenarios
from runtime import DecodeSession
from tests.conftest import MAX_POSITIONS, TINY
from tests.support.device_tensors import on_device
from tests.support.doubles.cuda_double import ENGINE, ContractError, CudaDouble, engine_record, tensorrt_double

CAPACITY = 32


@pytest.fixture
def engine(tiny_bundle, tmp_path):
    """A function that makes a stepper over doubles for a bundle of the tiny model."""

    def make(unit="model", dtype="fp32", cuda_graphs=True, **limits) -> tuple[Bundle, TensorRTStepper, CudaDouble]:
        folder = tmp_path / f"{unit}-{dtype}"
        if not folder.exists():
            shutil.copytree(tiny_bundle(unit, dtype).folder, folder)
            (folder / "model.engine").write_bytes(ENGINE)
        bundle, cuda = Bundle.open(folder), CudaDouble()
        record = engine_record(bundle, **{"capacity": CAPACITY} | limits)
        return bundle, TensorRTStepper(bundle, record, tensorrt_double(bundle, record, cuda), cuda, cuda_graphs), cuda

    return make


def session_of(made, max_batch=4) -> DecodeSession:
    bundle, stepper, _ = made
    return DecodeSession(bundle, stepper, max_batch, CAPACITY)


def tokens(batch, width, seed=0):
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, (batch, width))


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize(
    ("unit", "dtype"), [("block", "fp32"), ("stack", "fp16"), ("model", "fp32"), ("model", "bf16")]
)
def test_every_scenario_equals_eager_bit_for_bit(engine, unit, dtype, cuda_graphs):
    bundle, stepper, _ = engine(unit, dtype, cuda_graphs, max_seq_len=CAPACITY)
    manifest = bundle.manifest
    recordings = [record_scenarios(manifest.spec, s) for s in (stepper, EagerStepper.from_bundle(bundle))]
    for key, expected in recordings[1].items():
        for a, b in zip(recordings[0][key], expected, strict=True):
            if cuda_graphs and a.dtype == np.float32:  # masked padding up to the bucket changes the order of sums
                np.testing.assert_allclose(a, b, atol=1e-5)
            elif not cuda_graphs:
                np.testing.assert_array_equal(a, b)


def test_cuda_graphs_on_and_off_give_the_same_tokens_and_replay_instead_of_enqueueing(engine):
    generated = []
    for cuda_graphs in (True, False):
        made = engine(cuda_graphs=cuda_graphs)
        with session_of(made) as session:
            out, got = session.prefill(tokens(2, 5)), []
            for _ in range(10):
                got.append(out.argmax(-1))
                out = session.decode(got[-1])
            generated.append(np.array(got))
            assert (made[1].graph_count, made[2].launches) == ((1, 8) if cuda_graphs else (0, 0))
    np.testing.assert_array_equal(*generated)


def test_a_graph_is_captured_for_each_batch_and_bucket_and_place_in_the_cache(engine):
    _, stepper, cuda = engine(capacity=MAX_POSITIONS)
    assert MAX_POSITIONS < GRAPH_BUCKET  # one bucket: the whole capacity
    cache = stepper.new_cache(4, MAX_POSITIONS)

    def decode(batch, past, first_row):
        feeds = step_feeds("input_ids", tokens(batch, 1), np.full(batch, past), np.ones(batch, np.int64))
        stepper.run(feeds, cache, first_row)
        return stepper.graph_count, cuda.launches

    assert decode(2, 0, 0) == (0, 0)  # the first of its kind runs without a graph
    assert decode(2, 1, 0) == (1, 0)  # captured, run once outside of the graph
    assert decode(2, 2, 0) == (1, 1)  # replayed: the length is in the same bucket
    assert (decode(2, 2, 1), decode(2, 3, 1)) == ((1, 1), (2, 1))  # another place in the cache
    assert (decode(1, 2, 0), decode(1, 3, 0), decode(1, 4, 0)) == ((2, 1), (3, 1), (3, 2))  # another batch
    cache = stepper.new_cache(4, MAX_POSITIONS)  # another cache: what a graph froze has changed
    assert (decode(2, 0, 0), decode(2, 1, 0)) == ((3, 2), (4, 2))


def test_shapes_outside_the_profiles_are_refused_with_the_range_and_then_it_goes_on(engine):
    _, stepper, _ = engine(max_seq_len=8)
    cache = stepper.new_cache(2, CAPACITY)

    def step(width):
        feeds = step_feeds("input_ids", tokens(2, width), np.zeros(2, np.int64), np.full(2, width))
        return stepper.run(feeds, cache)["logits"]

    expected = step(8)
    with pytest.raises(InputError, match=r"input_ids: got shape \[2, 9\], expected .*\[1, 1\] to \[4, 8\]"):
        step(9)
    np.testing.assert_array_equal(step(8), expected)


def test_a_prompt_longer_than_the_largest_step_runs_in_pieces(engine):
    with session_of(engine(max_seq_len=8)) as session, session_of(engine(max_seq_len=CAPACITY)) as whole:
        np.testing.assert_allclose(session.prefill(tokens(2, 19)), whole.prefill(tokens(2, 19)), atol=1e-5)
        assert session.lengths.tolist() == [19, 19]


def with_largest(record: EngineRecord, profile: int, name: str, largest: list[int]) -> EngineRecord:
    """The record with another largest shape of one input. Its opt shape follows."""
    profiles = copy.deepcopy(record.profiles)
    profiles[profile]["ranges"][name] |= {"opt": largest, "max": largest}
    return dataclasses.replace(record, profiles=profiles)


def test_the_limits_of_an_engine_are_those_of_all_its_inputs(engine):
    bundle, _, cuda = engine()
    record = with_largest(engine_record(bundle, CAPACITY), 1, "input_ids", [4, 6])
    record = with_largest(with_largest(record, 0, "attention_mask", [3, CAPACITY]), 1, "write_indices", [2])
    stepper = TensorRTStepper(bundle, record, tensorrt_double(bundle, record, cuda), cuda)
    assert (stepper.max_batch, stepper.max_seq_len) == (3, 6)
    with session_of((bundle, stepper, cuda), max_batch=stepper.max_batch) as session:
        session.prefill(tokens(2, stepper.max_seq_len))


def test_a_captured_step_is_padded_no_further_than_its_engine_reads(engine):
    bundle, _, cuda = engine()
    record = engine_record(bundle, CAPACITY)
    for profile in range(len(record.profiles)):
        record = with_largest(record, profile, "attention_mask", [4, 20])  # longest step: 20 of 32 rows
    stepper = TensorRTStepper(bundle, record, tensorrt_double(bundle, record, cuda), cuda)
    with session_of((bundle, stepper, cuda)) as session:
        session.prefill(tokens(2, 10))
        for _ in range(2):
            assert session.decode(np.array([1, 2])).shape == (2, TINY.vocab_size)
        assert stepper.graph_count == 1


def test_another_capacity_than_the_engines_is_refused(engine):
    _, stepper, _ = engine()
    with pytest.raises(InputError, match="got 16, expected 32"):
        stepper.new_cache(2, 16)


def test_slots_work_over_one_allocation_at_offsets(engine):
    made = engine()
    with (
        session_of(made) as session,
        DecodeSession.open(made[0].folder, "eager", max_batch=4, cache_capacity=CAPACITY) as eager,
    ):
        buffers = made[2].allocations
        for one in (session, eager):
            one.slots = [one.acquire() for _ in range(3)]
        for step in (
            {0: tokens(1, 7)[0]},
            {1: tokens(1, 3, 1)[0], 0: tokens(1, 1)[0], 2: tokens(1, 1)[0]},
            {2: tokens(1, 1)[0], 1: tokens(1, 1)[0]},
        ):
            got, expected = session.step(step), eager.step(step)
            for slot in step:
                np.testing.assert_allclose(got[slot], expected[slot], atol=1e-5)
        for one in (session, eager):
            one.release(0)
            one.forked = one.fork(2)
            one.state = one.export_slot(1)
        for a, b in zip(session.state.tensors, eager.state.tensors, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        step = {1: tokens(1, 2)[0], 2: tokens(1, 1)[0], session.forked: tokens(1, 4)[0]}
        got, expected = session.step(step), eager.step(step)
        for slot in step:
            np.testing.assert_allclose(got[slot], expected[slot], atol=1e-5)
        assert made[2].allocations == buffers  # nothing was allocated on the way


def test_an_imported_slot_continues_where_it_was_exported(engine):
    made = engine()
    with session_of(made) as session:
        slot = session.acquire()
        session.step({slot: tokens(1, 6)[0]})
        state = session.export_slot(slot)
        expected = session.step({slot: np.array([5])})[slot]
        other = session.import_slot(state)
        np.testing.assert_allclose(session.step({other: np.array([5])})[other], expected, atol=1e-6)


def test_close_frees_every_buffer_and_graph(engine):
    made = engine()
    session = session_of(made)
    session.prefill(tokens(2, 5))
    session.decode(np.array([1, 2]))
    session.close()
    assert made[2].allocations == 0 and made[2].live_graphs == 0 and made[2].closed


def test_a_failing_enqueue_leaves_the_session_as_it_was(engine, monkeypatch):
    made = engine(cuda_graphs=False)
    with session_of(made) as session:
        session.prefill(tokens(2, 5))
        before = [session._cache.read(row, 5) for row in range(2)]
        monkeypatch.setattr(
            "tests.support.doubles.cuda_double.ContextDouble.execute_async_v3", lambda self, stream: False
        )
        with pytest.raises(RuntimeError, match="execute_async_v3 failed"):
            session.decode(np.array([1, 2]))
        monkeypatch.undo()
        assert session.lengths.tolist() == [5, 5]
        for row in range(2):
            for a, b in zip(session._cache.read(row, CAPACITY), before[row], strict=True):
                np.testing.assert_array_equal(a[:, :5], b)
                assert not a[:, 5:].any()
        session.decode(np.array([1, 2]))


def test_an_engine_with_other_tensors_than_the_bundles_is_refused(engine, tiny_bundle):
    bundle, _, cuda = engine()
    record = engine_record(bundle, CAPACITY)
    other = dataclasses.replace(
        bundle, manifest=dataclasses.replace(bundle.manifest, contract=tiny_bundle("block").manifest.contract)
    )
    with pytest.raises(BundleError, match="engine"):
        TensorRTStepper(other, record, tensorrt_double(bundle, record, cuda), cuda)


def test_an_engine_that_does_not_load_is_refused_with_the_reason(engine, monkeypatch):
    bundle, _, cuda = engine()
    record = engine_record(bundle, CAPACITY)
    double = tensorrt_double(bundle, record, cuda)
    monkeypatch.setattr(type(bundle.folder), "read_bytes", lambda path: b"damaged")
    with pytest.raises(BundleError, match="does not load: not this engine"):
        TensorRTStepper(bundle, record, double, cuda)


def test_a_version_compatible_engine_loads_and_another_gets_no_leave_to_run_host_code(engine):
    bundle, _, cuda = engine()
    record = engine_record(bundle, CAPACITY)
    compatible = dataclasses.replace(record, options=record.options | {"version_compatible": True})
    stepper = TensorRTStepper(bundle, compatible, tensorrt_double(bundle, compatible, cuda), cuda)
    assert stepper._runtime.engine_host_code_allowed
    with pytest.raises(BundleError, match="does not load: the plan has host code"):  # a record that says otherwise
        TensorRTStepper(bundle, record, tensorrt_double(bundle, compatible, cuda), cuda)


def test_without_a_gpu_tensorrt_is_refused_by_name_and_auto_takes_onnxruntime(engine):
    bundle, _, _ = engine()
    with pytest.raises(BackendError, match="no GPU is visible"):
        find_engine(bundle, None)
    with pytest.raises(BackendError, match="no GPU is visible"):
        DecodeSession.open(bundle.folder, backend="tensorrt")
    with DecodeSession.open(bundle.folder, backend="auto") as session:
        assert session.backend == "onnxruntime"


def test_a_mask_is_padded_at_most_to_the_longest_of_the_profile_that_takes_one_token(engine):
    bundle, _, cuda = engine()
    record = engine_record(bundle, CAPACITY)
    for profile in record.profiles:  # as from explicit shapes: shorter than the capacity
        profile["ranges"]["attention_mask"]["max"] = [4, 20]
    record.profiles[1]["ranges"]["attention_mask"]["max"] = [4, 28]
    stepper = TensorRTStepper(bundle, record, tensorrt_double(bundle, record, cuda), cuda)
    cache = stepper.new_cache(2, CAPACITY)
    for past in range(30):
        if past == 28:
            with pytest.raises(InputError, match=r"attention_mask: got shape \[2, 29\], expected"):
                stepper.run(step_feeds("input_ids", tokens(2, 1), np.full(2, past), np.ones(2, np.int64)), cache)
            break
        stepper.run(step_feeds("input_ids", tokens(2, 1), np.full(2, past), np.ones(2, np.int64)), cache)
    assert (stepper.graph_count, cuda.launches) == (2, 24)  # one graph for each of the two profiles


def test_every_public_call_uses_its_own_device_whatever_another_library_has_made_current(engine):
    made = engine("block")
    cuda, x = made[2], np.ones((1, 3, TINY.hidden_size), np.float32)

    def elsewhere(call, *arguments):
        cuda.current_device = 1
        return call(*arguments)

    session = session_of(made)
    elsewhere(session.prefill, x)
    elsewhere(session.decode, x[:, :1])
    elsewhere(session.reset)
    slot = elsewhere(session.acquire)
    elsewhere(session.step, {slot: x[0]})
    elsewhere(session.fork, slot)
    elsewhere(session.import_slot, elsewhere(session.export_slot, slot))
    on_the_device = elsewhere(session.step, {slot: on_device(cuda, x[0])})
    elsewhere(session.release, slot)
    elsewhere(session.close)
    elsewhere(on_the_device.clear)
    assert cuda.allocations == 1  # the caller's own tensor


# --- the doubles find misuse -------------------------------------------------------


def one_step(stepper, cache):
    return stepper.run(step_feeds("input_ids", tokens(1, 3), np.zeros(1, np.int64), np.array([3])), cache, 0)


def test_present_at_another_address_than_past_is_noticed(engine, monkeypatch):
    _, stepper, cuda = engine()
    cache = stepper.new_cache(1, CAPACITY)
    stray = cuda.allocate(1 << 16)
    bind = TensorRTStepper._bind

    def misbind(self, context, shapes, addresses):
        bind(self, context, shapes, addresses)
        context.set_tensor_address("present.0.key", stray)

    monkeypatch.setattr(TensorRTStepper, "_bind", misbind)
    with pytest.raises(ContractError, match=r"present\.0\.key is not at the address"):
        one_step(stepper, cache)


def test_a_missing_address_a_freed_cache_and_a_missing_synchronize_are_noticed(engine, monkeypatch):
    _, stepper, cuda = engine()
    cache = stepper.new_cache(1, CAPACITY)
    good = one_step(stepper, cache)["logits"]
    del stepper._buffers["logits"]
    with pytest.raises((ContractError, KeyError)):
        one_step(stepper, cache)
    _, stepper, cuda = engine()
    cache = stepper.new_cache(1, CAPACITY)
    cache.free()
    cache.addresses = [1 << 20] * len(cache._specs)
    with pytest.raises(ContractError, match="not \\(or no longer\\) allocated"):
        one_step(stepper, cache)
    _, stepper, cuda = engine()
    cache = stepper.new_cache(1, CAPACITY)
    monkeypatch.setattr(cuda, "synchronize", lambda: None)
    assert not np.array_equal(one_step(stepper, cache)["logits"], good)


def test_a_view_off_alignment_is_noticed(engine):
    _, stepper, _ = engine()
    cache = stepper.new_cache(2, CAPACITY)
    cache.addresses = [address + 64 for address in cache.addresses]
    with pytest.raises(ContractError, match="not aligned"):
        one_step(stepper, cache)
