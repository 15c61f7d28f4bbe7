"""Opening and closing sessions: as a whole or not at all, while threads use them, without growing memory."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from engines.library.cuda import CudaError
from engines.running.tensorrt_stepper import TensorRTStepper
from exporter.bundle.bundle import Bundle
from exporter.common.errors import BackendError, InputError
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.catalogue import ModelConfig
from exporter.spec.unit import Unit
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
from exporter.steppers.protocol import Stepper
from runtime import DecodeSession
from runtime.state import SessionState
from tests.conftest import TINY
from tests.support.doubles.cuda_double import ENGINE, CudaDouble, engine_record, tensorrt_double
from tests.support.slot_sessions import every_backend, near, on_onnxruntime, recompute, tokens

CAPACITY = 16
LONG = 20  # seconds after which a thread that has not ended counts as a deadlock

# --- threads and signals ---------------------------------------------------------------------------------------------


class SlowStep:
    """Holds every step of a session between its run and its end until `go_on` is set; `running` is set meanwhile."""

    def __init__(self, session: DecodeSession, monkeypatch) -> None:
        self.running, self.go_on, run = threading.Event(), threading.Event(), session._stepper.run

        def slow(*arguments):
            outputs = run(*arguments)
            self.running.set()
            assert self.go_on.wait(LONG)
            return outputs

        monkeypatch.setattr(session._stepper, "run", slow)


@every_backend
def test_close_waits_for_a_step_that_runs_and_refuses_those_that_wait(tiny_bundle, open_backend, monkeypatch):
    bundle, results = tiny_bundle("model"), {}
    session = open_backend(bundle, cache_capacity=CAPACITY)
    slot = session.acquire()
    slow = SlowStep(session, monkeypatch)

    def call(name: str, function) -> threading.Thread:
        def note():
            try:
                results[name] = function()
            except InputError as error:
                results[name] = error

        thread = threading.Thread(target=note, daemon=True)
        thread.start()
        return thread

    stepping = call("step", lambda: session.step({slot: tokens(3)})[slot])
    assert slow.running.wait(LONG)
    closing = call("close", session.close)
    closing.join(0.05)
    assert closing.is_alive() and "close" not in results
    slow.go_on.set()
    for thread in (stepping, closing):
        thread.join(LONG)
        assert not thread.is_alive()
    near(results["step"], recompute(bundle, tokens(3)))
    assert results["close"] is None
    late = call("late", lambda: session.step({slot: [1]}))
    late.join(LONG)
    assert "it is closed" in str(results["late"])


CALLS = {
    "step": lambda session: session.step({0: [1]}),
    "acquire": lambda session: session.acquire(),
    "release": lambda session: session.release(0),
    "fork": lambda session: session.fork(0),
    "export_slot": lambda session: session.export_slot(0),
    "import_slot": lambda session: session.import_slot(None),
    "prefill": lambda session: session.prefill(np.array([[1]])),
    "decode": lambda session: session.decode(np.array([1])),
    "reset": lambda session: session.reset(),
    "close": lambda session: session.close(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_from_a_signal_handler_inside_a_step_is_refused_and_the_step_goes_on(tiny_bundle, monkeypatch, name):
    bundle, refusals = tiny_bundle("model"), []

    def handler(*_):
        with pytest.raises(InputError, match=f"session: got {name} from inside another of its calls") as refusal:
            CALLS[name](session)
        refusals.append(refusal)

    with on_onnxruntime(bundle, cache_capacity=CAPACITY) as session:
        slot, run = session.acquire(), session._stepper.run

        def interrupted_run(*arguments):
            signal.raise_signal(signal.SIGUSR1)
            return run(*arguments)

        monkeypatch.setattr(session._stepper, "run", interrupted_run)
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            logits = session.step({slot: tokens(3)})[slot]
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert len(refusals) == 1 and session.lengths == {slot: 3}
        near(logits, recompute(bundle, tokens(3)))
        monkeypatch.undo()
        near(session.step({slot: [4]})[slot], recompute(bundle, [*tokens(3), 4]))


def test_lengths_may_be_read_at_any_time_while_another_thread_changes_them(tiny_bundle):
    """At every line of `lengths` another thread resets the session, and chooses rows or slots anew."""
    with on_onnxruntime(tiny_bundle("model"), cache_capacity=CAPACITY) as session:
        changes = [session.reset, session.acquire, session.reset, lambda: session.prefill(np.array([[1, 2]]))]

        def change() -> None:
            thread = threading.Thread(target=changes[0])
            changes.append(changes.pop(0))
            thread.start()
            thread.join(LONG)

        def trace(frame, event, _):
            if frame.f_code in (DecodeSession.lengths.fget.__code__, SessionState.lengths.fget.__code__):
                change()
                return trace
            return None

        for _ in range(8):
            sys.settrace(trace)
            try:
                lengths = session.lengths
            finally:
                sys.settrace(None)
            assert list(np.ravel(lengths) if isinstance(lengths, np.ndarray) else lengths.values()) in ([], [0], [2])


@every_backend
def test_an_exception_inside_the_with_block_closes_the_session_and_goes_on(tiny_bundle, open_backend):
    with pytest.raises(ZeroDivisionError), open_backend(tiny_bundle("model")) as session:
        session.step({session.acquire(): tokens(3)})
        raise ZeroDivisionError
    with pytest.raises(InputError, match="it is closed"):
        session.acquire()
    session.close()


# --- opened whole or not at all, closed whatever fails ---------------------------------------------------------------


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory) -> Bundle:
    folder = tmp_path_factory.mktemp("parts") / "bundle"
    request = ExportRequest(TINY, Unit.parse("model", TINY), RandomWeights(TINY, 0), "fp32", 64, n_parts=2)
    export_bundle(request, folder, validated=False)
    return Bundle.open(folder)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes `DecodeSession.open(…, "tensorrt")` use a new double of CUDA, which is returned."""

    def prepare(bundle: Bundle) -> CudaDouble:
        cuda = CudaDouble()

        def open_tensorrt(part: Bundle, record, stream: CudaDouble) -> Stepper:
            folder = tmp_path / part.folder.name
            folder.mkdir(exist_ok=True)
            (folder / record.file).write_bytes(ENGINE)
            module = tensorrt_double(part, record, stream, OnnxruntimeStepper.from_bundle(part))
            return TensorRTStepper(Bundle(folder, part.manifest), record, module, stream)

        monkeypatch.setattr("engines.library.cuda.RuntimeCuda", lambda: cuda)
        monkeypatch.setattr("engines.running.tensorrt_parts.open_tensorrt", open_tensorrt)
        monkeypatch.setattr(
            "engines.running.tensorrt_parts.find_engines",
            lambda *_: [engine_record(part, CAPACITY) for part in bundle.parts],
        )
        return cuda

    return prepare


