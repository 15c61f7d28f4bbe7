"""Checkpoints with quantized weights: recognized by the config or by the tensors, and refused with what they are."""

from __future__ import annotations

import pytest
import torch

from exporter.checkpoint.formats import open_checkpoint
from exporter.common.errors import CheckpointError
from tests.conftest import TINY
from tests.support.checkpoint_folders import edit_config, rewrite_tensors, write_huggingface, write_json

Q = "model.layers.0.self_attn.q_proj"
NAMED = {
    "GPTQ": {f"{Q}.qweight": torch.int32, f"{Q}.qzeros": torch.int32, f"{Q}.g_idx": torch.int32},
    "GPTQ or AWQ": {f"{Q}.qweight": torch.int32, f"{Q}.qzeros": torch.int32, f"{Q}.scales": torch.float16},
    r"bitsandbytes \(4 bits\)": {
        f"{Q}.weight": torch.uint8, f"{Q}.weight.absmax": torch.float32, f"{Q}.weight.quant_map": torch.float32,
        f"{Q}.weight.quant_state.bitsandbytes__nf4": torch.uint8,
    },
    r"bitsandbytes \(8 bits\)": {f"{Q}.weight": torch.int8, f"{Q}.SCB": torch.float32},
    "compressed-tensors": {f"{Q}.weight_packed": torch.int32, f"{Q}.weight_scale": torch.float16},
    "fp8": {f"{Q}.weight": torch.float8_e4m3fn, f"{Q}.weight_scale_inv": torch.float32},
    "fp8 or compressed-tensors": {f"{Q}.weight": torch.float8_e4m3fn, f"{Q}.weight_scale": torch.float32},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return write_huggingface(tmp_path / "checkpoint", TINY)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, "GPTQ, bits 4, group size 128"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, "AWQ, bits 4, group size 64"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes, bits 4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, bits 8"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "hqq"}, "method 'hqq'"),
        ({"bits": 4}, "a method without a name, bits 4"),
    ],
    ids=str,
)
def test_a_quantized_config_is_refused_with_its_method(folder, config, said):
    edit_config(folder, TINY, quantization_config=config)
    with pytest.raises(
        CheckpointError, match=rf"quantized by {said}, by quantization_config in config.json; .*--weights"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize(("name", "said"), [("quantize_config.json", "GPTQ"), ("quant_config.json", "AWQ")])
def test_the_file_of_a_tool_is_recognized(folder, name, said):
    write_json(folder / name, {"bits": 4, "q_group_size": 128})
    with pytest.raises(CheckpointError, match=rf"quantized by {said}, bits 4, group size 128, by {name}"):
        open_checkpoint(folder)


@pytest.mark.parametrize("method", NAMED)
def test_quantized_tensors_are_refused_with_their_method_whatever_the_config_says(folder, method):
    def change(tensors):
        del tensors[f"{Q}.weight"]
        tensors |= {name: torch.ones(8, 8).to(dtype) for name, dtype in NAMED[method].items()}

    rewrite_tensors(folder, change)
    with pytest.raises(CheckpointError, match=rf"quantized by {method}, which its tensor 'model\..*--weights"):
        open_checkpoint(folder)


def test_fp8_without_scales_is_refused_by_its_dtype(folder):
    rewrite_tensors(
        folder, lambda tensors: tensors.update({f"{Q}.weight": tensors[f"{Q}.weight"].to(torch.float8_e4m3fn)})
    )
    with pytest.raises(
        CheckpointError, match=r"F8_E4M3, expected one of F32, F16, BF16; its weights are quantized to fp8"
    ):
        open_checkpoint(folder)


def test_a_null_quantization_config_is_none(folder):
    edit_config(folder, TINY, quantization_config=None)
    open_checkpoint(folder)
