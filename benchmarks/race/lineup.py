"""Who takes part, and how far a contender's outputs may lie from the reference's before it is not timed at all."""

from __future__ import annotations

from dataclasses import dataclass, field

REFERENCE = "transformers"
OURS = "ours"


@dataclass(frozen=True)
class Entry:
    """One contender.

    Attributes:
        name: in reports.
        module: in benchmarks/contenders.
        model: what it reads, one of `benchmarks.race.models.MAKERS` and that maker's arguments.
        environment: a peer's, from `benchmarks.peers.environments`; None is the one that this runs in.
        weights: how it stores them; what is not fp32 is held to floors of agreement instead of closeness, and runs the real model only.
        gpu: runs on a GPU, and only where one is visible.
        options: of its class, beside the model and the threads.
    """

    name: str
    module: str
    model: str
    environment: str | None = None
    weights: str = "fp32"
    gpu: bool = False
    options: dict = field(default_factory=dict)


LINEUP = (
    Entry(REFERENCE, "transformers", "checkpoint"),
    Entry("eager", "eager", "checkpoint"),
    Entry(OURS, "ours", "bundle"),
    Entry("ours int8", "ours", "bundle --weights int8", weights="int8"),
    Entry("ours int4", "ours", "bundle --weights int4", weights="int4"),
    Entry("optimum", "optimum", "optimum", "optimum"),
    Entry("genai", "genai", "genai", "genai"),
    Entry("llama.cpp", "llama_cpp", "gguf F32", "llama_cpp", options={"float32": True}),
    Entry("llama.cpp F16", "llama_cpp", "gguf F16", "llama_cpp", weights="F16"),
    Entry("llama.cpp Q8_0", "llama_cpp", "gguf Q8_0", "llama_cpp", weights="Q8_0"),
    Entry("llama.cpp Q4_1", "llama_cpp", "gguf Q4_1", "llama_cpp", weights="Q4_1"),
    Entry("transformers, CUDA graphs", "transformers_cuda", "checkpoint", gpu=True),
    Entry("ours, TensorRT", "ours", "engine", gpu=True, weights="tensorrt", options={"backend": "tensorrt"}),
)


@dataclass(frozen=True)
class Floor:
    """What a contender's outputs must reach, against the float32 reference given the same tokens.

    Attributes:
        top1: share of positions with the same most likely token.
        kl: mean KL divergence in nats, at most.
        error: largest error of a logit in root mean squares of the reference's, at most; None where weights are rounded.
    """

    top1: float
    kl: float
    error: float | None = None


FLOORS = {
    "fp32": Floor(top1=1.0, kl=1e-6, error=1e-3),
    "F16": Floor(top1=0.98, kl=1e-3),
    "Q8_0": Floor(top1=0.95, kl=5e-3),
    "Q4_1": Floor(top1=0.65, kl=0.3),
    "int8": Floor(top1=0.9, kl=2e-2),
    "uint8": Floor(top1=0.95, kl=5e-3),
    "int4": Floor(
        top1=0.6, kl=0.5
    ),  # 0.73 and 0.33 were measured over 768 tokens: the checkpoint itself was rounded to 4 bits before
    "uint4": Floor(top1=0.65, kl=0.3),
    "tensorrt": Floor(top1=0.95, kl=5e-3),
}
