"""DecodeSession: decodes sequences over a KV cache that is updated in place."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from engines.library.dlpack import DeviceTensor, is_device_tensor
from exporter.bundle.bundle import Bundle, check_in_place
from exporter.common.errors import InputError
from exporter.common.plain_numbers import is_whole, plain
from exporter.spec.catalogue import LARGEST_COUNT
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.unit import UNIT_KINDS
from exporter.steppers.protocol import Cache, Stepper
from runtime.backends import open_stepper
from runtime.device_io import DeviceIO, all_on_device
from runtime.inputs import InputChecker
from runtime.launching import Launcher
from runtime.policy.full_cache import check_room
from runtime.policy.launches import in_pieces, padded_launches, unpadded_launches
from runtime.policy.memory_estimate import estimate_memory
from runtime.policy.slots import SlotTable
from runtime.state import CacheOrigin, SessionState, SlotState
from runtime.turns import TakesTurns, in_turn

log = logging.getLogger(__name__)

WITH_CACHE = tuple(kind for kind in UNIT_KINDS if kind != "component")


class DecodeSession(TakesTurns):
    """Decodes a block, stack or model from a bundle. The session owns the cache and the length of each sequence.

    A session is used in one of two ways, until `reset`. With rows, `prefill` and `decode` use cache rows 0 … B − 1, and
    the first call fixes B. With slots, sequences join (`acquire`, `fork`, `import_slot`) and leave (`release`) at any
    time, and `step` advances any of them.

    A step is checked before anything is written. Where the cache has no room for the new tokens, the step is refused
    with an InputError and nothing changes (`runtime/policy/full_cache.py`): the session never drops old tokens.

    A step may fail part-way, by any exception, also by an interrupt from the keyboard. Then the lengths stay as they
    were, and the rows that it may have written are zeroed beyond their lengths. Where zeroing fails too, the next call
    does it first. Each of the other calls happens as a whole or not at all, and `lengths` shows which. An interrupt may
    come after a call has taken effect and before its result is returned. A caller that continues after one reads
    `lengths` first.

    Threads may share a session. Calls run one at a time, in no fixed order. `close` waits for a step that runs, and
    `lengths` may be read at any time. A session does not know which thread owns a slot. A call from inside another call
    of the same thread, such as a signal handler's, is refused.

    Attributes:
        manifest: the manifest of the bundle.
        backend: the backend in use, "onnxruntime", "tensorrt" or "eager".
        description: backend, version and device in words.
        max_batch: sequences that the cache holds.
        cache_capacity: tokens that each sequence can hold.
        memory: the memory that the session needs, in bytes.
        cache_origin: what the caches of this bundle depend on; an exported state carries it.
    """

    def __init__(self, bundle: Bundle, stepper: Stepper, max_batch: int, cache_capacity: int) -> None:
        super().__init__()
        self.manifest = bundle.manifest
        self.backend, self.description = stepper.backend, stepper.description
        self.max_batch, self.cache_capacity = max_batch, cache_capacity
        self.memory = estimate_memory(bundle.manifest, stepper.backend, max_batch, cache_capacity)
        self.cache_origin = CacheOrigin.of(bundle.manifest)
        self._inputs = InputChecker(bundle.manifest)
        self._output = self.manifest.contract.step_outputs[0]
        self._stepper, self._is_open = stepper, True
        self._cache: Cache = stepper.new_cache(max_batch, cache_capacity)
        self._state = SessionState(self._cache, max_batch, cache_capacity)
        self._device_io = DeviceIO(stepper, self._output, self._inputs.takes_tokens)
        self._launcher = Launcher(bundle, self._device_io, self._cache)

    @classmethod
    def open(
        cls,
        bundle: str | Path,
        backend: str = "auto",
        providers: str | Sequence[str] | None = None,
        max_batch: int = 4,
        cache_capacity: int | None = None,
        verify: str = "graph",
        allow_host_code: bool = False,
        threads: int | None = None,
    ) -> DecodeSession:
        """Opens a bundle for decoding.

        Args:
            bundle: the bundle's folder.
            backend: "onnxruntime", "tensorrt" (the bundle's engine), "eager" (the reference, slow) or "auto". Auto
                takes TensorRT where a GPU and an engine for it are there, else onnxruntime; `description` says which.
            providers: the onnxruntime execution provider; None means CPUExecutionProvider.
            max_batch: sequences to hold at once.
            cache_capacity: tokens per sequence, rounded up so that a sequence's cache is a multiple of 256 bytes. None
                means the engine's capacity, or the smaller of 2,048 and the positions that the graph was exported for.
            verify: "graph" checks file sizes and the graph's checksum; "full" checks every checksum, also the engine's.
            allow_host_code: whether the engine may run code of its own on the CPU, as version-compatible ones do.
            threads: threads of onnxruntime, which auto takes then; None means one for each processor that it may use.

        Raises:
            InputError: a bad argument, a unit without a cache, or not enough memory; nothing was allocated.
            BundleError: the bundle is damaged, or was replaced while it was being opened.
            BackendError: the backend or provider is not installed or cannot run this bundle.
        """
        opened = Bundle.open(bundle, verify)
        manifest = opened.manifest
        check_in_place(opened)
        if not manifest.unit.has_cache:
            raise InputError(
                f"bundle {bundle}: it is a {manifest.unit}, expected one of {', '.join(WITH_CACHE)}; "
                "a component has no cache to decode with"
            )
        max_batch, cache_capacity = plain(max_batch), plain(cache_capacity)
        if not is_whole(max_batch) or not 1 <= max_batch <= LARGEST_COUNT:
            raise InputError(f"max_batch: got {max_batch!r}, expected a whole number of at least 1")
        try:
            asked = (backend, providers, max_batch, cache_capacity, verify, allow_host_code, threads)
            stepper, capacity = open_stepper(opened, *asked)
        except Exception:
            opened.check_unchanged()  # the reason may be files of two bundles
            raise
        try:
            opened.check_unchanged()
            session = cls(opened, stepper, max_batch, capacity)
            log.info("decoding with %s; %d sequences of %d tokens", stepper.description, max_batch, capacity)
            return session
        except BaseException:
            stepper.close()
            raise

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> np.ndarray | dict[int, int]:
        """Tokens that each sequence holds: int64 [B] with rows, {slot: tokens} with slots; empty at first."""
        return self._state.lengths

    @in_turn
    def reset(self) -> None:
        """Forgets all sequences and zeroes the cache. The next call decides between rows and slots again."""
        self._check_open()
        self._state.reset()

    @in_turn
    def close(self) -> None:
        """Frees the backend and the cache. Any later call is an error, except another `close`."""
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.ExitStack() as freeing:  # frees each one even if freeing the other fails
            freeing.callback(self._stepper.close)
            freeing.callback(self._cache.free)
            # without these references nothing can use the two, and the memory that they still hold is freed
            del self._stepper, self._cache, self._state.cache, self._device_io, self._launcher

    def __enter__(self) -> DecodeSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- rows --------------------------------------------------------------------------------------------------------

    @in_turn
    def prefill(self, x: np.ndarray, lengths: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """Appends T tokens (or fewer, by `lengths`) to each sequence, in pieces where an engine takes no larger steps.

        With TensorRT, x may be a CUDA tensor of any library with DLPack; the result is then one too.

        Args:
            x: token ids int64 [B, T] for a model, else hidden states [B, T, E] in the bundle's dtype; right-padded.
            lengths: real tokens of each row, int [B], 1 to T; None means T.

        Returns:
            For a model float32 logits [B, V] of each row's last real token; else hidden states [B, T, E], zero at pads.

        Raises:
            InputError: a wrong dtype, shape, length or token, or a sequence without room; nothing was written.
            NumericalError: the step produced inf or NaN; the session is as before.
        """
        self._get_ready()
        return self._step_rows(self._device_io.take(x), lengths, is_device_tensor(x))

    @in_turn
    def decode(self, x: np.ndarray) -> np.ndarray:
        """Appends one token to each sequence.

        Args:
            x: token ids int64 [B] for a model, else hidden states [B, 1, E] or [B, E] in the bundle's dtype.

        Returns:
            For a model float32 logits [B, V]; else hidden states in the shape of x.

        Raises:
            InputError: a wrong dtype, shape or token, or a sequence without room; nothing was written.
            NumericalError: the step produced inf or NaN; the session is as before.
        """
        self._get_ready()
        taken, bare = self._inputs.one_token(self._device_io.take(x))
        if taken.ndim > 1 and taken.shape[1] != 1:
            raise InputError(f"decode: got {taken.shape[1]} tokens a row, expected 1; use prefill for more")
        output = self._step_rows(taken, None, is_device_tensor(x))
        if not bare or self._inputs.takes_tokens:
            return output
        axes = (taken.shape[0], taken.shape[2])
        return output.whole(*axes) if is_device_tensor(x) else output.reshape(axes)

    def _step_rows(
        self, x: np.ndarray | DeviceTensor, lengths: Sequence[int] | np.ndarray | None, on_device: bool
    ) -> Any:
        if self._state.slots is not None:
            raise InputError("session: got a call for rows, and it is used with slots; call reset() to use rows")
        x = self._inputs.batch(x)
        batch, width = x.shape[:2]
        self._check_batch(batch)
        seq_lens = self._inputs.lengths(lengths, batch, width)
        rows = (x.part(row, n) if isinstance(x, DeviceTensor) else x[row, :n] for row, n in enumerate(seq_lens))
        sequences = {row: self._inputs.real(sequence, f"row {row}") for row, sequence in enumerate(rows)}
        past_lens = self._state.row_lengths or [0] * batch
        names = [f"sequence {row}" for row in range(batch)]
        check_room(dict(zip(names, zip(past_lens, seq_lens, strict=True), strict=True)), self.cache_capacity)
        launches = padded_launches(past_lens, seq_lens, self.cache_capacity)
        pieces = in_pieces(launches, dict(enumerate(seq_lens)), self._device_io.max_seq_len)
        if on_device:
            self._device_io.check_rows(launches, pieces, seq_lens, width)
        total_lens = [past_len + seq_len for past_len, seq_len in zip(past_lens, seq_lens, strict=True)]
        with self._state.cleaned_where_it_fails(launches, past_lens):
            outputs = self._launcher.run(
                pieces, sequences, dict(enumerate(past_lens)), dict(enumerate(names)), on_device
            )
            self._state.row_lengths = total_lens
        if on_device:  # the rows of one launch are parts of one tensor
            by_row = [outputs[row] for row in range(batch)]
            first = by_row[0] if len(pieces) == 1 else self._device_io.one_after_another(by_row)
            return first.whole(batch, *(outputs[0].shape if self._output.name == "logits" else x.shape[1:]))
        if self._output.name == "logits":
            return np.stack([outputs[row] for row in range(batch)])
        padded = np.zeros(x.shape, numpy_dtype(self._output.dtype))
        for row, seq_len in enumerate(seq_lens):
            padded[row, :seq_len] = outputs[row]
        return padded

    def _check_batch(self, batch: int) -> None:
        """Checks the number of rows of a step."""
        row_lengths = self._state.row_lengths
        if row_lengths is not None and batch != len(row_lengths):
            raise InputError(
                f"batch: got {batch} rows, expected {len(row_lengths)} as in the first step; "
                "call reset() to begin again"
            )
        if batch > self.max_batch:
            raise InputError(
                f"batch: got {batch} rows, expected at most {self.max_batch}; open the session with max_batch={batch}"
            )

    # --- slots -------------------------------------------------------------------------------------------------------

    @in_turn
    def acquire(self) -> int:
        """Takes a slot for a new sequence. Its cache row is zeroed.

        Returns:
            The slot.

        Raises:
            InputError: all slots are taken, or the session is used with rows.
        """
        table = self._slot_table()
        return self._state.take(table, self._state.filled_row(table, 0), 0)

    @in_turn
    def release(self, slot: int) -> None:
        """Ends a sequence and frees its slot. Other sequences do not change.

        Raises:
            InputError: the slot is not active, or the session is used with rows.
        """
        self._slot_table().release(slot)

    @in_turn
    def fork(self, slot: int) -> int:
        """Takes a new slot that continues from a copy of another one, for prompts that begin alike.

        Returns:
            The new slot.

        Raises:
            InputError: the slot is not active, all slots are taken, or the session is used with rows.
        """
        table = self._slot_table()
        source = table.held(slot)
        row = self._state.filled_row(table, source.length)
        self._cache.copy(source.row, row, source.length)
        return self._state.take(table, row, source.length)

    @in_turn
    def export_slot(self, slot: int) -> SlotState:
        """Returns a copy of a sequence's cache, in host memory.

        Raises:
            InputError: the slot is not active, or the session is used with rows.
        """
        held = self._slot_table().held(slot)
        return SlotState(held.length, tuple(self._cache.read(held.row, held.length)), self.cache_origin)

    @in_turn
    def import_slot(self, state: SlotState) -> int:
        """Takes a new slot that continues from an exported one, of this session or of another one on an equal bundle.

        Returns:
            The new slot.

        Raises:
            InputError: it is no state of this bundle, it does not fit, all slots are taken, or rows are in use.
        """
        table = self._slot_table()
        self._state.check_slot_state(state, self.manifest.contract.cache_specs, self.cache_origin)
        row = self._state.filled_row(table, state.length)
        self._cache.write(row, list(state.tensors))
        return self._state.take(table, row, state.length)

    @in_turn
    def step(self, inputs: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Appends tokens to some of the active sequences, any number to each. The other sequences do not change.

        A prefill of one sequence and a decode of others are separate runs over one cache. Nothing is padded or copied.

        Args:
            inputs: slot → token ids int64 [T] for a model, else hidden states [T, E] in the bundle's dtype.

        Returns:
            Slot → float32 logits [V] of its last token, or hidden states [T, E].

        Raises:
            InputError: an unknown slot, a wrong input, or a sequence without room; nothing was written.
            NumericalError: the step produced inf or NaN; the session is as before.
        """
        table = self._slot_table()
        if not isinstance(inputs, Mapping):
            raise InputError(
                f"step: got {type(inputs).__name__}, expected a mapping from slots to their new tokens or hidden states"
            )
        if not inputs:
            raise InputError("step: got no slots, expected at least one")
        inputs = self._by_number(inputs)
        held = {slot: table.held(slot) for slot in inputs}
        on_device = all_on_device(inputs.values())
        taken = {slot: self._inputs.sequence(self._device_io.take(x), f"slot {slot}") for slot, x in inputs.items()}
        check_room({f"slot {slot}": (held[slot].length, len(x)) for slot, x in taken.items()}, self.cache_capacity)
        self._state.fill_gaps(table, taken)
        held = {slot: table.held(slot) for slot in inputs}
        sequences = {held[slot].row: x for slot, x in taken.items()}
        past_lens = {place.row: place.length for place in held.values()}
        names = {place.row: f"slot {slot}" for slot, place in held.items()}
        seq_lens = {row: len(x) for row, x in sequences.items()}
        launches = unpadded_launches(seq_lens)
        pieces = in_pieces(launches, seq_lens, self._device_io.max_seq_len)
        with self._state.cleaned_where_it_fails(launches, past_lens):
            outputs = self._launcher.run(pieces, sequences, past_lens, names, on_device)
            table.advance({slot: len(sequences[place.row]) for slot, place in held.items()})
        return {slot: outputs[place.row] for slot, place in held.items()}

    @staticmethod
    def _by_number(inputs: Mapping[Any, np.ndarray]) -> dict[Any, np.ndarray]:
        """Returns the inputs of a step by plain slot numbers.

        Raises:
            InputError: two keys are the same slot, as tensors can be.
        """
        numbered = {plain(slot): x for slot, x in inputs.items()}
        if len(numbered) != len(inputs):
            raise InputError(f"step: got slots {[plain(slot) for slot in inputs]}, expected each of them once")
        return numbered

    def _slot_table(self) -> SlotTable:
        self._get_ready()
        return self._state.slot_table()

    # --- before a call -----------------------------------------------------------------------------------------------

    def _get_ready(self) -> None:
        """Checks that the session is open, and cleans what a failed call has left."""
        self._check_open()
        self._state.clean()

    def _check_open(self) -> None:
        if not self._is_open:
            raise InputError("session: it is closed; open another")
