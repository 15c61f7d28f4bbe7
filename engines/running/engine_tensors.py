"""Checks the tensors of an engine against the contract of its bundle."""

from __future__ import annotations

from typing import Any

from engines.network.parsed import dtype_name
from exporter.common.errors import BundleError
from exporter.spec.tensors import Contract


def check_tensors(trt: Any, engine: Any, contract: Contract, file: str) -> None:
    """Checks that the engine's inputs and outputs have the names, modes and dtypes of the contract.

    Args:
        trt: the module of TensorRT.
        engine: the engine.
        contract: inputs and outputs of the bundle.
        file: name of the engine's file, for messages.

    Raises:
        BundleError: they differ; the message names the tensors.
    """
    got = {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        got[name] = (is_input, dtype_name(engine.get_tensor_dtype(name)))
    expected = {spec.name: (True, spec.dtype) for spec in contract.inputs} | {
        spec.name: (False, spec.dtype) for spec in contract.outputs
    }
    if got != expected:
        wrong = sorted(name for name in {*got, *expected} if got.get(name) != expected.get(name))
        raise BundleError(f"engine {file}: its tensors {wrong} are not those of the bundle; build again")


def cache_pairs(engine: Any, contract: Contract) -> dict[str, str]:
    """The present name of each past name, from the manifest.

    Raises:
        BundleError: the engine has alias information, and it differs from the manifest.
    """
    pairs = dict(contract.cache_pairs)
    read_alias = getattr(engine, "get_aliased_input_tensor", None)
    if read_alias is None:
        return pairs
    aliases = {alias: present for past, present in pairs.items() if (alias := read_alias(present))}
    if aliases and aliases != pairs:
        raise BundleError(f"engine: it aliases {aliases}, the manifest says {pairs}; build again")
    return pairs
