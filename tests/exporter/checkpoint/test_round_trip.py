"""The real model in four forms of checkpoint gives the same bytes; so does a head that equals the embedding."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from exporter.bundle.manifest import MANIFEST_FILE, TOKENIZER_FILES
from exporter.checkpoint.formats import open_checkpoint
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.unit import Unit
from tests.conftest import TINY
from tests.support.checkpoint_folders import meta_shards, write_huggingface

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def opened(smollm2_checkpoint):
    return open_checkpoint(smollm2_checkpoint)


def write_sharded(folder, opened):
    return write_huggingface(folder, opened.config, shards=3, source=opened.weights, dtype=torch.float32)


def write_meta(folder, opened, shards):
    folder.mkdir()
    for index, part in enumerate(meta_shards(opened.config, opened.weights, shards)):
        torch.save(part, folder / f"consolidated.{index:02d}.pth")
    params = {"dim": 576, "n_layers": 30, "n_heads": 9, "n_kv_heads": 3, "vocab_size": 49152, "multiple_of": 256}
    (folder / "params.json").write_text(
        json.dumps(params | {"rope_theta": 100_000.0, "norm_eps": opened.config.norm_eps})
    )
    return folder


FORMS = {
    "Hugging Face, sharded": (write_sharded, None),
    "Meta, one file": (lambda folder, opened: write_meta(folder, opened, 1), "smollm2-135m"),
    "Meta, three shards": (lambda folder, opened: write_meta(folder, opened, 3), "smollm2-135m"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_real_model_gives_the_same_manifest_and_checksums_from_every_form(
    smollm2_checkpoint, smollm2_bundle, opened, tmp_path, form
):
    """The manifest has the checksums of graph and weights. Equal ones give equal tokens (test_real_model.py)."""
    write, model = FORMS[form]
    folder = write(tmp_path / "checkpoint", opened)
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (smollm2_checkpoint / name).is_file():
            shutil.copy(smollm2_checkpoint / name, folder / name)
    again = open_checkpoint(folder, model)
    extra = {"end_token_ids": again.end_token_ids, "tokenizer_files": again.tokenizer_files}
    request = ExportRequest(again.config, Unit.parse("model", again.config), again.weights, "fp16", **extra)
    bundle = export_bundle(request, tmp_path / "bundle", validated=False)
    assert (bundle.folder / MANIFEST_FILE).read_bytes() == (smollm2_bundle("fp16").folder / MANIFEST_FILE).read_bytes()
    assert request.weights.counts["used"] == 30 * 9 + 2


def test_a_head_that_is_bit_equal_to_the_embedding_is_stored_once(tmp_path):
    """The config is untied and the head equals the embedding. One differing bit keeps both matrices."""

    class OneMatrix:
        def __init__(self, changed: float) -> None:
            self._weights, self._changed = RandomWeights(TINY, 0), changed

        def read(self, name, columns=slice(None), rows=slice(None)):
            weight = self._weights.read("embedding.weight" if name == "lm_head.weight" else name)
            if name == "lm_head.weight":
                weight[-1, -1] += self._changed
            return weight[columns] if weight.dim() == 1 else weight[rows, columns]

    tied = open_checkpoint(write_huggingface(tmp_path / "equal", TINY, source=OneMatrix(0.0)))
    assert tied.config.tie_word_embeddings and tied.weights.counts["used"] == 3 * 9 + 2
    apart = open_checkpoint(write_huggingface(tmp_path / "apart", TINY, source=OneMatrix(1.0)))
    assert not apart.config.tie_word_embeddings and apart.weights.counts["used"] == 3 * 9 + 3
    sizes = []
    for checkpoint in (tied, apart):
        request = ExportRequest(checkpoint.config, Unit.parse("model", TINY), checkpoint.weights, "fp16", 64)
        bundle = export_bundle(request, tmp_path / f"bundle{len(sizes)}")
        assert bundle.read_report()["validation"]["passed"]
        sizes.append(bundle.manifest.files["model.onnx.data"]["size_bytes"])
    assert sizes[1] - sizes[0] >= 2 * TINY.vocab_size * TINY.hidden_size
