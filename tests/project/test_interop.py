"""Bundles with a growing cache: correct, refused where a cache must be in place, and run by two other runtimes.

The tests with optimum and onnxruntime-genai need the environments that `make interop-peers` makes.
"""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from benchmarks.peers import environments
from benchmarks.peers.environments import PACKAGES, generate, is_ready
from engines.building.build import BuildRequest, build_bundle
from engines.comparison.compare import CompareRequest, compare_bundle
from engines.library.backend import choose_backend
from exporter.bundle.bundle import Bundle
from exporter.checkpoint.formats import open_checkpoint
from exporter.commands.main import main
from exporter.common.errors import InputError
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.unit import Unit
from exporter.steppers.growing_stepper import GrowingStepper
from exporter.validation.bundle_validation import validate_bundle
from runtime import DecodeSession
from tests.conftest import MAX_POSITIONS, TINY

pytestmark = pytest.mark.slow

PROMPTS = [[504, 3575, 282, 4649, 314], [504, 3575], [9690, 2591, 253, 655, 28, 281], [57, 2078, 30]]
N_TOKENS = 12


def needs_peer(name: str) -> pytest.MarkDecorator:
    """Skips a test where a peer's environment is not made; `make test` makes no environment of another project."""
    reason = f"build/peers/{name} is not made or out of date; make it with `make interop-peers`"
    return pytest.mark.skipif(not is_ready(name), reason=reason)


@pytest.fixture(scope="module")
def growing(tmp_path_factory):
    """The tiny model with a growing cache, by dtype."""
    made: dict[str, Bundle] = {}

    def export(dtype: str = "fp32") -> Bundle:
        if dtype not in made:
            request = ExportRequest(
                TINY, Unit.parse("model", TINY, cache="growing"), RandomWeights(TINY, 0), dtype, MAX_POSITIONS
            )
            made[dtype] = export_bundle(request, tmp_path_factory.mktemp("growing") / dtype)
        return made[dtype]

    return export


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_it_agrees_with_eager_where_rows_have_equal_lengths(growing, dtype):
    report = growing(dtype).read_report()["validation"]
    scenarios = {comparison["scenario"] for comparison in report["meaning"]["comparisons"]}
    assert (
        report["passed"] and {"prefill", "decode", "chunked prefill", "left-padded mask", "near capacity"} <= scenarios
    )
    assert "ragged batch" not in scenarios
    assert validate_bundle(growing(dtype), RandomWeights(TINY, 0), seed=1)[0]["passed"]


def test_its_inputs_and_outputs_have_the_names_that_other_runtimes_expect(growing):
    graph = onnx.load(growing().graph_path, load_external_data=False).graph
    axes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert axes["input_ids"] == axes["position_ids"] == ["batch_size", "sequence_length"]
    assert axes["attention_mask"] == ["batch_size", "total_sequence_length"]
    assert axes["past_key_values.2.value"] == ["batch_size", 2, "past_sequence_length", 16]
    assert axes["present.2.value"] == ["batch_size", 2, "total_sequence_length", 16]
    assert axes["logits"] == ["batch_size", "sequence_length", 101]
    assert not {"write_indices", "cache_capacity"} & {*axes, *(axis for shape in axes.values() for axis in shape)}
    assert not any(node.op_type == "TensorScatter" or node.domain for node in graph.node)


def test_its_genai_config_states_the_models_sizes_and_no_shared_buffer(growing):
    bundle = growing()
    settings = json.loads((bundle.folder / "genai_config.json").read_text())
    decoder = settings["model"]["decoder"]
    assert (
        decoder["num_attention_heads"],
        decoder["num_key_value_heads"],
        decoder["head_size"],
        decoder["num_hidden_layers"],
    ) == (4, 2, 16, 3)
    assert (
        settings["model"]["context_length"] == MAX_POSITIONS
        and settings["search"]["past_present_share_buffer"] is False
    )
    assert "genai_config.json" in bundle.manifest.files and Bundle.open(bundle.folder, verify="full")


