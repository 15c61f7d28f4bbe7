"""LoRA adapters merged into a checkpoint: by the published formula, and equal to PEFT where that is installed."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from exporter.bundle.bundle import Bundle
from exporter.checkpoint.formats import open_checkpoint
from exporter.commands.main import main
from exporter.common.errors import CheckpointError
from tests.conftest import TINY
from tests.support.checkpoint_folders import (
    canonical_names,
    half_split_pairs,
    huggingface_name,
    write_huggingface,
    write_json,
)

TIED = dataclasses.replace(TINY, tie_word_embeddings=True)
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False, "init_lora_weights": True}
PROJECTIONS = [name for name in canonical_names(TINY) if "_proj" in name]
ROTATED = ("q_proj.weight", "k_proj.weight")


def module(name: str) -> str:
    return huggingface_name(name).removesuffix(".weight")


def stored(name: str, part: str) -> str:
    return f"base_model.model.{module(name)}.{part}"


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) / 8


@pytest.fixture
def folder(tmp_path):
    return write_huggingface(tmp_path / "checkpoint", TINY)


def write_adapter(folder, tensors: dict[str, torch.Tensor], **settings):
    folder.mkdir(exist_ok=True)
    write_json(folder / "adapter_config.json", CONFIG | settings)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def adapter_tensors(base, ranks: dict[str, int]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {}
    for name, rank in ranks.items():
        outputs, inputs = base[huggingface_name(name)].shape
        tensors |= {
            stored(name, "lora_A.weight"): draw(rank, inputs),
            stored(name, "lora_B.weight"): draw(outputs, rank),
        }
    return tensors


def merged_file(base, tensors, scaling) -> dict[str, torch.Tensor]:
    """W + s B A for every pair, in the file's own order of rows."""
    merged = dict(base)
    for name in PROJECTIONS:
        if stored(name, "lora_A.weight") in tensors:
            product = tensors[stored(name, "lora_B.weight")] @ tensors[stored(name, "lora_A.weight")]
            merged[huggingface_name(name)] = base[huggingface_name(name)] + scaling(name) * product
    return merged


def check_equal(weights, merged):
    for name in canonical_names(TINY):
        read = weights.read(name)
        mine = half_split_pairs(read, TINY.head_dim) if name.endswith(ROTATED) else read
        torch.testing.assert_close(mine, merged[huggingface_name(name)], rtol=1e-6, atol=1e-6)  # measured: 1.2e-7
        if read.dim() == 2:
            rows, columns = slice(8, 24), slice(16, 48)
            torch.testing.assert_close(weights.read(name, columns, rows), read[rows, columns], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stabilized", [False, True])
def test_every_projection_gets_the_scaled_product(folder, tmp_path, stabilized):
    base = load_file(folder / "model.safetensors")
    tensors = adapter_tensors(base, dict.fromkeys(PROJECTIONS, 4))
    adapter = write_adapter(tmp_path / "adapter", tensors, use_rslora=stabilized)
    checkpoint = open_checkpoint(folder, lora=adapter)
    check_equal(checkpoint.weights, merged_file(base, tensors, lambda name: 8 / (2 if stabilized else 4)))
    assert checkpoint.weights.counts["merged"] == len(PROJECTIONS)
    assert f"{len(PROJECTIONS)} weights have the adapter adapter merged in" in checkpoint.notes[0]


def test_ranks_and_alphas_of_single_modules_are_read(folder, tmp_path):
    base = load_file(folder / "model.safetensors")
    down, q = "blocks.1.mlp.down_proj.weight", "blocks.2.attention.q_proj.weight"
    ranks = {name: 2 if name.endswith("down_proj.weight") else 6 if name == q else 4 for name in PROJECTIONS}
    tensors = adapter_tensors(base, ranks)
    settings = {
        "rank_pattern": {"down_proj": 2, module(q): 6},
        "alpha_pattern": {f"^{module(down)}": 5, "layers.2.self_attn.q_proj": 3},
    }
    alphas = {down: 5, q: 3}
    adapter = write_adapter(tmp_path / "adapter", tensors, **settings)
    check_equal(
        open_checkpoint(folder, lora=adapter).weights,
        merged_file(base, tensors, lambda name: alphas.get(name, 8) / ranks[name]),
    )


def test_modules_to_save_take_the_place_of_the_base_weights(folder, tmp_path):
    base = load_file(folder / "model.safetensors")
    saved = {name: base[name] + 1 for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")}
    tensors = {f"base_model.model.{name}": tensor for name, tensor in saved.items()}
    adapter = write_adapter(tmp_path / "adapter", tensors, modules_to_save=["lm_head", "embed_tokens", "model.norm"])
    check_equal(open_checkpoint(folder, lora=adapter).weights, base | saved)


def test_an_adapter_of_the_embedding_is_merged_and_of_a_tied_one_refused(folder, tmp_path):
    base = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    a, b = draw(4, TINY.vocab_size), draw(TINY.hidden_size, 4)
    tensors = {stored("embedding.weight", "lora_embedding_A"): a, stored("embedding.weight", "lora_embedding_B"): b}
    adapter = write_adapter(tmp_path / "adapter", tensors)
    embedding = "model.embed_tokens.weight"
    check_equal(open_checkpoint(folder, lora=adapter).weights, base | {embedding: base[embedding] + 2 * (b @ a).T})
    with pytest.raises(CheckpointError, match=r"embedding\.weight of a model whose output head is its embedding"):
        open_checkpoint(write_huggingface(tmp_path / "tied", TIED), lora=adapter)


def test_a_tied_model_whose_embedding_and_head_are_both_saved_is_untied(tmp_path):
    folder = write_huggingface(tmp_path / "tied", TIED)
    base = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    tensors = {stored("embedding.weight", "weight"): base + 1, stored("lm_head.weight", "weight"): base - 1}
    adapter = write_adapter(tmp_path / "adapter", tensors, modules_to_save=["lm_head", "embed_tokens"])
    checkpoint = open_checkpoint(folder, lora=adapter)
    assert not checkpoint.config.tie_word_embeddings
    assert torch.equal(checkpoint.weights.read("lm_head.weight"), base - 1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"use_dora": True}, "use_dora True is not merged"),
        ({"bias": "all"}, "bias 'all'"),
        ({"lora_bias": True}, "lora_bias True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"from_the_future": 1}, "from_the_future 1 is not merged"),
        ({"rank_pattern": {"(a+)+$": 4}}, r"pattern '\(a\+\)\+\$', expected names"),
        ({"r": 0}, "r 0"),
        ({"r": 8}, r"expected F32 or F16 or BF16 \[.*8"),
        ({"lora_alpha": float("inf")}, "lora_alpha inf"),
        ({"modules_to_save": ["lm_head"]}, r"no weight for modules_to_save 1 \(lm_head\)"),
    ],
    ids=str,
)
def test_what_is_not_merged_is_refused_by_name(folder, tmp_path, settings, said):
    base = load_file(folder / "model.safetensors")
    adapter = write_adapter(tmp_path / "adapter", adapter_tensors(base, dict.fromkeys(PROJECTIONS[:2], 4)), **settings)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(folder, lora=adapter)


