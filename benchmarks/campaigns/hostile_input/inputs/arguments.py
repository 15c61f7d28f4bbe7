"""Hostile command lines over good bundles: every option with senseless numbers, texts and paths."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

from benchmarks.campaigns.hostile_input.doors import Door, command

# Numbers between small and absurd are left out: a batch of a million works and takes long.
NUMBERS = (
    "0", "1", "2", "3", "-1", "-0", "1e3", "nan", "inf", "-inf", "", " ", "0x10", "1_0", "١", "9" * 12, "9" * 30,
    "9" * 5000, "1.5", "true", "None", "2147483648", "9223372036854775808", "-9223372036854775809", "1e400", "5e-324",
    "\n", "0.9", "1.0000001",
)  # fmt: skip
TEXTS = (
    "", " ", "-", "--", "-x", "--help", "a", "fp16", "fp32", "bf16", "fp64", "all", "last", "block", "model", "stack",
    "component:", "component:x", "component:rms_norm", "component:repeat_kv", "growing", "auto", "eager",
    "onnxruntime", "tensorrt", "tensorrt-rtx", "eager,onnxruntime", ",", "CPUExecutionProvider",
    "CUDAExecutionProvider", "0:1", "1:2", "1", ":", "2:1", "x:1x2", "x:[1,2]", "position_ids:1x1", "\x1b[31mred",
    "é", "模型", "a\nb", "\udcff", "x" * 100_000, "[bold]", "{}", "%s", "*", "$(touch canary)", "`touch canary`",
    "; touch canary",
)  # fmt: skip
INPUTS = (
    "{}/input", "{}/input", "{}/input", "{}/input", "{}/input/model.onnx", "{}/nowhere", "", ".", "/dev/null",
    "/proc/self", "\udcff", "x" * 5000,
)  # fmt: skip
OUTPUTS = (
    "{}/out/a",
    "{}/out/b\nc",
    "{}/out/-x",
    "{}/out/\udcff",
    "{}/out/" + "y" * 300,
    "{}/input/model.onnx/x",
    "/proc/x/y",
    "",
    "{}/out/[red]",
)
OPTIONS = {  # command → option → kind of its value; None where it has no value
    ("exporter", "params"): {"--model": "model", "--past-len": "number", "--format": "text"},
    ("exporter", "export"): {
        "--model": "text", "--checkpoint": "checkpoint", "--unit": "text", "--layers": "text", "--dtype": "text",
        "--attention-dtype": "text", "--seed": "number", "--max-positions": "number", "--logits": "text",
        "--cache": "text", "--parts": "number", "--part-budget": "number", "-o": "output",
    },
    ("exporter", "validate"): {"--seed": "number", "--by-layer": None, "--no-by-layer": None, "--format": "text"},
    ("exporter", "verify"): {},
    ("engines", "build"): {
        "--onnx": "input", "-o": "output", "--backend": "text", "--max-batch": "number", "--max-seq-len": "number",
        "--cache-capacity": "number", "--min-shapes": "text", "--opt-shapes": "text", "--max-shapes": "text",
        "--workspace": "number", "--builder-optimization-level": "number", "--timing-cache": "output",
        "--version-compatible": None, "--hardware-compatibility": "text", "--strip-plan": None, "--refit": None,
        "--profiling-verbosity": "text", "--tf32": None,
    },
    ("engines", "inspect"): {
        "--backend": "text", "--max-batch": "number", "--max-seq-len": "number", "--cache-capacity": "number",
        "--format": "text",
    },
    ("engines", "compare"): {
        "--checkpoint": "checkpoint", "--model": "text", "--backends": "text", "--provider": "text",
        "--parser": "text", "--no-audit": None, "--seed": "number", "--html": "output", "--cache-capacity": "number",
        "--save-inputs": "output", "--save-outputs": "output", "--save-data-loader": "output", "--format": "text",
    },
    ("engines", "refit"): {"--engine": "text"},
    ("runtime", "decode"): {
        "--backend": "text", "--provider": "text", "--cache-capacity": "number", "--batch": "number",
        "--prompt-len": "number", "--steps": "number", "--format": "text",
    },
    ("runtime", "generate"): {
        "--backend": "text", "--provider": "text", "--cache-capacity": "number", "--prompt": "text",
        "--max-new-tokens": "number", "--temperature": "number", "--top-k": "number", "--top-p": "number",
        "--seed": "number",
    },
    ("runtime", "report"): {
        "--backend": "text", "--provider": "text", "--cache-capacity": "number", "--prompt": "text",
        "--max-new-tokens": "number",
    },
}  # fmt: skip
MODELS = ("llama3-8b", "smollm2-135m", "llama3.1-405b", "nope", "", "\x1b[31m")


def _value(kind: str, rng: Random) -> str:
    if rng.random() < 0.03:
        return rng.choice(NUMBERS + TEXTS)
    if kind == "checkpoint":
        return rng.choice(("{}/checkpoint", "{}/checkpoint", "{}/checkpoint", "{}/nowhere", "{}/input", "", "\n"))
    return rng.choice({"number": NUMBERS, "text": TEXTS, "input": INPUTS, "output": OUTPUTS, "model": MODELS}[kind])


def _spelled(option: str, kind: str | None, rng: Random) -> list[str]:
    """Returns an option and its value as one word or two, at times without the value."""
    if kind is None or rng.random() < 0.02:
        return [option]
    value = _value(kind, rng)
    return [f"{option}={value}"] if rng.random() < 0.5 and option.startswith("--") else [option, value]


def command_line(originals: Path, folder: Path, rng: Random) -> list[Door]:
    """Makes one command with some of its options; its input is a good bundle."""
    shutil.copytree(originals / rng.choice(("model", "block")), folder)
    (folder.parent / "checkpoint").symlink_to(originals / "huggingface")
    weights = [0.2 if name in ("export", "compare") else 1 for _, name in OPTIONS]  # these two can take seconds
    ((stage, name), options) = rng.choices(list(OPTIONS.items()), weights)[0]
    words = [name]
    if name not in ("params", "export") and rng.random() < 0.95:
        words.append(rng.choice(INPUTS))
    if name == "export":  # a unit without weights, so that a full-size model takes no time
        words += ["--checkpoint", "{}/checkpoint", "--no-validate", "-o", "{}/out/bundle", "--max-positions", "16"]
        words += ["--unit", "component:repeat_kv"]
    if name in ("generate", "report"):
        words += ["--prompt", "hello", "--cache-capacity", "16"]
    for option in rng.sample(list(options), min(len(options), rng.choice((0, 1, 1, 2, 3)))):
        words += _spelled(option, options[option], rng)
    if rng.random() < 0.1:
        rng.shuffle(words)
    if rng.random() < 0.05:
        words.insert(rng.randrange(len(words) + 1), rng.choice(TEXTS))
    return [command(stage, *words, label=f"{stage} {name}")]


def prompt(originals: Path, folder: Path, rng: Random) -> list[Door]:
    """Makes a random text as a prompt."""
    shutil.copytree(originals / "model", folder)
    alphabet = rng.choice(
        (
            "ab hel",
            "\x01\x1b\x7f\x9b[31m",
            "éß模型👍🏽\u202e\u200d\ufeff",
            "\ud800\udcff\udfff",
            "<|endoftext|></s>[INST]",
        )
    )
    text = "".join(rng.choice(alphabet) for _ in range(rng.choice((0, 1, 3, 10, 50, 5000))))
    return [
        command("runtime", rng.choice(("generate", "report")), "{}/input", f"--prompt={text}", "--max-new-tokens", "2")
    ]


KINDS = {"command line": command_line, "prompt": prompt}
