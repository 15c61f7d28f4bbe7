"""Gates: the steps of opening and running that a case passes. Wrappers around the project's functions count them."""

from __future__ import annotations

import functools
import importlib
import sys
from collections import Counter
from typing import Any

# gate → where its function is: module, and class where it is a method
GATES = {
    "manifest is JSON with the known keys": ("exporter.bundle.manifest", "ModelConfig", "from_dict", "entered"),
    "manifest agrees with itself": ("exporter.bundle.manifest", "Manifest", "_from_data", "left"),
    "sizes and checksums match": ("exporter.bundle.bundle", None, "check_graph_form", "entered"),
    "graph has the bundle's form": ("exporter.bundle.bundle", None, "check_graph_form", "left"),
    "bundle opened": ("exporter.bundle.bundle", "Bundle", "open", "left"),
    "graph file parsed as ONNX": ("engines.network.source", None, "load_source", "left"),
    "graph keeps its contract (verify)": ("exporter.validation.verify", None, "graph_problems", "left"),
    "onnxruntime session made": ("exporter.steppers.onnxruntime_stepper", None, "open_session", "left"),
    "decode session opened": ("runtime.session", "DecodeSession", "open", "left"),
    "prefill ran": ("runtime.session", "DecodeSession", "prefill", "left"),
    "TensorRT parsed the graph": ("engines.network.parsed", None, "parse_network", "left"),
    "validation ran": ("exporter.export", None, "validate_bundle", "left"),
    "engine records read": ("engines.building.publishing", None, "read_records", "left"),
    "engine file matched its record": ("engines.library.usable_engines", None, "check_engine", "left"),
    "tokenizer loaded": ("exporter.bundle.tokenizer", None, "open_tokenizer", "left"),
    "checkpoint's JSON read": ("exporter.checkpoint.checkpoint_folder", None, "read_json", "left"),
    "checkpoint's config accepted": ("exporter.spec.parameters", None, "weight_shapes", "left"),
    "tensor names and shards listed": ("exporter.checkpoint.checkpoint_folder", None, "check_coverage", "entered"),
    "tensors cover the config": ("exporter.checkpoint.checkpoint_folder", None, "check_coverage", "left"),
    "checkpoint opened": ("exporter.checkpoint.formats", None, "open_checkpoint", "left"),
    "bundle exported": ("exporter.export", None, "export_bundle", "left"),
    "arguments parsed": ("argparse", "ArgumentParser", "parse_args", "left"),
}


class Gates:
    """Counts calls of the functions in GATES. The reader of `passed` clears it."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        for gate, (module, owner, name, when) in GATES.items():
            try:
                home: Any = importlib.import_module(module)
            except ImportError:
                continue
            if owner is not None:
                self._wrap_method(getattr(home, owner), name, gate, when)
            else:
                self._wrap_function(getattr(home, name), name, gate, when)

    def _counted(self, function: Any, gate: str, when: str) -> Any:
        @functools.wraps(function)
        def counted(*arguments: Any, **named: Any) -> Any:
            if when == "entered":
                self.passed[gate] += 1
            result = function(*arguments, **named)
            if when == "left":
                self.passed[gate] += 1
            return result

        return counted

    def _wrap_method(self, owner: type, name: str, gate: str, when: str) -> None:
        raw = owner.__dict__[name]
        wrapped = self._counted(raw.__func__ if isinstance(raw, classmethod) else raw, gate, when)
        setattr(owner, name, classmethod(wrapped) if isinstance(raw, classmethod) else wrapped)

    def _wrap_function(self, function: Any, name: str, gate: str, when: str) -> None:
        """Replaces the function by the counted one in every module of the project that imported it."""
        counted = self._counted(function, gate, when)
        for module in list(sys.modules.values()):
            package = getattr(module, "__name__", "").partition(".")[0]
            if package in ("exporter", "engines", "runtime", "benchmarks") and getattr(module, name, None) is function:
                setattr(module, name, counted)
