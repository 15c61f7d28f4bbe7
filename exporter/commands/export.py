"""`python -m exporter export`: exports a block, stack, model or component to a bundle and validates it."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.commands.validation_answers import add_limits, say_answers
from exporter.common import terminal
from exporter.common.errors import InputError
from exporter.costs.stored_size import parts_within
from exporter.spec.catalogue import CATALOGUE, ModelConfig, lookup
from exporter.spec.dtypes import DTYPES, lookup_dtype
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.limits import DEFAULT_MAX_POSITIONS
from exporter.spec.parameters import weight_shapes
from exporter.spec.unit import COMPONENTS, LOGITS, Unit
from exporter.spec.weight_formats import WEIGHT_FORMATS, WeightFormat

if TYPE_CHECKING:  # this module loads torch
    from exporter.export import ExportRequest


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the parser of this command."""
    parser = commands.add_parser("export", help="export a block, stack, model or component to a bundle and validate it")
    _add_model_arguments(parser)
    _add_number_arguments(parser)
    _add_form_arguments(parser)
    parser.add_argument("--no-validate", action="store_true", help="skip the comparison with the eager definition")
    add_limits(parser)
    output_help = "folder to make; an older bundle there is replaced"
    parser.add_argument("-o", "--output", required=True, metavar="BUNDLE", help=output_help)
    parser.set_defaults(run=run)


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name the model, its weights and the layers to export."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="model of the catalogue: alone, the geometry for random weights; with a Meta checkpoint, the values that "
        f"params.json lacks; one of {', '.join(CATALOGUE)}",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="folder with geometry and weights: a Hugging Face folder, or a Meta folder together with --model",
    )
    parser.add_argument(
        "--lora", metavar="DIR", help="folder of a LoRA adapter, as PEFT saves it, to merge into the checkpoint"
    )
    parser.add_argument(
        "--unit",
        default="block",
        metavar="UNIT",
        help=f"block (default), stack, model or component:NAME, NAME one of {', '.join(COMPONENTS)}",
    )
    parser.add_argument(
        "--layers", metavar="N|A:B", help="the first N layers, or layers A to B-1; a block takes layer 0"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for random weights, used without a checkpoint (default 0)"
    )


def _add_number_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that choose how numbers are stored and computed."""
    dtype_help = f"one of {', '.join(DTYPES)} (default fp16)"
    parser.add_argument("--dtype", default="fp16", metavar="DTYPE", help=dtype_help)
    parser.add_argument(
        "--attention-dtype",
        metavar="DTYPE",
        help="fp32: attention is computed in float32, the rest in the dtype (default: the dtype)",
    )
    parser.add_argument(
        "--weights",
        metavar="FORMAT",
        help="store matrices as integers with one scale per block of weights: one of "
        f"{', '.join(WEIGHT_FORMATS)}; TensorRT takes only the signed ones",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help="number of weights that share a scale, a power of two of at least 16 (default 32)",
    )


def _add_form_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that choose the form of the graphs."""
    parser.add_argument(
        "--max-positions",
        type=int,
        metavar="N",
        help=f"longest sequence (default {DEFAULT_MAX_POSITIONS}, at most the model's context)",
    )
    parser.add_argument(
        "--logits",
        metavar="WHICH",
        help=f"logits that a model returns: one of {', '.join(LOGITS)} (default last; all with --cache growing)",
    )
    parser.add_argument(
        "--cache",
        default="in_place",
        metavar="HOW",
        help="in_place (default), or growing: past in, present out, for optimum and onnxruntime-genai",
    )
    parser.add_argument(
        "--parts", type=int, metavar="N", help="cut a stack or model into N graphs, which build compiles one by one"
    )
    parser.add_argument(
        "--part-budget",
        type=float,
        metavar="GIB",
        help="cut into the fewest parts that can each be compiled in this much memory; replaces --parts",
    )


