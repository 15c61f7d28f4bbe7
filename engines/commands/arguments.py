"""Arguments that several commands of `python -m engines` share, and the build request that they make."""

from __future__ import annotations

import argparse
from pathlib import Path

from engines.building.build import BuildRequest
from engines.library.backend import CHOICES, Backend, choose_backend
from engines.network.build_options import HARDWARE_COMPATIBILITY, PROFILING_VERBOSITY, BuildOptions
from engines.network.profiles import DEFAULT_MAX_BATCH, DEFAULT_MAX_SEQ_LEN
from exporter.common import terminal
from exporter.spec.limits import DEFAULT_CACHE_CAPACITY

SHAPES = ("min", "opt", "max")


def add_backend(parser: argparse.ArgumentParser) -> None:
    names = f"{', '.join(CHOICES[:-1])} or {CHOICES[-1]}"
    text = f"{names} (default auto: tensorrt where a GPU is visible, else tensorrt-rtx)"
    parser.add_argument("--backend", default="auto", metavar="NAME", help=text)


def add_shapes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shapes")
    text = f"largest number of sequences in one step (default {DEFAULT_MAX_BATCH})"
    group.add_argument("--max-batch", type=int, metavar="N", help=text)
    text = f"largest number of new tokens of a sequence in one step (default {DEFAULT_MAX_SEQ_LEN})"
    group.add_argument("--max-seq-len", type=int, metavar="N", help=text)
    text = f"cache rows per sequence (default {DEFAULT_CACHE_CAPACITY}, or the exported positions where they are fewer)"
    group.add_argument("--cache-capacity", type=int, metavar="N", help=text)
    for which in SHAPES:
        text = f"{which} shape of each dynamic input, x:1x16,y:1 or x:[1,16] y:[1]; each repetition adds a profile"
        group.add_argument(f"--{which}-shapes", nargs="+", action="append", default=[], metavar="SHAPES", help=text)


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("options of TensorRT")
    group.add_argument("--workspace", type=int, metavar="MIB", help="largest size of the workspace in MiB")
    text = "how long TensorRT searches for kernels"
    group.add_argument("--builder-optimization-level", type=int, metavar="0-5", help=text)
    text = "file with kernel timings; the build reads it and adds to it"
    group.add_argument("--timing-cache", type=Path, metavar="FILE", help=text)
    text = "make an engine that runs on later versions of TensorRT too"
    group.add_argument("--version-compatible", action="store_true", help=text)
    text = f"which other GPUs the engine runs on: {', '.join(HARDWARE_COMPATIBILITY)} (default none)"
    group.add_argument("--hardware-compatibility", default="none", metavar="LEVEL", help=text)
    text = "leave the weights out of the engine; the refit command puts them in"
    group.add_argument("--strip-plan", action="store_true", help=text)
    text = "make an engine whose weights the refit command can replace"
    group.add_argument("--refit", action="store_true", help=text)
    text = f"what the engine says about its layers: {', '.join(PROFILING_VERBOSITY)} (default layer_names_only)"
    group.add_argument("--profiling-verbosity", default="layer_names_only", metavar="LEVEL", help=text)
    text = "allow TF32 in float32 matrix products (default: not allowed)"
    group.add_argument("--tf32", action="store_true", help=text)


def build_options(arguments: argparse.Namespace) -> BuildOptions:
    """The options of TensorRT that were given."""
    return BuildOptions(
        workspace_mib=arguments.workspace,
        builder_optimization_level=arguments.builder_optimization_level,
        timing_cache=arguments.timing_cache,
        version_compatible=arguments.version_compatible,
        hardware_compatibility=arguments.hardware_compatibility,
        strip_plan=arguments.strip_plan,
        refit=arguments.refit,
        profiling_verbosity=arguments.profiling_verbosity,
        tf32=arguments.tf32,
    )


def build_request(arguments: argparse.Namespace, options: BuildOptions) -> BuildRequest:
    """The shapes that were given, with the options."""
    shapes = {
        f"{which}_shapes": tuple(",".join(texts) for texts in getattr(arguments, f"{which}_shapes")) for which in SHAPES
    }
    return BuildRequest(arguments.max_batch, arguments.max_seq_len, arguments.cache_capacity, **shapes, options=options)


def chosen_backend(arguments: argparse.Namespace) -> Backend:
    """The backend that was asked for; prints which one it is and why."""
    backend = choose_backend(arguments.backend)
    terminal.say(f"backend: {backend} ({backend.reason})")
    return backend
