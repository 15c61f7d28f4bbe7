"""DecodeSession: sequences over an in-place KV cache, checked before every step, unharmed by one that fails."""

from __future__ import annotations

import contextlib
import itertools
import logging
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from engines.library.dlpack import DeviceRows, DeviceTensor, is_device_tensor
from exporter.bundle.bundle import Bundle, check_in_place
from exporter.common.errors import InputError, NumericalError
from exporter.spec.catalogue import LARGEST_COUNT
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.feeds import step_feeds
from exporter.spec.tensors import SEQUENCE
from exporter.steppers.protocol import Cache, OnDevice, Stepper
from runtime.backends import open_stepper
from runtime.inputs import InputChecker, as_array, is_whole_number
from runtime.policy.full_cache import check_room
from runtime.policy.launches import Launch, padded_launches, unpadded_launches
from runtime.policy.memory_estimate import estimate_memory
from runtime.policy.slots import SlotTable
from runtime.turns import TakesTurns, in_turn

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlotState:
    """A copy of one sequence's cache, to keep a prefix or carry it elsewhere.

    Attributes:
        length: tokens that it holds.
        tensors: key and value of each layer, [K, length, D] each, in the bundle's dtype.
    """

    length: int
    tensors: tuple[np.ndarray, ...]


class DecodeSession(TakesTurns):
    """Decodes a block, stack or model from a bundle; owns the cache and the length of each sequence.

    Two ways to use it, of which a session takes one until `reset`. With rows, `prefill` and `decode` use cache rows 0 … B − 1,
    B fixed by the first call. With slots, sequences join (`acquire`, `fork`, `import_slot`) and leave (`release`) at any time, and
    `step` advances any of them.

    A step is checked before anything is written. One that fails part-way, by any exception, an interrupt from the keyboard
    included, leaves lengths as they were and zeroes the rows it may have written; where even that fails, they are zeroed before
    the next call does anything else. The other calls are whole in the same way: each has happened or has not, and `lengths` says
    which. An interrupt may come after a call has counted and before its result is handed over: a caller that goes on after one
    reads `lengths` first.

    Threads may share a session. Calls take turns, in no promised order: each is whole before the next begins, `close` waits for
    a step that runs, and `lengths` may be read at any time. A session doesn't know who owns which slot. A call from
    inside another one of the same thread, such as a signal handler's, is refused.

    Attributes:
        manifest: what the bundle is.
        backend: the backend in use, "onnxruntime", "tensorrt" or "eager".
        description: backend, version and device in words.
        max_batch: sequences that the cache holds.
        cache_capacity: tokens that each sequence can hold.
        memory: what the session needs, in bytes.
    """

    def __init__(self, bundle: Bundle, stepper: Stepper, max_batch: int, cache_capacity: int) -> None:
        super().__init__()
        self.manifest = bundle.manifest
        self._folder = bundle.folder
        self.backend, self.description = stepper.backend, stepper.description
        self.max_batch, self.cache_capacity = max_batch, cache_capacity
        self.memory = estimate_memory(bundle.manifest, stepper.backend, max_batch, cache_capacity)
        self._stepper, self._is_open = stepper, True
        self._cache: Cache = stepper.new_cache(max_batch, cache_capacity)
        self._unclean: dict[
            int, int
        ] = {}  # cache row → where it ends what a call that did not end well may have left beyond its length
        self._inputs = InputChecker(bundle.manifest)
        self._input_name = self.manifest.contract.step_inputs[0].name
        self._output = self.manifest.contract.step_outputs[0]
        self._lengths: list[int] | None = None  # of each row; None before the first step with rows
        self._slots: SlotTable | None = None  # None before the first use of slots
        self._slot_numbers = itertools.count()  # goes on after a reset, so that a slot from before it is noticed

    @classmethod
    def open(
        cls,
        bundle: str | Path,
        backend: str = "auto",
        providers: str | Sequence[str] | None = None,
        max_batch: int = 4,
        cache_capacity: int | None = None,
        verify: str = "graph",
    ) -> DecodeSession:
        """Opens a bundle for decoding.

        Args:
            bundle: the bundle's folder.
            backend: "onnxruntime", "tensorrt" (the bundle's engine), "eager" (the reference, slow), or "auto", which takes
                TensorRT where a matching engine and a GPU are, else onnxruntime; `description` says which.
            providers: the onnxruntime execution provider; None means CPUExecutionProvider.
            max_batch: sequences to hold at once.
            cache_capacity: tokens per sequence, rounded up so that a sequence's cache is a multiple of 256 bytes;
                None means the smaller of 2,048 and what the graph was exported for, or the engine's capacity.
            verify: "graph" checks file sizes and the graph's checksum, "full" every checksum, that of the engine in use too.

        Raises:
            InputError: a bad argument, a unit without a cache, or not enough memory; nothing was allocated.
            BundleError: the bundle is damaged, or was replaced while it was being opened.
            BackendError: the backend or provider is not here or cannot run this bundle.
        """
        opened = Bundle.open(bundle, verify)
        manifest = opened.manifest
        check_in_place(opened)
        if not manifest.unit.has_cache:
            raise InputError(
                f"bundle {bundle}: it is a {manifest.unit}, expected a block, stack or model; a component has no cache to decode with"
            )
        if not is_whole_number(max_batch) or not 1 <= max_batch <= LARGEST_COUNT:
            raise InputError(f"max_batch: got {max_batch!r}, expected a whole number of at least 1")
        try:
            stepper, capacity = open_stepper(opened, backend, providers, max_batch, cache_capacity, verify)
        except Exception:
            opened.check_unchanged()  # files of two bundles may be why
            raise
        try:
            opened.check_unchanged()
            session = cls(opened, stepper, max_batch, capacity)
            log.info("decoding with %s; %d sequences of %d tokens", stepper.description, max_batch, capacity)
            return session
        except BaseException:
            stepper.close()
            raise

    # --- state ---------------------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> np.ndarray | dict[int, int]:
        """Tokens that each sequence holds: a copy, int64 [B] with rows, {slot: n} with slots; empty before the first use."""
        slots = self._slots
        return np.array(self._lengths or [], np.int64) if slots is None else slots.lengths

    @in_turn
    def reset(self) -> None:
        """Forgets all sequences and zeroes the cache, whatever was in it; rows or slots may be chosen anew."""
        self._check_open()
        self._unclean = dict.fromkeys(range(self.max_batch), self.cache_capacity)
        self._lengths = self._slots = None
        self._clean()

    @in_turn
    def close(self) -> None:
        """Frees the backend and the cache; any later use is an error. Closing twice is not."""
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.ExitStack() as freeing:  # the one is freed also where the other cannot be
            freeing.callback(self._stepper.close)
            freeing.callback(self._cache.free)
            del self._stepper, self._cache  # so that nothing of them is used, and what they still hold goes

    def __enter__(self) -> DecodeSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- rows ----------------------------------------------------------------------------------------------------------

    @in_turn
    def prefill(self, x: np.ndarray, lengths: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """Appends T tokens (or fewer, by `lengths`) to each sequence.

        With TensorRT, x may be a CUDA tensor of any library that speaks DLPack; the result is then one too.

        Args:
            x: token ids int64 [B, T] for a model, else hidden states [B, T, E] in the bundle's dtype; right-padded.
            lengths: real tokens of each row, int [B], 1 to T; None means T.

        Returns:
            For a model float32 logits [B, V] of each row's last real token; else hidden states [B, T, E], pads zero.

        Raises:
            InputError: wrong dtype, shape, lengths or tokens, or a sequence without room; nothing was written.
            NumericalError: the step produced inf or NaN; the session is as before.
        """
        self._get_ready()
        return self._step_rows(self._taken(x), lengths, is_device_tensor(x))

    @in_turn
    def decode(self, x: np.ndarray) -> np.ndarray:
        """Appends one token to each sequence: token ids int64 [B], or hidden states [B, 1, E]. Otherwise as `prefill`."""
        self._get_ready()
        taken = self._taken(x)
        if isinstance(taken, np.ndarray) and self._inputs.takes_tokens and taken.ndim == 1:
            taken = taken[:, None]
        if taken.ndim > 1 and taken.shape[1] != 1:
            raise InputError(f"decode: got {taken.shape[1]} tokens a row, expected 1; use prefill for more")
        return self._step_rows(taken, None, is_device_tensor(x))

    def _taken(self, x: Any) -> np.ndarray | DeviceTensor:
        """The caller's input: a host array, or hidden states that stay on the device. Tokens are checked on the host."""
        if not is_device_tensor(x):
            return as_array(x, "input")
        if not isinstance(self._stepper, OnDevice):
            raise InputError(
                f"device tensors: got one for the {self.backend} backend, expected numpy arrays; open it with backend='tensorrt'"
            )
        tensor = self._stepper.import_tensor(x)
        return self._stepper.to_host(tensor) if self._inputs.takes_tokens else tensor

    def _step_rows(
        self, x: np.ndarray | DeviceTensor, lengths: Sequence[int] | np.ndarray | None, on_device: bool
    ) -> Any:
        if self._slots is not None:
            raise InputError(
                "session: it is used with slots, so rows are not its own to use; call reset() to choose anew"
            )
        x = self._inputs.batch(x)
        batch, width = x.shape[:2]
        if self._lengths is not None and batch != len(self._lengths):
            raise InputError(
                f"batch: got {batch} rows, expected {len(self._lengths)} as in the first step; call reset() to begin again"
            )
        if batch > self.max_batch:
            raise InputError(
                f"batch: got {batch} rows, expected at most {self.max_batch}; open the session with max_batch={batch}"
            )
        seq_lens = self._inputs.lengths(lengths, batch, width)
        rows = (x.part(row, n) if isinstance(x, DeviceTensor) else x[row, :n] for row, n in enumerate(seq_lens))
        sequences = {row: self._inputs.real(sequence, f"row {row}") for row, sequence in enumerate(rows)}
        past_lens = self._lengths or [0] * batch
        names = [f"sequence {row}" for row in range(batch)]
        check_room(dict(zip(names, zip(past_lens, seq_lens, strict=True), strict=True)), self.cache_capacity)
        launches = padded_launches(past_lens, seq_lens, self.cache_capacity)
        if on_device and self._output.name == "logits" and SEQUENCE in self._output.axes:
            raise InputError(
                "device tensors: this bundle puts out logits of all tokens, expected the last; export it with --logits last"
            )
        if on_device and (len(launches) > 1 or launches[0].width != width):
            raise InputError(
                "device tensors: this step needs its rows apart or trimmed, expected one run; use slots, or trim x to its longest row"
            )
        total_lens = [past_len + seq_len for past_len, seq_len in zip(past_lens, seq_lens, strict=True)]
        with self._cleaned_where_it_fails(launches, past_lens):
            outputs = self._run(launches, sequences, dict(enumerate(past_lens)), dict(enumerate(names)), on_device)
            self._lengths = total_lens
        if on_device:  # the rows are parts of one tensor
            return outputs[0].whole(batch, *(outputs[0].shape if self._output.name == "logits" else x.shape[1:]))
        if self._output.name == "logits":
            return np.stack([outputs[row] for row in range(batch)])
        padded = np.zeros(x.shape, numpy_dtype(self._output.dtype))
        for row, seq_len in enumerate(seq_lens):
            padded[row, :seq_len] = outputs[row]
        return padded

    # --- slots ---------------------------------------------------------------------------------------------------------

    @in_turn
    def acquire(self) -> int:
        """Takes a slot for a new sequence; its cache row is zeroed, whatever was in it.

        Raises:
            InputError: all are taken, or the session is used with rows.
        """
        table = self._slot_table()
        return self._take(table, self._zeroed_row(table), 0)

    def _zeroed_row(self, table: SlotTable) -> int:
        """A free cache row for a new slot, which is not taken yet: what fails on the way there leaves nothing taken."""
        row = table.free_row()
        self._cache.zero(row, 0, self.cache_capacity)
        return row

    def _take(self, table: SlotTable, row: int, length: int) -> int:
        slot = table.take(row, length)
        self._slots = table
        return slot

    @in_turn
    def release(self, slot: int) -> None:
        """Ends a sequence and gives its slot back; other sequences go on untouched.

        Raises:
            InputError: the slot is not active.
        """
        table = self._slot_table()
        table.release(slot)
        while (move := table.next_move()) is not None:  # more than one gap only where an earlier move has failed
            self._cache.zero(move.destination, 0, self.cache_capacity)
            self._cache.copy(move.source, move.destination, table.length_of_row(move.source))
            table.moved(move)

    @in_turn
    def fork(self, slot: int) -> int:
        """A new slot that continues from a copy of this one, for prompts that begin alike.

        Raises:
            InputError: the slot is not active, or all are taken.
        """
        table = self._slot_table()
        source = table.held(slot)
        row = self._zeroed_row(table)
        self._cache.copy(source.row, row, source.length)
        return self._take(table, row, source.length)

    @in_turn
    def export_slot(self, slot: int) -> SlotState:
        """A copy of a sequence's cache, in host memory.

        Raises:
            InputError: the slot is not active.
        """
        held = self._slot_table().held(slot)
        return SlotState(held.length, tuple(self._cache.read(held.row, held.length)))

    @in_turn
    def import_slot(self, state: SlotState) -> int:
        """A new slot that continues from an exported one, of this session or another on an equal bundle.

        Raises:
            InputError: it is no such state, does not fit this bundle or its capacity, or all slots are taken.
        """
        table = self._slot_table()
        self._check_state(state)
        row = self._zeroed_row(table)
        self._cache.write(row, list(state.tensors))
        return self._take(table, row, state.length)

    def _check_state(self, state: SlotState) -> None:
        if not isinstance(state, SlotState) or not is_whole_number(state.length) or state.length < 0:
            raise InputError(f"slot state: got {reprlib.repr(state)}, expected what export_slot returned")
        specs = self.manifest.contract.cache_specs
        expected = [((spec.axes[1], state.length, spec.axes[3]), numpy_dtype(spec.dtype)) for spec in specs]
        tensors = list(state.tensors) if isinstance(state.tensors, Sequence) else [state.tensors]
        got = [
            (tensor.shape, tensor.dtype) if isinstance(tensor, np.ndarray) else type(tensor).__name__
            for tensor in tensors
        ]
        if got != expected:
            raise InputError(
                f"slot state: got {len(got)} tensors {got[:1]}, expected {len(expected)} {expected[:1]}, as this bundle caches them"
            )
        if not all(np.isfinite(tensor).all() for tensor in tensors):
            raise InputError(
                "slot state: it holds inf or NaN, which would reach every later token; compute the prefix again"
            )
        check_room({"the imported sequence": (0, state.length)}, self.cache_capacity)

    @in_turn
    def step(self, inputs: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Appends tokens to any of the active sequences, each as many as it is given; the others are not touched.

        A prefill of one and a decode of others are separate runs over one cache, so nothing is padded and nothing copied.

        Args:
            inputs: slot → token ids int64 [T] for a model, else hidden states [T, E] in the bundle's dtype.

        Returns:
            slot → float32 logits [V] of its last token, or hidden states [T, E].

        Raises:
            InputError: an unknown slot, wrong input, or a sequence without room; nothing was written.
            NumericalError: the step produced inf or NaN; the session is as before.
        """
        table = self._slot_table()
        if not isinstance(inputs, Mapping):
            raise InputError(
                f"step: got {type(inputs).__name__}, expected a mapping from slots to their new tokens or hidden states"
            )
        if not inputs:
            raise InputError("step: got no slots, expected at least one")
        held = {slot: table.held(slot) for slot in inputs}
        on_device = any(is_device_tensor(x) for x in inputs.values())
        if on_device and not all(is_device_tensor(x) for x in inputs.values()):
            raise InputError("step: got inputs on the host and on the device, expected one or the other")
        sequences = {
            held[slot].row: self._inputs.sequence(self._taken(x), f"slot {slot}") for slot, x in inputs.items()
        }
        past_lens = {place.row: place.length for place in held.values()}
        names = {place.row: f"slot {slot}" for slot, place in held.items()}
        check_room({names[row]: (past_lens[row], len(x)) for row, x in sequences.items()}, self.cache_capacity)
        launches = unpadded_launches({row: len(x) for row, x in sequences.items()})
        with self._cleaned_where_it_fails(launches, past_lens):
            outputs = self._run(launches, sequences, past_lens, names, on_device)
            table.advance({slot: len(sequences[place.row]) for slot, place in held.items()})
        return {slot: outputs[place.row] for slot, place in held.items()}

    def _slot_table(self) -> SlotTable:
        self._get_ready()
        if self._lengths is not None:
            raise InputError("session: it is used with rows, so there are no slots; call reset() to choose anew")
        return self._slots or SlotTable(
            self.max_batch, self._slot_numbers
        )  # the choice is made by the first slot that is taken

    # --- running -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _cleaned_where_it_fails(
        self, launches: Sequence[Launch], past_lens: Sequence[int] | Mapping[int, int]
    ) -> Iterator[None]:
        """Notes which cache rows the launches may write, and zeroes them beyond their lengths unless the body ends well.

        The note is made before the first write and struck out after the new lengths are set, so that an interrupt at any point,
        or a cache that cannot be zeroed now, leaves it for the next call.
        """
        self._unclean = {
            row: min(past_lens[row] + launch.width, self.cache_capacity) for launch in launches for row in launch.rows
        }
        try:
            yield
        except (
            GeneratorExit
        ):  # dropped, by an interrupt between our lines: this may be any thread, in the middle of another call
            raise  # the next call finds the note
        except BaseException:
            self._clean()
            raise
        self._unclean = {}

    def _clean(self) -> None:
        """Zeroes what calls that did not end well may have left beyond the lengths that hold now."""
        while self._unclean:
            row, stop = next(iter(self._unclean.items()))
            self._cache.zero(row, self._length_of_row(row), stop)
            del self._unclean[row]

    def _length_of_row(self, row: int) -> int:
        if self._slots is not None:
            return self._slots.length_of_row(row)
        return self._lengths[row] if self._lengths is not None and row < len(self._lengths) else 0

    def _run(
        self,
        launches: list[Launch],
        sequences: Mapping[int, Any],
        past_lens: Mapping[int, int],
        names: Mapping[int, str],
        on_device: bool,
    ) -> dict[int, Any]:
        """Runs launches over cache rows; returns each row's logits [V] or hidden states [T, E]."""
        outputs: dict[int, Any] = {}
        for launch in launches:
            outputs |= self._launch(launch, sequences, past_lens, names, on_device)
        return outputs

    def _launch(
        self,
        launch: Launch,
        sequences: Mapping[int, Any],
        past_lens: Mapping[int, int],
        names: Mapping[int, str],
        on_device: bool,
    ) -> dict[int, Any]:
        batch = [sequences[row] for row in launch.rows]
        seq_lens = [len(sequence) for sequence in batch]
        feeds = step_feeds(
            self._input_name,
            DeviceRows(batch, launch.width)
            if isinstance(batch[0], DeviceTensor)
            else _right_padded(batch, launch.width),
            np.array([past_lens[row] for row in launch.rows], np.int64),
            np.array(seq_lens, np.int64),
        )
        output, host = self._run_step(feeds, launch.first, on_device)
        self._check_finite(host, launch, seq_lens, names)
        return {row: self._real_output(output, index, seq_lens[index]) for index, row in enumerate(launch.rows)}

    def _run_step(self, feeds: Mapping[str, Any], first_row: int, on_device: bool) -> tuple[Any, np.ndarray]:
        """One run of the stepper: its output where it lies, and in host memory."""
        if not on_device:
            output = self._stepper.run(feeds, self._cache, first_row)[self._output.name]
            return output, output
        assert isinstance(self._stepper, OnDevice), "_taken refuses device tensors for any other"
        output = self._stepper.run_on_device(feeds, self._cache, first_row)[self._output.name]
        return output, self._stepper.to_host(output)

    def _real_output(self, output: np.ndarray | DeviceTensor, index: int, seq_len: int) -> Any:
        """One row's logits [V] of its last token, or hidden states [T, E] of its real tokens."""
        if self._output.name == "logits" and SEQUENCE not in self._output.axes:
            return output.part(index) if isinstance(output, DeviceTensor) else output[index]
        if isinstance(output, DeviceTensor):
            real = output.part(index, seq_len)
            return real.part(seq_len - 1) if self._output.name == "logits" else real
        return output[index, seq_len - 1] if self._output.name == "logits" else output[index, :seq_len]

    def _check_finite(self, output: np.ndarray, launch: Launch, seq_lens: list[int], names: Mapping[int, str]) -> None:
        """Looks at the real rows of a host copy.

        Raises:
            NumericalError: some hold inf or NaN; names their sequences.
        """
        if np.isfinite(output).all():
            return
        bad = [
            names[row]
            for index, row in enumerate(launch.rows)
            if not np.isfinite(self._real_output(output, index, seq_lens[index])).all()
        ]
        if bad:
            raise NumericalError(
                f"{self._output.name}: inf or NaN in {', '.join(bad)}; the session is as before this step; "
                f"find the layer and operation with `python -m engines compare {self._folder} --audit`, or export with --dtype bf16 or fp32"
            )

    def _get_ready(self) -> None:
        """What every call but `reset` and `close` begins with."""
        self._check_open()
        self._clean()

    def _check_open(self) -> None:
        if not self._is_open:
            raise InputError("session: it is closed; open another")


def _right_padded(sequences: list[np.ndarray], width: int) -> np.ndarray:
    """Stacks sequences [T, …] of up to `width` tokens into one zero-padded batch [B, width, …]."""
    batch = np.zeros((len(sequences), width, *sequences[0].shape[1:]), sequences[0].dtype)
    for row, sequence in enumerate(sequences):
        batch[row, : len(sequence)] = sequence
    return batch