@pytest.mark.parametrize(
    "name",
    [
        stored(PROJECTIONS[0], "lora_magnitude_vector"), stored(PROJECTIONS[0], "lora_B.bias"),
        "base_model.model.model.layers.0.mlp.experts.lora_A.weight", "model.norm.weight",
        stored("norm.weight", "weight"), "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight",
        stored("lm_head.weight", "lora_A.weight"),
    ],
)  # fmt: skip
def test_tensors_that_have_no_place_are_refused_by_name(folder, tmp_path, name):
    base = load_file(folder / "model.safetensors")
    tensors = adapter_tensors(base, {PROJECTIONS[0]: 4}) | {name: torch.ones(4, 4)}
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_checkpoint(folder, lora=write_adapter(tmp_path / "adapter", tensors))


def test_the_command_merges_and_records_the_adapter(folder, tmp_path, capsys):
    base = load_file(folder / "model.safetensors")
    tensors = adapter_tensors(base, dict.fromkeys(PROJECTIONS, 4))
    adapter = write_adapter(tmp_path / "adapter", tensors)
    target = tmp_path / "bundle"
    arguments = ["--unit", "model", "--dtype", "fp32", "--max-positions", "64", "-o", str(target)]
    assert main(["export", "--checkpoint", str(folder), "--lora", str(adapter), *arguments]) == 0
    report = json.loads((target / "report.json").read_text())
    assert report["provenance"]["lora"] == "adapter" and report["validation"]["passed"]
    assert Bundle.open(target)
    assert main(["export", "--model", "llama3-8b", "--lora", str(adapter), "-o", str(tmp_path / "no")]) == 2
    assert "--lora without --checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"up_proj": 3}}]
)
def test_merged_weights_equal_those_of_peft(folder, tmp_path, settings):
    """Measured with PEFT 0.21.2: 0 to 6e-8 of each weight."""
    peft = pytest.importorskip("peft", reason="needs peft, which is optional")
    from transformers import LlamaForCausalLM

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = LlamaForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, modules_to_save=["lm_head"], **settings)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) / 8)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload().state_dict()
    check_equal(open_checkpoint(folder, lora=tmp_path / "adapter").weights, merged)
    assert math.isfinite(float(merged["lm_head.weight"].sum()))