def run(arguments: argparse.Namespace) -> None:
    """Exports the bundle and prints both answers of its validation, its size and its time."""
    lookup_dtype(arguments.dtype)
    request = _read_request(arguments)
    from exporter.export import export_bundle
    from exporter.validation.cost import CostLimits

    limits = CostLimits(arguments.max_kl, arguments.min_agreement)
    if arguments.no_validate and limits != CostLimits():
        raise InputError("--max-kl and --min-agreement: they need the validation; leave out --no-validate")
    shapes = weight_shapes(request.config, request.unit)
    total = sum(math.prod(shape) for shape in shapes.values()) * lookup_dtype(request.dtype).n_bytes
    with terminal.byte_progress("weights", total) as progress:
        bundle = export_bundle(request, arguments.output, not arguments.no_validate, progress, terminal.say, limits)
    report = bundle.read_report()
    if "validation" in report:
        say_answers(report["validation"])
    else:
        terminal.say("not validated, as asked")
    size = terminal.mib(sum(entry["size_bytes"] for entry in bundle.manifest.files.values()))
    terminal.say(f"{bundle.folder}: {request.unit}, {request.dtype}, {size}, {report['export']['seconds']:.1f} s")


def _read_request(arguments: argparse.Namespace) -> ExportRequest:
    """Reads the checkpoint or the catalogue and checks every argument before anything is written."""
    if arguments.lora is not None and not arguments.checkpoint:
        raise InputError("export: got --lora without --checkpoint, expected the checkpoint that the adapter belongs to")
    if arguments.model is None and arguments.checkpoint is None:
        raise InputError("export: give either --model NAME (random weights) or --checkpoint DIR")
    model = _read_checkpoint(arguments) if arguments.checkpoint is not None else _random_model(arguments)
    config = model["config"]
    unit = Unit.parse(arguments.unit, config, arguments.layers, arguments.logits, arguments.cache)
    if arguments.parts is not None and arguments.part_budget is not None:
        raise InputError("export: give either --parts N or --part-budget GIB")
    weight_format = _weight_format(arguments)
    from exporter.export import ExportRequest

    return ExportRequest(
        unit=unit,
        dtype=arguments.dtype,
        max_positions=arguments.max_positions,
        attention_dtype=arguments.attention_dtype,
        n_parts=_n_parts(arguments, config, unit, weight_format),
        weight_format=weight_format,
        **model,
    )


def _read_checkpoint(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of an export request that come from a checkpoint."""
    from exporter.checkpoint.formats import open_checkpoint

    checkpoint = open_checkpoint(arguments.checkpoint, arguments.model, arguments.lora)
    for note in checkpoint.notes:
        terminal.say(f"note: {note}")
    return {
        "config": checkpoint.config,
        "weights": checkpoint.weights,
        "end_token_ids": checkpoint.end_token_ids,
        "tokenizer_files": checkpoint.tokenizer_files,
        "begin_token_id": checkpoint.begin_token_id,
        "pad_token_id": checkpoint.pad_token_id,
        "provenance": {
            "checkpoint": Path(arguments.checkpoint).name,
            "tensors": checkpoint.weights.counts,
            **({} if arguments.lora is None else {"lora": Path(arguments.lora).resolve().name}),
            **({"notes": checkpoint.notes} if checkpoint.notes else {}),
        },
    }


def _random_model(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of an export request for a model of the catalogue with random weights."""
    from exporter.model.weights import RandomWeights

    config = lookup(arguments.model)
    weights = RandomWeights(config, arguments.seed)
    terminal.say(f"weights: random, from seed {arguments.seed}; give --checkpoint for real ones")
    return {"config": config, "weights": weights, "provenance": {"model": arguments.model}}


def _n_parts(arguments: argparse.Namespace, config: ModelConfig, unit: Unit, weight_format: WeightFormat | None) -> int:
    """Returns the number of graphs that --parts or --part-budget asks for."""
    if arguments.part_budget is None:
        return 1 if arguments.parts is None else arguments.parts
    spec = GraphSpec.checked(
        config, unit, arguments.dtype, arguments.max_positions, arguments.attention_dtype, weight_format
    )
    return parts_within(spec, int(arguments.part_budget * 2**30))


def _weight_format(arguments: argparse.Namespace) -> WeightFormat | None:
    formats = ", ".join(WEIGHT_FORMATS)
    if arguments.weights is None:
        if arguments.block_size is not None:
            raise InputError(
                f"block size: got {arguments.block_size} without --weights, expected --weights with one of {formats}"
            )
        return None
    if arguments.block_size is None:
        return WeightFormat(arguments.weights)
    return WeightFormat(arguments.weights, arguments.block_size)
