"""Recognizes checkpoints whose weights are quantized, to refuse them with what they are.

Sources: the `quantization_config` that transformers writes, and the names of tensors that each tool stores for one
weight (AutoGPTQ, AutoAWQ, bitsandbytes, compressed-tensors, and fp8 with scales).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from exporter.checkpoint.checkpoint_folder import read_json
from exporter.common.errors import CheckpointError
from exporter.spec.catalogue import short

_FIX = "give the checkpoint that it was made from, and export with --weights for integers"
# Files of a tool's own beside config.json, for folders whose config.json has no quantization_config.
_CONFIG_FILES = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ"}
_METHODS = {
    **{"gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed-tensors"},
    **{"fp8": "fp8", "fbgemm_fp8": "fp8 (FBGEMM)"},
}
_NAMES = (  # endings of tensor names → what stores them; the first that fits counts
    ((".weight_packed", ".weight_shape"), "compressed-tensors"),
    ((".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"), "bitsandbytes (4 bits)"),
    ((".weight.absmax", ".weight.quant_map"), "bitsandbytes (4 bits)"),
    ((".SCB",), "bitsandbytes (8 bits)"),
    ((".g_idx",), "GPTQ"),
    ((".qweight", ".qzeros"), "GPTQ or AWQ"),
    ((".weight_scale_inv",), "fp8"),
    ((".weight_scale", ".weight_zero_point", ".input_scale"), "fp8 or compressed-tensors"),
)


def refuse_quantized_config(folder: Path, config: dict) -> None:
    """Refuses a folder whose config.json, or a file of the tool that made it, says that its weights are quantized.

    Raises:
        CheckpointError: the message has the method, its bits and its group size.
    """
    found, where = config.get("quantization_config"), "quantization_config in config.json"
    name = None
    for file, method in _CONFIG_FILES.items():
        if found is None and (folder / file).is_file():
            found, where, name = read_json(folder / file), file, method
    if found is None:
        return
    if not isinstance(found, dict):
        raise CheckpointError(f"checkpoint {folder}: got {short(found)} as {where}, expected an object or null")
    stated = found.get("quant_method")
    if name is None:
        name = _METHODS.get(stated, f"method {short(stated)}") if isinstance(stated, str) else "a method without a name"
    bits = found.get("bits", found.get("w_bit"))
    if bits is None:
        bits = next((n for key, n in (("load_in_4bit", 4), ("load_in_8bit", 8)) if found.get(key) is True), None)
    group = found.get("group_size", found.get("q_group_size"))
    details = "".join(
        f", {what} {short(value)}" for what, value in (("bits", bits), ("group size", group)) if value is not None
    )
    raise CheckpointError(
        f"checkpoint {folder}: its weights are quantized by {name}{details}, by {where}; such weights are not read; "
        f"{_FIX}"
    )


def refuse_quantized_tensors(folder: Path, names: Collection[str]) -> None:
    """Refuses weights that are stored as quantized ones are, whatever the config says.

    Raises:
        CheckpointError: the message has the method and a tensor that shows it.
    """
    for endings, method in _NAMES:
        shown = next((name for name in names if name.endswith(endings)), None)
        if shown is not None:
            raise CheckpointError(
                f"checkpoint {folder}: its weights are quantized by {method}, which its tensor {short(shown)} shows; "
                f"such weights are not read; {_FIX}"
            )


def quantized_dtype(dtype: str) -> str:
    """Returns what the dtype of a tensor, as safetensors names it, says about its weights, as the end of a message."""
    return f"; its weights are quantized to fp8; {_FIX}" if dtype.startswith("F8_") else ""
