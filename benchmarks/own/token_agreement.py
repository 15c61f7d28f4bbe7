"""Measures agreement with transformers token by token on real weights, for every dtype, backend and attention dtype.

python -m benchmarks.own.token_agreement CHECKPOINT [--tokens N]    writes benchmarks/records/agreement.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.machine.description import machine, stamp
from engines.interpreter.stepper import InterpreterStepper
from exporter.bundle.tokenizer import encode, open_tokenizer
from exporter.checkpoint.formats import open_checkpoint
from exporter.common import terminal
from exporter.export import ExportRequest, export_bundle
from exporter.measuring.agreement import Agreement, forced_logits, measure_agreement, prompts
from exporter.spec.unit import Unit
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper

RECORD = Path(__file__).parents[1] / "records" / "agreement.json"
CAPACITY = 128
VARIANTS = (  # dtype, attention's dtype, backends
    ("fp32", "fp32", ("onnxruntime", "interpreter")),
    ("fp16", "fp16", ("onnxruntime", "interpreter")),
    ("fp16", "fp32", ("onnxruntime", "interpreter")),
    ("bf16", "bf16", ("interpreter",)),
    ("bf16", "fp32", ("interpreter",)),
)
STEPPERS = {"onnxruntime": OnnxruntimeStepper.from_bundle, "interpreter": InterpreterStepper.from_bundle}


def transformers_greedy(
    checkpoint: Path, encoded: Sequence[Sequence[int]], n_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Generates greedily with transformers in float32.

    Returns:
        Tokens, int64 [prompts, n_tokens], and the logits that chose them, float32 [prompts, n_tokens, V].
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokens, logits = [], []
    with torch.inference_mode():
        for ids in encoded:
            whole = model.generate(
                torch.tensor([ids]), max_new_tokens=n_tokens, do_sample=False, eos_token_id=[], pad_token_id=0
            )
            tokens.append(whole[0, len(ids) :].numpy())
            logits.append(model(whole[:, :-1]).logits[0, len(ids) - 1 :].numpy())
    return np.stack(tokens), np.stack(logits)


def measure(checkpoint: Path, n_tokens: int) -> list[dict]:
    """Returns one row for each variant and backend: its agreement with transformers."""
    opened, rows = open_checkpoint(checkpoint), []
    unit = Unit.parse("model", opened.config)
    reference: tuple[np.ndarray, np.ndarray] | None = None
    for dtype, attention_dtype, backends in VARIANTS:
        with tempfile.TemporaryDirectory() as scratch:
            options = {"attention_dtype": attention_dtype, "tokenizer_files": opened.tokenizer_files}
            request = ExportRequest(opened.config, unit, opened.weights, dtype, **options)
            bundle = export_bundle(request, Path(scratch) / "bundle", validated=False)
            encoded = [encode(open_tokenizer(bundle), prompt) for prompt in prompts()]
            reference = reference or transformers_greedy(checkpoint, encoded, n_tokens)
            tokens, logits = reference
            for backend in backends:
                stepper = STEPPERS[backend](bundle)
                agreement = measure_agreement(logits, forced_logits(stepper, encoded, tokens, CAPACITY))
                stepper.close()
                variant = {"dtype": dtype, "attention_dtype": attention_dtype, "backend": backend}
                rows.append({**variant, **asdict(agreement)})
                terminal.say(f"{dtype}, attention {attention_dtype}, {backend}: {agreement}")
    return rows


def table(rows: Sequence[dict]) -> Table:
    columns = ("dtype", "attention", "backend", "top-1", "greedy tokens", "shortest", "KL, mean", "KL, largest")
    shown = Table(*columns, title_justify="left")
    shown.title = (
        f"agreement with transformers in float32, {rows[0]['n_prompts']} prompts, {rows[0]['n_tokens']} tokens each"
    )
    for row in rows:
        agreement = Agreement(**{name: row[name] for name in Agreement.__dataclass_fields__})
        lengths = f"{agreement.greedy_length:.1f}", str(agreement.shortest_greedy_length)
        figures = (f"{agreement.top1:.1%}", *lengths, f"{agreement.kl:.1e}", f"{agreement.largest_kl:.1e}")
        shown.add_row(row["dtype"], row["attention_dtype"], row["backend"], *figures)
    return shown


def main() -> None:
    prog, description = "python -m benchmarks.own.token_agreement", __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of the small real model")
    parser.add_argument(
        "--tokens", type=int, default=48, metavar="N", help="tokens after each prompt (default %(default)s)"
    )
    arguments = parser.parse_args()
    rows = measure(arguments.checkpoint, arguments.tokens)
    terminal.stderr.print(table(rows))
    RECORD.write_text(json.dumps({**stamp(), "machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
