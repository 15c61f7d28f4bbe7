"""The contenders, and how far the outputs of each may be from the reference's. A contender beyond that is not timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from exporter.common.errors import InputError

REFERENCE = "transformers"
OURS = "ours"


@dataclass(frozen=True)
class Entry:
    """One contender.

    Attributes:
        name: name in reports.
        module: module in benchmarks/contenders.
        model: form of the model that it reads: a name in `benchmarks.race.models.MAKERS` and that maker's arguments.
        environment: name of the peer's environment in `benchmarks.peers.environments`; None is our own environment.
        weights: how it stores the weights. With "fp32" its logits must be close to the reference's; with any other
            value they must agree as far as `FLOORS` says, and it runs the real model only.
        gpu: whether it runs on a GPU; it takes part only where one is visible.
        options: further arguments of its class, besides the model and the threads.
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
    """How far a contender's outputs must agree with the float32 reference's for the same tokens.

    Attributes:
        top1: share of positions with the same most likely token.
        kl: largest mean KL divergence, in nats.
        error: largest error of a logit, in root mean squares of the reference's; None where weights are rounded.
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
    # 0.73 and 0.33 were measured over 768 tokens: the checkpoint itself was rounded to 4 bits before.
    "int4": Floor(top1=0.6, kl=0.5),
    "uint4": Floor(top1=0.65, kl=0.3),
    "tensorrt": Floor(top1=0.95, kl=5e-3),
}


def choose_lineup(only: Sequence[str] | None, quick: bool) -> list[Entry]:
    """Returns the contenders of a run: those that `only` names, and always the reference, eager and ours.

    Args:
        only: names of contenders; None takes all.
        quick: whether `None` leaves out contenders that need an environment of their own.

    Raises:
        InputError: a name is unknown.
    """
    names = [entry.name for entry in LINEUP]
    unknown = set(only or ()) - set(names)
    if unknown:
        raise InputError(f"contenders: got {', '.join(sorted(unknown))}, expected some of {', '.join(names)}")
    default = [entry.name for entry in LINEUP if not (quick and entry.environment)]
    wanted = {REFERENCE, "eager", OURS, *(only or default)}
    return [entry for entry in LINEUP if entry.name in wanted]
