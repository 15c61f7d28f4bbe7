"""DLPack: shared tensors with torch and numpy in host memory, and sessions on device tensors of the CUDA double."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
import torch

from engines.library.dlpack import CPU, DeviceTensor, _exported, import_tensor, is_device_tensor
from exporter.common.errors import InputError, NumericalError
from runtime import DecodeSession
from tests.conftest import TINY
from tests.engines.running.test_tensorrt_stepper import CAPACITY, engine, session_of, tokens  # noqa: F401 - engine is a fixture
from tests.support.device_tensors import Foreign, from_device, on_device


def host_tensor(array: np.ndarray, memory=None) -> DeviceTensor:
    return DeviceTensor(array.ctypes.data, array.shape, array.dtype, memory, CPU)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64])
def test_numpy_and_torch_take_what_we_export_without_a_copy(dtype):
    array = np.arange(12).astype(dtype).reshape(3, 4)
    for taken in (np.from_dlpack(host_tensor(array)), torch.from_dlpack(host_tensor(array)).numpy()):
        np.testing.assert_array_equal(taken, array)
        assert taken.ctypes.data == array.ctypes.data


def test_torch_takes_our_bfloat16():
    array = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    assert torch.from_dlpack(host_tensor(array)).tolist() == [1.5, -2.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.int32])
def test_we_take_what_torch_exports_without_a_copy(dtype):
    tensor = torch.arange(6).to(dtype).reshape(2, 3)
    taken = import_tensor(Foreign(tensor), 0)
    assert (taken.address, taken.shape, taken.dtype.itemsize) == (tensor.data_ptr(), (2, 3), tensor.itemsize)
    assert taken.part(1).address == tensor[1].data_ptr() and taken.part(1, 2).shape == (2,)


def test_a_tensor_of_another_device_is_refused():
    elsewhere = Foreign(torch.zeros(2), (2, 1))
    with pytest.raises(InputError, match="got one on CUDA device 1, expected one on device 0, where the engine is"):
        import_tensor(elsewhere, 0)
    assert import_tensor(elsewhere, 0, device=1).shape == (2,)


def test_a_tensor_with_gaps_is_refused_and_one_with_odd_strides_of_length_one_is_not():
    with pytest.raises(InputError, match="contiguous"):
        import_tensor(Foreign(torch.zeros(4, 5)[:, 1:]), 0)
    assert import_tensor(Foreign(torch.zeros(1, 5).expand(1, 5)[:, :]), 0).shape == (1, 5)


def test_memory_lives_until_its_last_consumer_is_gone():
    released, array = [], np.zeros(4, np.float32)
    tensor = DeviceTensor.owning(array.ctypes.data, (2, 2), array.dtype, lambda: released.append(1))
    tensor._device = CPU
    part, consumer = tensor.part(1), torch.from_dlpack(tensor)
    del tensor
    gc.collect()
    assert not released
    del part
    gc.collect()
    assert not released
    del consumer
    gc.collect()
    assert released == [1] and not _exported


def test_a_producer_is_told_when_we_are_done():
    array = np.zeros(3, np.float32)
    taken = import_tensor(Foreign(host_tensor(array)), 0)
    assert len(_exported) == 1
    del taken
    gc.collect()
    assert not _exported


def test_host_arrays_are_no_device_tensors():
    assert not is_device_tensor(np.zeros(2)) and not is_device_tensor(torch.zeros(2)) and not is_device_tensor([1])
    assert is_device_tensor(DeviceTensor(0, (1,), np.dtype(np.float32), None))


# --- sessions -----------------------------------------------------------------------------------------------


def states(batch, width, seed=0):
    return np.random.default_rng(seed).standard_normal((batch, width, TINY.hidden_size)).astype(np.float32)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_hidden_states_go_in_and_come_out_on_the_device(engine, cuda_graphs):  # noqa: F811
    made = engine("block", cuda_graphs=cuda_graphs)
    cuda, x, y = made[2], states(2, 5), states(2, 1, 1)
    with session_of(made) as session:
        expected = session.prefill(x), session.decode(y)
        session.reset()
        first = session.prefill(on_device(cuda, x))
        second = session.decode(on_device(cuda, y))
        assert is_device_tensor(first) and first.shape == (2, 5, TINY.hidden_size)
        np.testing.assert_array_equal(from_device(cuda, first), expected[0])  # not stale: the second step left it alone
        np.testing.assert_array_equal(from_device(cuda, second), expected[1])


def test_hidden_states_of_one_token_on_the_device_need_no_axis_for_it(engine):  # noqa: F811
    made = engine("block")
    cuda, x, y = made[2], states(2, 5), states(2, 1, 1)
    with session_of(made) as session:
        session.prefill(x)
        expected = session.decode(y)
        session.reset()
        session.prefill(x)
        got = session.decode(on_device(cuda, y[:, 0]))
        assert is_device_tensor(got) and got.shape == (2, TINY.hidden_size)
        np.testing.assert_array_equal(from_device(cuda, got), expected[:, 0])


def test_logits_of_device_tokens_come_out_on_the_device(engine):  # noqa: F811
    made = engine("model")
    with session_of(made) as session:
        expected = session.prefill(tokens(2, 5))
        session.reset()
        np.testing.assert_array_equal(from_device(made[2], session.prefill(on_device(made[2], tokens(2, 5)))), expected)
        with pytest.raises(InputError, match="vocabulary"):
            session.decode(on_device(made[2], np.array([1, 101])))


def test_slots_take_device_tensors_of_different_lengths(engine):  # noqa: F811
    made = engine("block")
    with session_of(made) as session:
        slots = [session.acquire() for _ in range(3)]
        inputs = {slot: states(1, width, slot)[0] for slot, width in zip(slots, (4, 1, 1), strict=True)}
        expected = session.step(inputs)
        session.reset()
        slots = [session.acquire() for _ in range(3)]
        got = session.step({slot: on_device(made[2], x) for slot, x in zip(slots, inputs.values(), strict=True)})
        for slot, x in zip(slots, expected.values(), strict=True):
            np.testing.assert_array_equal(from_device(made[2], got[slot]), x)


def test_outputs_are_freed_with_their_last_owner(engine):  # noqa: F811
    made = engine("block")
    with session_of(made) as session:
        x = on_device(made[2], states(1, 3))
        before = made[2].allocations
        out = session.prefill(x)
        assert made[2].allocations == before + 1
        del out
        gc.collect()
        assert made[2].allocations == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, d: s.prefill(d(states(2, 4)), [1, 3]), "trim x to its longest row"),
        (lambda s, d: s.prefill(d(states(2, 4).astype(np.float16))), "expected fp32"),
        (lambda s, d: s.prefill(d(states(2, 4)[:, :, :8].copy())), "hidden states"),
        (lambda s, d: s.decode(d(states(2, 4))), "expected 1"),
        (lambda s, d: s.prefill(d(states(1, CAPACITY + 1))), "asked for 33 more"),
    ],
)
def test_bad_device_input_is_refused_before_anything_is_written(engine, call, message):  # noqa: F811
    made = engine("block")
    with session_of(made) as session:
        with pytest.raises(InputError, match=message):
            call(session, lambda array: on_device(made[2], array))
        assert not session._cache.read(0, CAPACITY)[0].any() and session.lengths.tolist() == []


def test_inf_on_the_device_is_found_and_leaves_the_session_as_it_was(engine):  # noqa: F811
    made = engine("block")
    x = states(2, 3)
    x[1, 2, 5] = np.inf
    with session_of(made) as session:
        with pytest.raises(NumericalError, match="inf or NaN in sequence 1"):
            session.prefill(on_device(made[2], x))
        assert session.lengths.tolist() == [] and not session._cache.read(1, CAPACITY)[0].any()


def test_a_host_backend_refuses_device_tensors_by_name(tiny_bundle):
    with (
        DecodeSession.open(tiny_bundle("block").folder) as session,
        pytest.raises(InputError, match="onnxruntime backend, expected numpy"),
    ):
        session.prefill(DeviceTensor(0, (1, 1, 64), np.dtype(np.float32), None))
