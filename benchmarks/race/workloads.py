"""Workloads of the benchmark: models, and lengths, batches and capacities at which they run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from exporter.spec.catalogue import CATALOGUE, ModelConfig


@dataclass(frozen=True)
class Decode:
    """A decode case: steps of one token for each sequence, beginning after `past_len` cached tokens."""

    past_len: int
    batch: int
    capacity: int

    @property
    def name(self) -> str:
        return f"decode P={self.past_len:,} B={self.batch}"


@dataclass(frozen=True)
class Workload:
    """A model and the cases that contenders run on it.

    Attributes:
        name: name in reports.
        config: geometry of a model with random weights; None is the real model.
        decodes: decode cases.
        prefills: prompt lengths.
        rounds: turns of each contender in a decode case.
        steps: timed steps in a turn.
        prefill_rounds: turns in a prefill case, one prefill each; the first is a warm-up.
        capacities: cache capacities at which our own step is timed, with `sweep_len` cached tokens.
        sweep_len: see `capacities`.
        filled: whether cached keys and values are put in from outside where a contender allows that.
        rounded: whether contenders with rounded weights take part.
        prompts: number of prompts for which outputs are compared.
        tokens: number of tokens after each of these prompts.
    """

    name: str
    config: ModelConfig | None
    decodes: tuple[Decode, ...]
    prefills: tuple[int, ...] = ()
    rounds: int = 10
    steps: int = 5
    prefill_rounds: int = 4
    capacities: tuple[int, ...] = ()
    sweep_len: int = 896
    filled: bool = False
    rounded: bool = False
    prompts: int = 4
    tokens: int = 40


@dataclass(frozen=True)
class Plan:
    """Everything that one run of the benchmark does.

    Attributes:
        workloads: the workloads, one after the other; contenders are closed after each.
        bandwidth_bytes: size of the array that is read to find the machine's bandwidth, far larger than its caches.
        depths: numbers of layers of the models whose export is measured.
        depth_config: geometry of those models.
        record: file that the run writes.
        figures: folder for the plots.
    """

    workloads: tuple[Workload, ...]
    bandwidth_bytes: int
    depths: tuple[int, ...]
    depth_config: ModelConfig
    record: str
    figures: str


# Most contenders run models only. So the block gets an embedding and a head of 256 rows, 0.9 % of its weights.
BLOCK_8B = dataclasses.replace(CATALOGUE["llama3-8b"], n_layers=1, vocab_size=256, context_length=32_768)
TINY = ModelConfig(
    hidden_size=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=256,
    context_length=512,
)
REAL = "SmolLM2-135M"
BLOCK = "Llama 3 8B block"

FULL = Plan(
    workloads=(
        Workload(REAL, None, (Decode(1000, 1, 2048),), prefills=(512, 1000), rounds=12, rounded=True),
        Workload(
            BLOCK,
            BLOCK_8B,
            tuple(Decode(past, batch, 8192 if past > 1000 else 2048) for batch in (1, 8) for past in (16, 1000, 8000)),
            capacities=(1024, 2048, 4096, 8192, 16_384, 32_768),
            filled=True,
            tokens=8,
        ),
    ),
    bandwidth_bytes=2 << 30,
    depths=(4, 16, 30),
    depth_config=CATALOGUE["smollm2-135m"],
    record="benchmarks/records/bench.json",
    figures="docs/figures",
)
QUICK = Plan(
    workloads=(
        Workload("tiny", TINY, (Decode(16, 1, 256),), (32,), rounds=2, steps=2, prefill_rounds=2, prompts=2, tokens=8),
        Workload(
            "tiny block",
            dataclasses.replace(TINY, n_layers=1),
            tuple(Decode(past_len, batch, 256) for batch in (1, 2) for past_len in (16, 64)),
            rounds=2,
            steps=2,
            capacities=(128, 256, 512),
            sweep_len=64,
            filled=True,
            prompts=2,
            tokens=8,
        ),
    ),
    bandwidth_bytes=64 << 20,
    depths=(1, 2),
    depth_config=TINY,
    record="build/bench/quick.json",
    figures="build/bench/figures",
)
# Largest number of cached tokens, over all sequences, that a contender computes where its cache cannot be filled.
COMPUTED_PAST = 8000