def test_padding_on_the_left_changes_no_logits(growing):
    """Each row has its own mask, so a prompt in a left-padded batch has the logits of that prompt alone."""
    stepper = GrowingStepper(str(growing().graph_path), Bundle.open(growing().folder).manifest.contract)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 101, n) for n in (5, 2)]

    def run(ids, mask):
        positions = np.maximum(mask.cumsum(1) - 1, 0)
        names = [f"past_key_values.{layer}.{kind}" for layer in range(3) for kind in ("key", "value")]
        empty = {name: np.zeros((len(ids), 2, 0, 16), np.float32) for name in names}
        return stepper._session.run(
            ["logits"], {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **empty}
        )[0]

    batch = run(np.array([[*prompts[0]], [0, 0, 0, *prompts[1]]]), np.array([[1] * 5, [0] * 3 + [1] * 2]))
    for row, prompt in enumerate(prompts):
        alone = run(prompt[None], np.ones((1, len(prompt)), np.int64))
        np.testing.assert_allclose(batch[row, -len(prompt) :], alone[0], atol=2e-5)


def test_sessions_builds_and_comparisons_refuse_a_growing_cache_by_name(growing, tmp_path, capsys):
    bundle = growing()
    for call in (
        lambda: DecodeSession.open(bundle.folder),
        lambda: build_bundle(bundle, choose_backend("tensorrt-rtx"), BuildRequest()),
        lambda: compare_bundle(bundle, CompareRequest()),
    ):
        with pytest.raises(InputError, match=r'its cache grows.*again with cache="in_place"'):
            call()
    for arguments in (["--unit", "block"], ["--unit", "model", "--logits", "last"]):
        assert (
            main(["export", "--model", "smollm2-135m", "--cache", "growing", *arguments, "-o", str(tmp_path / "x")])
            == 2
        )
        assert "expected a model with all logits" in capsys.readouterr().err
    assert main(["export", "--model", "smollm2-135m", "--cache", "wide", "-o", str(tmp_path / "x")]) == 2
    assert "in_place, growing" in capsys.readouterr().err and not (tmp_path / "x").exists()


@pytest.fixture(scope="module")
def real(smollm2_checkpoint, smollm2_bundle, tmp_path_factory):
    """SmolLM2 with a growing cache, and the tokens that our runtime generates from the bundle with a cache in place."""
    opened = open_checkpoint(smollm2_checkpoint)
    request = ExportRequest(
        opened.config, Unit.parse("model", opened.config, cache="growing"), opened.weights, "fp32",
        end_token_ids=opened.end_token_ids, tokenizer_files=opened.tokenizer_files,
    )  # fmt: skip
    bundle = export_bundle(request, tmp_path_factory.mktemp("real") / "growing", validated=False)
    tokens = []
    with DecodeSession.open(smollm2_bundle("fp32").folder, max_batch=1, cache_capacity=64) as session:
        for prompt in PROMPTS:
            session.reset()
            logits, row = session.prefill(np.array([prompt])), []
            while len(row) < N_TOKENS:
                row.append(int(logits[0].argmax()))
                logits = session.decode(np.array([row[-1]]))
            tokens.append(row)
    return bundle, tokens


@needs_peer("genai")
def test_onnxruntime_genai_generates_our_tokens_from_our_file(real):
    bundle, tokens = real
    (end,) = bundle.manifest.end_token_ids  # genai stops at it
    ended = [row[: row.index(end) + 1] if end in row else row for row in tokens]
    assert generate("genai", [str(bundle.folder)], PROMPTS, N_TOKENS) == ended


@needs_peer("optimum")
def test_optimum_generates_our_tokens_from_our_file_in_a_left_padded_batch(real, smollm2_checkpoint):
    bundle, tokens = real
    assert generate("optimum", [str(bundle.folder), str(smollm2_checkpoint)], PROMPTS, N_TOKENS) == tokens


@pytest.mark.parametrize("name", PACKAGES)
def test_an_environment_is_ready_only_with_the_packages_of_today(name, tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "ENVIRONMENTS", tmp_path)
    assert not is_ready(name)
    (tmp_path / name).mkdir()
    (tmp_path / name / ".ready").write_text(json.dumps(["an-older-package==1.0"]))
    assert not is_ready(name)
    (tmp_path / name / ".ready").write_text(json.dumps(PACKAGES[name]))
    assert is_ready(name)


def test_a_misspelt_environment_is_refused_and_nothing_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(environments, "ENVIRONMENTS", tmp_path)
    with pytest.raises(SystemExit):
        environments.main(["optimun"])
    assert "got optimun, expected some of genai, " in capsys.readouterr().err and not list(tmp_path.iterdir())
