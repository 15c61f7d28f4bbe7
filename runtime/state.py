"""What a session holds: cache rows, the length of each sequence, and rows that must be cleaned before the next call."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from exporter.bundle.manifest import DATA_FILE, Manifest
from exporter.common.errors import InputError
from exporter.common.plain_numbers import is_whole, plain
from exporter.spec.catalogue import ModelConfig
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.tensors import TensorSpec
from exporter.steppers.protocol import Cache
from runtime.policy.full_cache import check_room
from runtime.policy.launches import Launch
from runtime.policy.slots import SlotTable


@dataclass(frozen=True)
class CacheOrigin:
    """What the values of a cache depend on besides the tokens. Two bundles with equal origins can exchange caches.

    Attributes:
        weights: SHA-256 over the checksums of the files with the weights and the RoPE tables.
        layers: the layers whose keys and values are cached.
        numbers: how the bundle stores and computes numbers.
        max_positions: positions that the graph was exported for.
        config: the model's geometry, with RoPE.
    """

    weights: str
    layers: str
    numbers: str
    max_positions: int
    config: ModelConfig

    @classmethod
    def of(cls, manifest: Manifest) -> CacheOrigin:
        """Returns the origin of the caches of a bundle."""
        data = [entry["sha256"] for name, entry in manifest.files.items() if name.rpartition("/")[2] == DATA_FILE]
        first, weight_format = manifest.unit.first_layer, manifest.weight_format
        return cls(
            weights=hashlib.sha256(" ".join(data).encode()).hexdigest(),
            layers=f"{first}:{first + manifest.unit.n_layers}",
            numbers=f"{manifest.dtype}, attention in {manifest.attention_dtype}, weights in "
            + (f"{weight_format.dtype} blocks of {weight_format.block_size}" if weight_format else manifest.dtype),
            max_positions=manifest.max_positions,
            config=manifest.config,
        )

    def differences(self, other: CacheOrigin) -> list[str]:
        """Returns where another origin differs from this one, in words; empty where they are equal."""
        pairs = [(field.name, getattr(other, field.name), getattr(self, field.name)) for field in fields(self)]
        _, theirs, ours = pairs.pop()
        pairs += [(field.name, getattr(theirs, field.name), getattr(ours, field.name)) for field in fields(ours)]
        return [f"{name}: got {str(got)[:60]}, expected {str(own)[:60]}" for name, got, own in pairs if got != own]


@dataclass(frozen=True)
class SlotState:
    """A copy of one sequence's cache, to keep a prefix or to move it to another session.

    Attributes:
        length: tokens that it holds.
        tensors: key and value of each layer, [K, length, D] each, in the bundle's dtype.
        origin: what it belongs to. A session imports only what belongs to its own bundle or an equal one.
    """

    length: int
    tensors: tuple[np.ndarray, ...]
    origin: CacheOrigin | None = None


class SessionState:
    """The cache of a session and the lengths of its sequences.

    Attributes:
        cache: the cache, which the session owns and frees.
        row_lengths: tokens of each row; None while the session is not used with rows.
        slots: the slots; None while the session is not used with slots.
        unclean: cache row → end of the tokens that a failed call may have left beyond the row's length.
        ends: end of the tokens of each cache row that may not be zero. Cleaning a row costs no more than was written.
    """

    def __init__(self, cache: Cache, max_batch: int, cache_capacity: int) -> None:
        self.cache = cache
        self.row_lengths: list[int] | None = None
        self.slots: SlotTable | None = None
        self.unclean: dict[int, int] = {}
        self.ends = [0] * max_batch
        self._max_batch, self._cache_capacity = max_batch, cache_capacity
        self._slot_numbers = itertools.count()  # continues after a reset, so that a slot from before it is noticed

    @property
    def lengths(self) -> np.ndarray | dict[int, int]:
        """A copy of the lengths: int64 [B] with rows, {slot: tokens} with slots; empty before the first use."""
        slots = self.slots
        return np.array(self.row_lengths or [], np.int64) if slots is None else slots.lengths

    def reset(self) -> None:
        """Forgets all sequences and zeroes what they have written."""
        self.unclean = {row: end for row, end in enumerate(self.ends) if end}
        self.row_lengths = self.slots = None
        self.clean()
        self.ends = [0] * self._max_batch

    # --- slots -------------------------------------------------------------------------------------------------------

    def slot_table(self) -> SlotTable:
        """Returns the slots, or an empty table. It becomes the session's table when its first slot is taken.

        Raises:
            InputError: the session is used with rows.
        """
        if self.row_lengths is not None:
            raise InputError("session: got a call for slots, and it is used with rows; call reset() to use slots")
        return self.slots or SlotTable(self._max_batch, self._slot_numbers)

    def filled_row(self, table: SlotTable, length: int) -> int:
        """Returns a free cache row whose first `length` tokens the caller writes; the others are zero.

        The row stays free until `take`, so a failure here changes nothing.

        Raises:
            InputError: all rows are taken.
        """
        row = table.free_row()
        self._zero_beyond(row, length)
        self.ends[row] = length
        return row

    def take(self, table: SlotTable, row: int, length: int) -> int:
        """Gives a free row to a new slot; from now on the session is used with slots. Returns the slot."""
        slot = table.take(row, plain(length))
        self.slots = table
        return slot

    def fill_gaps(self, table: SlotTable, slots: Collection[int]) -> None:
        """Moves rows of a step into the gaps that released slots have left between them.

        One run of the graph costs less than two, by more than a move. A gap that a new sequence takes first, or that is
        beside the rows of the step, costs nothing.

        Args:
            table: the slots.
            slots: the active slots of the step.
        """
        while (move := table.next_move(slots)) is not None:
            length = table.length_of_row(move.source)
            self._zero_beyond(move.destination, length)
            self.ends[move.destination] = length
            self.cache.copy(move.source, move.destination, length)
            table.moved(move)

    def _zero_beyond(self, row: int, length: int) -> None:
        """Zeroes what was written to a row beyond its first `length` tokens."""
        if self.ends[row] > length:
            self.cache.zero(row, length, self.ends[row])
            self.ends[row] = length

    def check_slot_state(self, state: SlotState, specs: Sequence[TensorSpec], origin: CacheOrigin) -> None:
        """Checks a state that a caller wants to import.

        Args:
            state: what the caller gave.
            specs: the cache tensors of the bundle.
            origin: what the bundle's caches depend on.

        Raises:
            InputError: it is not a state, it belongs to another bundle, it does not fit the capacity, or it holds inf
                or NaN.
        """
        if not isinstance(state, SlotState) or not is_whole(plain(state.length)) or state.length < 0:
            raise InputError(f"slot state: got {reprlib.repr(state)}, expected what export_slot returned")
        expected = [((spec.axes[1], state.length, spec.axes[3]), numpy_dtype(spec.dtype)) for spec in specs]
        tensors = list(state.tensors) if isinstance(state.tensors, Sequence) else [state.tensors]
        got = [
            (tensor.shape, tensor.dtype) if type(tensor) is np.ndarray else type(tensor).__name__ for tensor in tensors
        ]
        if got != expected:
            raise InputError(
                f"slot state: got {len(got)} tensors {got[:1]}, expected {len(expected)} {expected[:1]}, "
                "as this bundle caches them"
            )
        if not isinstance(state.origin, CacheOrigin):
            raise InputError(
                f"slot state: got origin {reprlib.repr(state.origin)}, expected the cache_origin of the session that "
                "computed it; import what export_slot returned"
            )
        if differences := origin.differences(state.origin):
            raise InputError(
                f"slot state: it belongs to another bundle ({'; '.join(differences)}), so its keys and values give "
                "wrong tokens here; compute the prefix again in this session"
            )
        if not all(np.isfinite(tensor).all() for tensor in tensors):
            raise InputError(
                "slot state: it holds inf or NaN, which would reach every later token; compute the prefix again"
            )
        check_room({"the imported sequence": (0, state.length)}, self._cache_capacity)

    # --- cleaning ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def cleaned_where_it_fails(
        self, launches: Sequence[Launch], past_lens: Sequence[int] | Mapping[int, int]
    ) -> Iterator[None]:
        """Zeroes what the launches wrote beyond the lengths, unless the body succeeds.

        The rows are recorded in `unclean` before the first write, and the record is removed after the new lengths are
        set. So after an interrupt at any point, or where the cache cannot be zeroed now, the next call finds the
        record.

        Args:
            launches: the launches that the body runs.
            past_lens: tokens that each cache row holds before them.
        """
        self.unclean = {
            row: min(past_lens[row] + launch.width, self._cache_capacity) for launch in launches for row in launch.rows
        }
        for row, stop in self.unclean.items():
            self.ends[row] = max(self.ends[row], stop)
        try:
            yield
        except GeneratorExit:
            # An interrupt dropped this generator. It may end in any thread, in the middle of another call.
            # So it must not clean; the next call finds the record.
            raise
        except BaseException:
            self.clean()
            raise
        self.unclean = {}

    def clean(self) -> None:
        """Zeroes what failed calls may have left beyond the present lengths."""
        while self.unclean:
            row, stop = next(iter(self.unclean.items()))
            self.cache.zero(row, self._length_of_row(row), stop)
            del self.unclean[row]

    def _length_of_row(self, row: int) -> int:
        if self.slots is not None:
            return self.slots.length_of_row(row)
        return self.row_lengths[row] if self.row_lengths is not None and row < len(self.row_lengths) else 0
