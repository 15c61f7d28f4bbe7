"""A bundle of a tiny model whose tokens are bytes, with a tokenizer, a chat template, and weights of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from exporter.checkpoint.huggingface import open_huggingface
from exporter.export import ExportRequest, export_bundle
from exporter.spec.unit import Unit
from tests.conftest import TINY
from tests.support.checkpoint_folders import write_huggingface

BEGIN, END = "<s>", "</s>"
TEMPLATE = """{{ bos_token }}{% for m in messages %}
{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}
{{ m.role[0] }}:{{ m.content }}
{% endfor %}{% if add_generation_prompt %}a:{% endif %}"""


def byte_tokenizer(adds_begin: bool = True) -> Tokenizer:
    """Every byte is a token; <s> and </s> are special."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate([BEGIN, END, *letters])}, []))
    tokenizer.add_special_tokens([BEGIN, END])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if adds_begin:
        tokenizer.post_processor = processors.TemplateProcessing(f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    return tokenizer


def write_text_bundle(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Exports the model and returns the bundle's folder."""
    config = replace(TINY, vocab_size=258)
    checkpoint = write_huggingface(folder / "checkpoint", config, bos_token_id=0, eos_token_id=1)
    byte_tokenizer().save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"bos_token": BEGIN, "eos_token": END}))
    if template is not None:
        (checkpoint / "chat_template.jinja").write_text(template)
    opened = open_huggingface(checkpoint)
    model = {"end_token_ids": opened.end_token_ids, "tokenizer_files": opened.tokenizer_files}
    request = ExportRequest(opened.config, Unit.parse("model", config), opened.weights, "fp32", **model)
    export_bundle(request, folder / "bundle", validated=False)
    return folder / "bundle"
