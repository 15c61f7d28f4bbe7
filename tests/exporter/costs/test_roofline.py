"""The roofline: bytes and operations of a step, calculated by hand for Llama 3 8B, and agreement with the ledger."""

from __future__ import annotations

import json

import pytest

from exporter.commands.main import main
from exporter.common.errors import InputError
from exporter.costs.ledger import Ledger
from exporter.costs.roofline import Step, roofline, step_costs
from exporter.spec.catalogue import CATALOGUE, lookup
from exporter.spec.unit import Unit

LLAMA3_8B = lookup("llama3-8b")
BLOCK = Unit("block")
ROW_BYTES = 2 * 8 * 128 * 2  # key and value of 8 heads of 128 in half precision


def cost(step: Step, name: str, unit: Unit = BLOCK):
    (found,) = [cost for cost in step_costs(LLAMA3_8B, unit, step) if cost.name == name]
    return found


@pytest.mark.parametrize(
    ("name", "weight_bytes", "cache_bytes", "flops"),
    [
        ("attention_norm", 8_192, 0, 0),
        ("attention.q_proj", 33_554_432, 0, 33_554_432),  # 4,096 × 4,096, two bytes and two operations each
        ("attention.k_proj", 8_388_608, 0, 8_388_608),
        ("attention.v_proj", 8_388_608, 0, 8_388_608),
        # 1,000 rows are read and one is written; the token sees 1,001 keys
        ("attention.heads", 0, 1_001 * ROW_BYTES, 4 * 32 * 128 * 1_001),
        ("attention.o_proj", 33_554_432, 0, 33_554_432),
        ("ffn_norm", 8_192, 0, 0),
        ("mlp.gate_proj", 117_440_512, 0, 117_440_512),
        ("mlp.up_proj", 117_440_512, 0, 117_440_512),
        ("mlp.down_proj", 117_440_512, 0, 117_440_512),
    ],
)
def test_every_component_of_an_8b_block_that_decodes_one_token(name, weight_bytes, cache_bytes, flops):
    found = cost(Step(past_len=1_000), name)
    assert (found.weight_bytes, found.cache_bytes, found.flops) == (weight_bytes, cache_bytes, flops)


def test_a_block_moves_its_weights_once_and_takes_their_time():
    table = roofline(LLAMA3_8B, BLOCK, Step(past_len=1_000), bandwidth=2e12, flop_rate=500e12)
    assert (table["weight_bytes"], table["cache_bytes"], table["flops"]) == (436_224_000, 4_100_096, 452_608_000)
    assert table["limit_ms"] == pytest.approx((436_224_000 + 4_100_096) / 2e12 * 1e3)
    assert {row["bound"] for row in table["components"]} == {"bandwidth"}


def test_a_prefill_shares_weights_among_its_tokens_and_is_bound_by_arithmetic():
    step = Step(batch=4, seq_len=512)
    assert cost(step, "attention.q_proj").weight_bytes == 33_554_432
    assert cost(step, "attention.q_proj").flops == 2 * 16_777_216 * 2_048
    keys_seen = 512 * 513 // 2  # 1 + 2 + … + 512
    assert cost(step, "attention.heads").flops == 4 * (4 * 32 * 128) * keys_seen
    assert cost(step, "attention.heads").cache_bytes == 4 * 512 * ROW_BYTES
    rows = {row["name"]: row for row in roofline(LLAMA3_8B, BLOCK, step, 2e12, 500e12)["components"]}
    assert rows["attention.q_proj"]["bound"] == "arithmetic" and rows["attention_norm"]["bound"] == "bandwidth"
    assert rows["attention.q_proj"]["arithmetic_ms"] == pytest.approx(2 * 16_777_216 * 2_048 / 500e12 * 1e3)


def test_a_prefill_after_a_past_sees_all_of_it():
    assert cost(Step(batch=2, seq_len=3, past_len=10), "attention.heads").flops == 2 * (4 * 32 * 128) * (11 + 12 + 13)


def test_a_models_head_runs_on_the_last_token_of_each_sequence_unless_all_logits_are_asked_for():
    last, every = (Unit("model", n_layers=32, logits=logits) for logits in ("last", "all"))
    step = Step(batch=2, seq_len=7)
    assert cost(step, "lm_head", last).flops == 2 * 2 * 128_256 * 4_096
    assert cost(step, "lm_head", every).flops == 7 * cost(step, "lm_head", last).flops
    assert cost(step, "embedding", last).weight_bytes == 14 * 4_096 * 2


def test_quantized_matrices_are_smaller_and_norms_and_the_cache_are_not():
    whole, quantized = Step(past_len=1_000), Step(past_len=1_000, weight_bits=4.5)
    assert cost(quantized, "mlp.up_proj").weight_bytes == 58_720_256 * 4.5 / 8
    assert cost(quantized, "mlp.up_proj").flops == cost(whole, "mlp.up_proj").flops
    for name in ("attention_norm", "attention.heads"):
        assert cost(quantized, name) == cost(whole, name)


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_one_decoded_token_costs_what_the_ledger_says(name, dtype):
    config = lookup(name)
    table = roofline(config, Unit("model", n_layers=config.n_layers), Step(past_len=77, dtype=dtype), 1e12, 1e12)
    assert table["weight_bytes"] + table["cache_bytes"] == Ledger.of(config).bytes_per_token(77, dtype)
    assert table["flops"] == Ledger.of(config).flops_per_token(77)


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"seq_len": 0}, {"past_len": -1}, {"batch": True}, {"weight_bits": 0.0}, {"dtype": "fp8"}]
)
def test_sizes_that_mean_nothing_are_refused_by_name(sizes):
    with pytest.raises(InputError, match=next(iter(sizes))):
        Step(**sizes)


@pytest.mark.parametrize("rates", [(0.0, 1e12), (1e12, float("inf")), (float("nan"), 1e12)])
def test_rates_that_mean_nothing_are_refused(rates):
    with pytest.raises(InputError, match="expected a finite number above 0"):
        roofline(LLAMA3_8B, BLOCK, Step(), *rates)


def test_a_component_has_no_step():
    with pytest.raises(InputError, match="component has no step of its own"):
        step_costs(LLAMA3_8B, Unit("component", "swiglu_mlp"), Step())


# --- the command ------------------------------------------------------------------------------------------------------

MACHINE = ["--roofline", "--bandwidth", "2000", "--flops", "500"]


def test_the_command_prints_the_same_table_for_a_machine_that_is_described(capsys):
    command = ["params", "--model", "llama3-8b", *MACHINE, "--unit", "block", "--past-len", "1000"]
    assert main(command) == 0
    shown = capsys.readouterr().err
    assert "llama3-8b, block" in shown and "attention.q_proj" in shown and "tokens/s" in shown
    assert main([*command, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    expected = roofline(LLAMA3_8B, BLOCK, Step(past_len=1_000), 2e12, 500e12)
    assert data == json.loads(json.dumps({"model": "llama3-8b", "unit": str(BLOCK), **expected}))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--roofline", "--bandwidth", "100"], "expected --bandwidth GB/S and --flops TFLOP/S"),
        (["--batch", "4"], "--batch, expected it with --roofline only"),
        ([*MACHINE, "--batch", "0"], "batch: got 0"),
        ([*MACHINE, "--unit", "component:attention"], "component has no step"),
        ([*MACHINE, "--past-len", "-1"], "past-len: got -1"),
    ],
)
def test_the_command_refuses_what_means_nothing(capsys, arguments, said):
    assert main(["params", "--model", "llama3-8b", *arguments]) == 2
    assert said in capsys.readouterr().err
