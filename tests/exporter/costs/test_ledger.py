"""The ledger has the numbers of the source documents and agrees with the modules."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from exporter.costs.ledger import Ledger
from exporter.model.components import component, eager_module
from exporter.spec.catalogue import CATALOGUE, WIDTH_RULES, ModelConfig, lookup
from exporter.spec.unit import COMPONENTS, Unit

MIB = 2**20
MODULE_OF_LEDGER = {"attention_norm": "rms_norm", "ffn_norm": "rms_norm"}
TINY = ModelConfig(
    hidden_size=8,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=4,
    intermediate_size=12,
    vocab_size=10,
    context_length=16,
)


def ledger_of(name: str) -> Ledger:
    return Ledger.of(lookup(name), WIDTH_RULES[name])


@pytest.fixture(scope="module")
def llama3_8b() -> Ledger:
    return ledger_of("llama3-8b")


# --- Llama 3 8B, as documented ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "component_name", "calculation", "parameters"),
    [
        ("attention norm", "attention_norm", "4,096", 4_096),
        ("query projection", "prepare_qkv", "4,096 × 4,096", 16_777_216),
        ("key projection", "prepare_qkv", "4,096 × (8 × 128)", 4_194_304),
        ("value projection", "prepare_qkv", "4,096 × (8 × 128)", 4_194_304),
        ("output projection", "merge_project", "4,096 × 4,096", 16_777_216),
        ("MLP norm", "ffn_norm", "4,096", 4_096),
        ("gate projection", "swiglu_mlp", "4,096 × 14,336", 58_720_256),
        ("up projection", "swiglu_mlp", "4,096 × 14,336", 58_720_256),
        ("down projection", "swiglu_mlp", "14,336 × 4,096", 58_720_256),
    ],
)
def test_every_matrix_of_the_8b_block(llama3_8b, name, component_name, calculation, parameters):
    (row,) = [row for row in llama3_8b.rows if row.name == name]
    assert dataclasses.astuple(row) == (component_name, name, calculation, parameters)


def test_the_8b_block_has_nine_weights_in_five_components(llama3_8b):
    assert len(llama3_8b.rows) == 9
    assert llama3_8b.components == ("attention_norm", "prepare_qkv", "merge_project", "ffn_norm", "swiglu_mlp")


@pytest.mark.parametrize(
    ("component_name", "per_block", "all_blocks"),
    [
        ("prepare_qkv", 25_165_824, 805_306_368),
        ("merge_project", 16_777_216, 536_870_912),
        ("swiglu_mlp", 176_160_768, 5_637_144_576),
        ("attention_norm", 4_096, 131_072),
        ("ffn_norm", 4_096, 131_072),
    ],
)
def test_every_component_of_the_8b_block(llama3_8b, component_name, per_block, all_blocks):
    assert llama3_8b.component_parameters(component_name) == per_block
    assert llama3_8b.to_dict(0)["components"][component_name]["per_block"] == per_block
    assert llama3_8b.to_dict(0)["components"][component_name]["all_blocks"] == all_blocks


@pytest.mark.parametrize("component_name", ["attention", "repeat_kv"])
def test_attention_and_repeat_have_no_weights(llama3_8b, component_name):
    assert llama3_8b.component_parameters(component_name) == 0


def test_one_16_bit_mlp_is_336_mib(llama3_8b):
    sizes = llama3_8b.to_dict(0)["components"]["swiglu_mlp"]["per_block_bytes"]
    assert sizes == {"fp16": 336 * MIB, "bf16": 336 * MIB, "fp32": 672 * MIB}


def test_a_gelu_mlp_has_two_matrices(llama3_8b):
    assert llama3_8b.gelu_mlp == {"same_width": 117_440_512, "width_4d": 134_217_728}
    assert llama3_8b.to_dict(0)["gelu_mlp"]["same_width"]["bytes"]["fp16"] == 224 * MIB
    assert llama3_8b.to_dict(0)["gelu_mlp"]["width_4d"]["bytes"]["fp16"] == 256 * MIB


def test_the_width_is_derived_step_by_step(llama3_8b):
    assert [result for _, result in llama3_8b.width_steps] == [16_384, 10_922, 14_198, 14_336]
    assert Ledger.of(lookup("llama3-8b")).width_steps == ()


@pytest.mark.parametrize(
    ("name", "dtype", "n_bytes"),
    [("llama3-8b", "fp16", 131_072), ("llama3-8b", "fp32", 262_144), ("smollm2-135m", "bf16", 23_040)],
)
def test_cache_bytes_per_token(name, dtype, n_bytes):
    assert ledger_of(name).cache_bytes_per_token(dtype) == n_bytes


# --- totals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_the_total_is_the_published_one(name, parameters):
    assert ledger_of(name).model_parameters == parameters


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_total_is_the_sum_of_its_parts(name):
    ledger = ledger_of(name)
    blocks = ledger.config.n_layers * ledger.block_parameters
    around = ledger.embedding_parameters + ledger.config.hidden_size + ledger.head_parameters
    assert ledger.model_parameters == blocks + around


def test_a_tied_model_stores_one_vocabulary_matrix():
    tied, untied = (Ledger.of(dataclasses.replace(TINY, tie_word_embeddings=tie)) for tie in (True, False))
    assert (tied.embedding_parameters, tied.head_parameters) == (80, 0)
    assert (untied.embedding_parameters, untied.head_parameters) == (80, 80)
    assert untied.model_parameters - tied.model_parameters == 80


# --- against the modules ----------------------------------------------------------------------------------------------


def parameters_of(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())  # a tied weight is one Parameter


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_ledger_counts_the_eager_model_s_parameters(name):
    config = lookup(name)
    with torch.device("meta"):
        model = eager_module(config, Unit("model", n_layers=config.n_layers), 8)
    assert parameters_of(model) == ledger_of(name).model_parameters
    assert {parameters_of(block) for block in model.blocks} == {ledger_of(name).block_parameters}


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_ledger_counts_every_component_s_parameters(name):
    config, ledger = lookup(name), ledger_of(name)
    with torch.device("meta"):
        counted = {name: parameters_of(component(config, name)) for name in COMPONENTS}
    without = {"attention", "repeat_kv"}
    assert {name for name, count in counted.items() if count == 0} == without
    for component_name in ledger.components:
        module = MODULE_OF_LEDGER.get(component_name, component_name)
        assert ledger.component_parameters(component_name) == counted[module]


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_calculation_multiplies_out_to_its_count(name):
    for row in ledger_of(name).rows:
        product = 1
        for factor in row.calculation.replace(",", "").replace("(", "").replace(")", "").split(" × "):
            product *= int(factor)
        assert product == row.parameters, row


# --- cost of a token, by hand -----------------------------------------------------------------------------------------
# TINY: q 8×8, k and v 8×4, o 8×8 and three MLP matrices of 8×12 have 64 + 32 + 32 + 64 + 288 = 480 values.
# Each of the two norms has 8.


def test_parameters_of_the_tiny_model():
    ledger = Ledger.of(TINY)
    assert ledger.block_parameters == 480 + 16
    assert ledger.model_parameters == 80 + 2 * 496 + 8 + 80


@pytest.mark.parametrize(("past_len", "flops"), [(0, 2_080 + 64), (3, 2_080 + 256)])
def test_flops_of_a_token(past_len, flops):
    """2 · (2 blocks · 480 + head 80) = 2,080, and each key costs 4 · 2 heads · 4 wide · 2 layers = 64."""
    assert Ledger.of(TINY).flops_per_token(past_len) == flops


@pytest.mark.parametrize(
    ("past_len", "dtype", "n_bytes"),
    [
        (0, "fp16", 2 * 1_088 + 32),
        (3, "fp16", 2 * 1_088 + 4 * 32),
        (3, "bf16", 2 * 1_088 + 4 * 32),
        (3, "fp32", 4 * 1_088 + 4 * 64),
    ],
)
def test_bytes_of_a_token(past_len, dtype, n_bytes):
    """The weights are 2 blocks · 496 + final norm 8 + one embedding row 8 + head 80 = 1,088.

    A cache row has 2 · 2 layers · 4 = 16 numbers.
    """
    assert Ledger.of(TINY).bytes_per_token(past_len, dtype) == n_bytes


def test_tying_changes_what_is_stored_but_not_what_a_token_costs():
    tied = Ledger.of(dataclasses.replace(TINY, tie_word_embeddings=True))
    assert tied.flops_per_token(3) == Ledger.of(TINY).flops_per_token(3)
    assert tied.bytes_per_token(3, "fp16") == Ledger.of(TINY).bytes_per_token(3, "fp16")


# --- as JSON ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3-8b", "llama3.2-1b", "smollm2-135m"])
def test_the_json_holds_the_same_numbers(name):
    ledger = ledger_of(name)
    config, layers = ledger.config, ledger.config.n_layers
    data = json.loads(json.dumps(ledger.to_dict(1_000)))

    assert ModelConfig.from_dict(data["config"]) == config
    assert [(step["calculation"], step["result"]) for step in data["mlp_width"]] == list(ledger.width_steps)
    assert list(data["components"]) == list(ledger.components)
    rows = [
        (part, row["name"], row["calculation"], row["parameters"])
        for part in data["components"]
        for row in data["components"][part]["rows"]
    ]
    assert sorted(rows) == sorted(dataclasses.astuple(row) for row in ledger.rows)
    assert {kind: gelu["parameters"] for kind, gelu in data["gelu_mlp"].items()} == ledger.gelu_mlp
    assert data["block_parameters"] == ledger.block_parameters
    assert data["all_blocks_parameters"] == layers * ledger.block_parameters
    assert data["embedding_parameters"] == ledger.embedding_parameters
    assert data["final_norm_parameters"] == config.hidden_size
    assert data["head_parameters"] == ledger.head_parameters
    assert data["model_parameters"] == ledger.model_parameters
    assert data["decode_token"]["past_len"] == 1_000
    assert data["decode_token"]["flops"] == ledger.flops_per_token(1_000)
    for dtype, width in {"fp16": 2, "bf16": 2, "fp32": 4}.items():
        assert data["model_bytes"][dtype] == width * ledger.model_parameters
        assert data["decode_token"]["bytes"][dtype] == ledger.bytes_per_token(1_000, dtype)
        per_token = ledger.cache_bytes_per_token(dtype)
        assert data["kv_cache"][dtype] == {
            "bytes_per_token": per_token,
            "context_length": config.context_length,
            "bytes_per_sequence": per_token * config.context_length,
        }
