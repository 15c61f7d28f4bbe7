"""DecodeSession: sequences over an in-place KV cache, checked before every step, unharmed by one that fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from exporter.bundle import Bundle
from exporter.contract import SEQUENCE, check_cache_capacity, numpy_dtype
from exporter.errors import InputError, NumericalError
from exporter.feeds import step_feeds
from exporter.steppers.protocol import Stepper
from runtime.plan import Launch, check_fits, plan_launches

BACKENDS = ("auto", "eager", "onnxruntime")


class DecodeSession:
    """Decodes a block, stack or model from a bundle; owns the cache and the length of each sequence.

    `prefill` and `decode` use cache rows 0 … B − 1, B fixed by the first call until `reset`. A step is checked before
    anything is written. One that fails part-way leaves lengths as they were and zeroes the rows it may have written.
    Threads that share a session take turns.

    Attributes:
        manifest: what the bundle is.
        backend: the backend in use, "onnxruntime" or "eager".
        description: backend, version and device in words.
        max_batch: sequences that the cache holds.
        cache_capacity: tokens that each sequence can hold.
    """

    def __init__(self, bundle: Bundle, stepper: Stepper, max_batch: int, cache_capacity: int) -> None:
        self.manifest = bundle.manifest
        self.backend, self.description = stepper.backend, stepper.description
        self.max_batch, self.cache_capacity = max_batch, cache_capacity
        self._stepper: Stepper | None = stepper
        self._cache = stepper.new_cache(max_batch, cache_capacity)
        self._input = self.manifest.contract.step_inputs[0]
        self._output = self.manifest.contract.step_outputs[0]
        self._lengths: np.ndarray | None = None  # int64 [B]; None before the first step
        self._lock = threading.Lock()

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
            backend: "onnxruntime", "eager" (the reference, slow), or "auto", which takes onnxruntime.
            providers: the onnxruntime execution provider; None means CPUExecutionProvider.
            max_batch: sequences to hold at once.
            cache_capacity: tokens per sequence, rounded up so that a sequence's cache is a multiple of 256 bytes;
                None means the smaller of 2,048 and what the graph was exported for.
            verify: "graph" checks file sizes and the graph's checksum, "full" the weights' checksum too.

        Raises:
            InputError: a bad argument, or a unit without a cache.
            BundleError: the bundle is damaged.
            BackendError: the backend or provider is not here or cannot run this bundle.
        """
        opened = Bundle.open(bundle, verify)
        manifest = opened.manifest
        if not manifest.unit.has_cache:
            raise InputError(f"bundle {bundle}: it is a {manifest.unit}, expected a block, stack or model; a component has no cache to decode with")
        if not isinstance(max_batch, int) or max_batch < 1:
            raise InputError(f"max_batch: got {max_batch!r}, expected a whole number of at least 1")
        capacity = check_cache_capacity(cache_capacity, manifest.config, manifest.dtype, manifest.max_positions)
        return cls(opened, _open_stepper(opened, backend, providers), max_batch, capacity)

    # --- state ---------------------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> np.ndarray:
        """Tokens that each sequence holds: a copy, int64 [B]; empty before the first step."""
        return np.zeros(0, np.int64) if self._lengths is None else self._lengths.copy()

    def reset(self) -> None:
        """Forgets all sequences and zeroes the cache, whatever was in it."""
        with self._lock:
            self._check_open()
            for row in range(self.max_batch):
                self._cache.zero(row, 0, self.cache_capacity)
            self._lengths = None

    def close(self) -> None:
        """Frees the backend and the cache; any later use is an error. Closing twice is not."""
        with self._lock:
            if self._stepper is not None:
                self._stepper.close()
                self._stepper = self._cache = None

    def __enter__(self) -> DecodeSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- steps ---------------------------------------------------------------------------------------------------------

    def prefill(self, x: np.ndarray, lengths: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """Appends T tokens (or fewer, by `lengths`) to each sequence.

        Args:
            x: token ids int64 [B, T] for a model, else hidden states [B, T, E] in the bundle's dtype; right-padded.
            lengths: real tokens of each row, int [B], 1 to T; None means T.

        Returns:
            For a model float32 logits [B, V] of each row's last real token; else hidden states [B, T, E], pads zero.

        Raises:
            InputError: wrong dtype, shape, lengths or tokens, or a sequence without room; nothing was written.
            NumericalError: the step produced inf or NaN; the session is as before.
        """
        with self._lock:
            self._check_open()
            x = self._checked_input(x)
            seq_lens = self._checked_lengths(lengths, *x.shape[:2])
            return self._step(self._without_rubbish(x, seq_lens), seq_lens)

    def decode(self, x: np.ndarray) -> np.ndarray:
        """Appends one token to each sequence: token ids int64 [B], or hidden states [B, 1, E]. Otherwise as `prefill`."""
        with self._lock:
            self._check_open()
            x = np.asarray(x)
            x = self._checked_input(x[:, None] if self._input.dtype == "int64" and x.ndim == 1 else x)
            if x.shape[1] != 1:
                raise InputError(f"decode: got {x.shape[1]} tokens a row, expected 1; use prefill for more")
            seq_lens = np.ones(len(x), np.int64)
            return self._step(self._without_rubbish(x, seq_lens), seq_lens)

    def _step(self, x: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        past_lens = np.zeros(len(x), np.int64) if self._lengths is None else self._lengths
        check_fits(past_lens.tolist(), seq_lens.tolist(), self.cache_capacity)
        launches = plan_launches(past_lens.tolist(), seq_lens.tolist(), self.cache_capacity)
        started: list[Launch] = []
        try:
            outputs = []
            for launch in launches:
                started.append(launch)
                outputs.append(self._launch(launch, x, past_lens, seq_lens))
        except BaseException:
            for launch in started:
                for row in range(launch.first, launch.stop):
                    past_len = int(past_lens[row])
                    self._cache.zero(row, past_len, min(past_len + launch.width, self.cache_capacity))
            raise
        self._lengths = past_lens + seq_lens
        return outputs[0] if len(outputs) == 1 else np.concatenate(outputs)

    def _launch(self, launch: Launch, x: np.ndarray, past_lens: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        rows = slice(launch.first, launch.stop)
        feeds = step_feeds(self._input.name, x[rows, : launch.width], past_lens[rows], seq_lens[rows])
        output = self._stepper.run(feeds, self._cache, launch.first)[self._output.name]
        if self._output.name == "logits":
            result = output[np.arange(len(output)), seq_lens[rows] - 1] if SEQUENCE in self._output.axes else output
        else:  # hidden states, padded back to the width of the call
            result = np.zeros((len(output), x.shape[1], output.shape[2]), output.dtype)
            result[:, : launch.width] = output
        finite = np.isfinite(result).reshape(len(result), -1).all(1)
        if not finite.all():
            bad = (np.flatnonzero(~finite) + launch.first).tolist()
            raise NumericalError(
                f"{self._output.name}: inf or NaN in sequences {bad}; the session is as before this step; "
                "export with --dtype bf16 or fp32, or look at the model's largest activations"
            )
        return result

    # --- checks --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._stepper is None:
            raise InputError("session: it is closed; open another")

    def _checked_input(self, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        tokens = self._input.dtype == "int64"
        hidden_size = self.manifest.config.hidden_size
        if tokens and (x.ndim != 2 or x.dtype.kind not in "iu"):
            raise InputError(f"tokens: got {x.dtype} {list(x.shape)}, expected integers [B, T] (decode: [B])")
        if not tokens and (x.ndim != 3 or x.shape[2] != hidden_size or x.dtype != numpy_dtype(self.manifest.dtype)):
            raise InputError(f"hidden states: got {x.dtype} {list(x.shape)}, expected {self.manifest.dtype} [B, T, {hidden_size}]")
        if 0 in x.shape:
            raise InputError(f"{self._input.name}: got shape {list(x.shape)}, expected at least one sequence and one token")
        batch = len(x)
        if self._lengths is not None and batch != len(self._lengths):
            raise InputError(f"batch: got {batch} rows, expected {len(self._lengths)} as in the first step; call reset() to begin again")
        if batch > self.max_batch:
            raise InputError(f"batch: got {batch} rows, expected at most {self.max_batch}; open the session with max_batch={batch}")
        return x

    def _without_rubbish(self, x: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """x with its padding zeroed, and for tokens checked against the vocabulary and widened to int64."""
        pads = np.arange(x.shape[1]) >= seq_lens[:, None]
        if pads.any():
            x = x.copy()
            x[pads] = 0
        if self._input.dtype != "int64":
            return x
        vocab_size = self.manifest.config.vocab_size
        wrong = (x < 0) | (x >= vocab_size)
        if wrong.any():
            row, step = np.argwhere(wrong)[0].tolist()
            raise InputError(f"tokens: got {x[row, step]} in row {row} at {step}, expected 0 to {vocab_size - 1}, the model's vocabulary")
        return x.astype(np.int64)

    def _checked_lengths(self, lengths: Sequence[int] | np.ndarray | None, batch: int, width: int) -> np.ndarray:
        if lengths is None:
            return np.full(batch, width, np.int64)
        lengths = np.asarray(lengths)
        if lengths.shape != (batch,) or lengths.dtype.kind not in "iu":
            raise InputError(f"lengths: got {lengths.dtype} {list(lengths.shape)}, expected integers [{batch}], one for each row")
        if lengths.min() < 1 or lengths.max() > width:
            raise InputError(f"lengths: got {lengths.tolist()}, expected 1 to {width}, the tokens of a row")
        return lengths.astype(np.int64)


def _open_stepper(bundle: Bundle, backend: str, providers: str | Sequence[str] | None) -> Stepper:
    if backend not in BACKENDS:
        raise InputError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
    names = [providers] if isinstance(providers, str) else list(providers or [])
    if backend == "eager":
        if names:
            raise InputError(f"providers: got {names} for the eager backend, expected none; they belong to onnxruntime")
        from exporter.steppers.eager import EagerStepper

        return EagerStepper.from_bundle(bundle)
    if len(names) > 1:
        raise InputError(f"providers: got {names}, expected one; a second one would be a silent fallback")
    from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper

    return OnnxruntimeStepper.from_bundle(bundle, *names)
