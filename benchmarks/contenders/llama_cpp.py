"""llama.cpp, through the C interface of llama-cpp-python."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass, field
from importlib.metadata import version

import llama_cpp
import numpy as np

from benchmarks.contenders.interface import Base

FLOAT32 = 0  # ggml's number for float32
FUSED_NEVER = 0  # llama.cpp's number for "flash attention: disabled"
ERROR_LEVEL = 4  # ggml's number for errors
BATCH_TOKENS = 512  # largest number of tokens in one pass; llama.cpp's default


@dataclass
class State:
    context: ctypes.c_void_p
    batch: int
    lengths: list[int] = field(default_factory=list)


@llama_cpp.llama_log_callback
def _only_errors(level: int, text: bytes, _: object) -> None:
    if level == ERROR_LEVEL:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


class Contender(Base[State]):
    """The llama.cpp contender. Its cache can be filled only from its own file format, so a past is computed.

    With `float32`, keys and values are cached in float32 and attention is computed in float32; llama.cpp's fused
    attention uses float16. Without it, llama.cpp chooses both.
    """

    can_fill = False

    def __init__(self, model: str, threads: int, float32: bool = False) -> None:
        self._threads, self._float32 = threads, float32
        self.version = f"llama-cpp-python {version('llama-cpp-python')}"
        survives = self._survives_a_step(model)
        if not survives:
            self.version += ", without its special weight layouts (AMX, repacked): they end the process on this machine"
        self._load(model, survives)

    def _load(self, model: str, special_layouts: bool) -> None:
        llama_cpp.llama_log_set(_only_errors, None)
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_extra_bufts = special_layouts
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), parameters)
        if not self._model:
            raise RuntimeError(f"{model}: llama.cpp cannot load it")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def _survives_a_step(self, model: str) -> bool:
        """Whether a step with llama.cpp's own choices returns. A child process tries it, because it may be killed."""
        child = os.fork()
        if child == 0:
            try:
                self._load(model, special_layouts=True)
                self.step(self.start(1, 64), np.ones((1, 8), np.int64))
                os._exit(0)
            finally:
                os._exit(1)
        return os.waitpid(child, 0)[1] == 0

    def start(self, batch: int, capacity: int) -> State:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = batch * capacity
        parameters.n_seq_max = batch
        parameters.n_batch = parameters.n_ubatch = BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = self._threads
        if self._float32:
            parameters.type_k = parameters.type_v = FLOAT32
            parameters.flash_attn_type = FUSED_NEVER
        parameters.kv_unified = False
        parameters.no_perf = True
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError(f"llama.cpp: no context for {batch} sequences of {capacity} tokens")
        return State(context, batch, [0] * batch)

    def step(self, state: State, tokens: np.ndarray) -> np.ndarray:
        if tokens.shape[1] == 1:
            return self._run(state, [(row, int(token), True) for row, (token,) in enumerate(tokens)])
        return np.concatenate([self._prefill(state, row, sequence) for row, sequence in enumerate(tokens)])

    def _prefill(self, state: State, row: int, sequence: np.ndarray) -> np.ndarray:
        """Runs one sequence in passes of BATCH_TOKENS; returns the logits of its last token."""
        for start in range(0, len(sequence), BATCH_TOKENS):
            chunk = sequence[start : start + BATCH_TOKENS]
            last = start + len(chunk) == len(sequence)
            logits = self._run(
                state, [(row, int(token), last and index == len(chunk) - 1) for index, token in enumerate(chunk)]
            )
        return logits

    def _run(self, state: State, entries: list[tuple[int, int, bool]]) -> np.ndarray:
        """Runs one pass; each entry is (sequence, token, whether its logits are wanted)."""
        batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
        try:
            batch.n_tokens = len(entries)
            for index, (row, token, wanted) in enumerate(entries):
                batch.token[index], batch.pos[index] = token, state.lengths[row]
                batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, row, wanted
                state.lengths[row] += 1
            status = llama_cpp.llama_decode(state.context, batch)
            if status:
                raise RuntimeError(f"llama.cpp: llama_decode answers {status}")
            wanted_at = [index for index, entry in enumerate(entries) if entry[2]]
            rows = [
                np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(state.context, index), (self._vocabulary,))
                for index in wanted_at
            ]
            return np.stack(rows).copy() if rows else np.empty((0, self._vocabulary), np.float32)
        finally:
            llama_cpp.llama_batch_free(batch)

    def drop(self, state: State) -> None:
        llama_cpp.llama_free(state.context)