def fail_at(cuda: CudaDouble, name: str, place: int) -> list[str]:
    """Makes call number `place` of `name` fail, counted from 0. Returns a list that gets the name then."""
    call, count, failed = getattr(cuda, name), [], []

    def failing(*arguments):
        count.append(name)
        if len(count) - 1 == place:
            failed.append(name)
            raise CudaError(f"{name}: out of memory")
        return call(*arguments)

    setattr(cuda, name, failing)
    return failed


@pytest.mark.parametrize("parts", [False, True], ids=["one engine", "two engines"])
@pytest.mark.parametrize("name", ["allocate", "synchronize", "free_bytes"])
def test_opening_that_fails_anywhere_frees_what_it_had(tiny_bundle, in_parts, machine, name, parts):
    bundle = in_parts if parts else tiny_bundle("model")
    for place in range(100):
        cuda = machine(bundle)
        failed = fail_at(cuda, name, place)
        if failed_to_open := _fails_to_open(bundle):
            assert failed and failed_to_open == f"{name}: out of memory"
            assert cuda.allocations == 0 and cuda.closed
        else:
            assert place >= 1 and not failed
            return
    raise AssertionError("it never opens")


def _fails_to_open(bundle: Bundle) -> str:
    try:
        DecodeSession.open(bundle.folder, "tensorrt").close()
    except CudaError as error:
        return str(error)
    return ""


def test_a_batch_that_the_engine_was_not_built_for_is_refused_and_everything_freed(tiny_bundle, machine):
    cuda = machine(tiny_bundle("model"))
    with pytest.raises(InputError, match="max_batch: got 5, expected at most 4"):
        DecodeSession.open(tiny_bundle("model").folder, "tensorrt", max_batch=5)
    assert cuda.allocations == 0 and cuda.closed


def test_an_engine_that_cannot_run_leaves_no_stream_behind_when_auto_takes_onnxruntime(
    tiny_bundle, machine, monkeypatch
):
    cuda = machine(tiny_bundle("model"))
    monkeypatch.setattr("runtime.backends.ENGINES_FILE", "manifest.json")  # as if the bundle had engines

    def unusable(*_):
        raise BackendError("planted")

    monkeypatch.setattr("engines.running.tensorrt_parts.open_tensorrt", unusable)
    with DecodeSession.open(tiny_bundle("model").folder) as session:
        assert session.backend == "onnxruntime" and cuda.closed


@pytest.mark.parametrize("parts", [False, True], ids=["one engine", "two engines"])
@pytest.mark.parametrize("name", ["free", "synchronize", "destroy_graph"])
def test_what_cannot_be_freed_keeps_nothing_else(tiny_bundle, in_parts, machine, name, parts):
    bundle = in_parts if parts else tiny_bundle("model")
    cuda = machine(bundle)
    session = DecodeSession.open(bundle.folder, "tensorrt")
    session.prefill(tokens(4).reshape(2, 2))
    for token in (1, 2):
        session.decode(np.array([token, token]))
    held = cuda.allocations
    failed = fail_at(cuda, name, 0)
    with pytest.raises(CudaError, match=f"{name}: out of memory"):
        session.close()
    assert failed and held > 10 and cuda.closed
    assert cuda.allocations == (1 if name == "free" else 0)
    assert cuda.live_graphs <= (0 if name == "free" else 1)
    with pytest.raises(InputError, match="it is closed"):
        session.reset()
    session.close()


# --- no growth -------------------------------------------------------------------------------------------------------

MINUTE = ModelConfig(
    hidden_size=32,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    vocab_size=31,
    context_length=16,
)


def test_opening_and_closing_leaves_no_descriptor_thread_or_memory(tmp_path):
    export_bundle(
        ExportRequest(MINUTE, Unit.parse("model", MINUTE), RandomWeights(MINUTE, 0), "fp32"),
        tmp_path / "bundle",
        validated=False,
    )

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    seen = []
    for number in range(80):
        with contextlib.suppress(ZeroDivisionError), DecodeSession.open(tmp_path / "bundle") as session:
            session.step({session.acquire(): [1, 2]})
            if number % 2:
                raise ZeroDivisionError
        if number >= 29:
            seen.append((*held(), resident_bytes()))
    assert {descriptors for descriptors, _, _ in seen} == {seen[0][0]}
    assert {threads for _, threads, _ in seen} == {seen[0][1]}
    assert seen[-1][2] - seen[0][2] < 8 * 2**20  # a session that stayed would hold about 1 MB
