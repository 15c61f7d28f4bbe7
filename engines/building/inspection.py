"""Describes a bundle's network and engines as one JSON document."""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from typing import Any

from engines.building.preparation import BuildRequest, PreparedNetwork, prepare_bundle
from engines.library.backend import Backend
from engines.library.gpu import visible_gpus
from engines.library.tensorrt_logger import create_logger
from engines.library.usable_engines import check_engine, check_lineage, check_runnable
from engines.network.profiles import Profile
from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import EngineRecord, read_records
from exporter.bundle.manifest import Manifest
from exporter.common.errors import BundleError
from exporter.costs.ledger import Ledger
from exporter.spec.dtypes import DTYPES


def inspect_bundle(bundle: Bundle, backend: Backend, request: BuildRequest) -> dict:
    """Parses and checks a bundle's network as a build does, and lists its engines.

    Returns:
        `backend`, `version`, `unit`, `dtype`, `cache_capacity`, `layers` (histogram), `kv_cache_updates` (count),
        `attention` (name, mask, causal_kind, heads), `io` (name, dtype, shape, mode, alias), `profiles`, `memory`
        (bytes), `notes`, and `engines` (the engine records, with `usable`: "yes" or the reason against it).

    Raises:
        InputError: the shapes are inconsistent, or the bundle has several graphs.
        BundleError: a file of the bundle is missing or damaged.
        CheckFailed: TensorRT would compute something else than the graph says.
        BackendError: the backend has no kernel for the graph.
    """
    prepared = prepare_bundle(bundle, backend, request)
    parsed, manifest = prepared.parsed, bundle.manifest
    return {
        "backend": backend.name,
        "version": backend.version,
        "unit": str(manifest.unit),
        "dtype": manifest.dtype,
        "cache_capacity": prepared.cache_capacity,
        "layers": dict(parsed.layer_types.most_common()),
        "kv_cache_updates": len(parsed.cache_updates),
        "attention": [
            {
                "name": layer.name,
                "mask": layer.mask,
                "causal_kind": layer.causal_kind,
                "dtype": layer.dtype,
                "n_heads": layer.queries[1],
                "n_kv_heads": layer.keys[1],
                "head_dim": layer.queries[3],
            }
            for layer in parsed.attention
        ],
        "io": _io(prepared),
        "profiles": [profile.to_dict() for profile in prepared.profiles],
        "memory": memory_estimate(manifest, prepared.profiles, prepared.cache_capacity, manifest.weights_bytes),
        "notes": prepared.notes,
        "engines": [asdict(record) | _engine_state(bundle, record, backend) for record in read_records(bundle.folder)],
    }


def _io(prepared: PreparedNetwork) -> list[dict]:
    """Every input and output of the network. `alias` is the tensor at the same address: present is at that of past."""
    pairs = {update.past: update.present for update in prepared.parsed.cache_updates}
    aliases = pairs | {present: past for past, present in pairs.items()}
    sides = (("input", prepared.parsed.inputs), ("output", prepared.parsed.outputs))
    return [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "mode": mode,
            "alias": aliases.get(tensor.name),
        }
        for mode, tensors in sides
        for tensor in tensors
    ]


def memory_estimate(manifest: Manifest, profiles: list[Profile], capacity: int | None, weights_bytes: int) -> dict:
    """Returns how many bytes decoding needs.

    The activations are an estimate at the largest shapes: two residual streams, and gate, up and product of the MLP.
    An engine needs less where it fuses these operations.
    """
    config, width = manifest.config, DTYPES[manifest.dtype].n_bytes
    tokens = max(prod(next(iter(profile.ranges.values())).max[:2]) for profile in profiles)
    per_token = Ledger.of(config).cache_bytes_per_token(manifest.dtype) // config.n_layers * manifest.unit.n_layers
    return {
        "weights_bytes": weights_bytes,
        "activations_estimate_bytes": tokens * (2 * config.hidden_size + 3 * config.intermediate_size) * width,
        "cache_bytes_per_sequence": per_token * capacity if capacity else 0,
    }


def _engine_state(bundle: Bundle, record: EngineRecord, backend: Backend) -> dict[str, Any]:
    """Whether an engine can be used here. Where a GPU can load it, also properties of the loaded engine."""
    try:
        check_engine(bundle.folder, record)
        check_lineage(bundle, record)
        check_runnable(record, backend.name, backend.version, visible_gpus())
    except BundleError as error:
        return {"usable": str(error)}
    return {"usable": "yes", **_deserialized(bundle, record, backend)}


def _deserialized(bundle: Bundle, record: EngineRecord, backend: Backend) -> dict[str, Any]:
    """Properties of the loaded engine; needs a GPU."""
    trt, logger = backend.trt, create_logger(backend.trt)
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine((bundle.folder / record.file).read_bytes())
    if engine is None:
        return {"usable": f"engine {record.file}: it does not load: {logger.reason()}"}
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    return {
        "num_layers": engine.num_layers,
        "device_memory_bytes": engine.device_memory_size_v2,
        "aliases": {name: alias for name in names if (alias := engine.get_aliased_input_tensor(name))},
    }
