"""Numbers are taken by what they mean: plain values of other libraries' numbers, at every entry of the exporter."""

from __future__ import annotations

import dataclasses
import enum
import json

import numpy as np
import pytest
import torch

from exporter.common.errors import InputError
from exporter.common.plain_numbers import is_whole, plain
from exporter.costs.roofline import Step
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.catalogue import ModelConfig, RopeScaling
from exporter.spec.limits import check_cache_capacity, check_max_positions
from exporter.spec.unit import Unit, part_bounds
from exporter.spec.weight_formats import WeightFormat
from tests.conftest import TINY

Size = enum.IntEnum("Size", {"THREE": 3})
WHOLE = [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), Size.THREE]
NOT_WHOLE = [True, np.True_, np.array(True), torch.tensor(True), 3.0, np.float32(3), "3", b"3", [3], np.array([3])]
NOT_WHOLE += [torch.tensor([3]), torch.tensor(3.0), float("nan"), 3j]


@pytest.mark.parametrize("value", WHOLE, ids=repr)
def test_whole_numbers_of_every_type_become_ints(value):
    assert type(plain(value)) is int and plain(value) == 3 and is_whole(plain(value))


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
def test_nothing_else_becomes_a_whole_number(value):
    assert not is_whole(plain(value))


def test_truth_values_and_floats_become_pythons_own():
    assert plain(np.True_) is True and plain(torch.tensor(False)) is False
    assert type(plain(np.float32(0.5))) is float and plain(np.float32(0.5)) == 0.5
    assert plain("3") == "3" and plain(None) is None


@pytest.mark.parametrize("value", [np.int64(32), np.array(32), torch.tensor(32)], ids=repr)
def test_limits_take_whole_numbers_of_every_type(value):
    for got in (
        check_max_positions(value, TINY),
        check_cache_capacity(value, TINY, "fp16", 64),
        WeightFormat("int8", value).block_size,
        RandomWeights(TINY, value).description["seed"],
        Step(batch=value).batch,
    ):
        assert type(got) is int and got == 32
    assert part_bounds(64, value) == part_bounds(64, 32)


@pytest.mark.parametrize("value", [True, np.True_, 32.0, "32", None, torch.tensor([32])], ids=repr)
def test_limits_refuse_what_is_no_whole_number(value):
    with pytest.raises(InputError):
        part_bounds(64, value)
    with pytest.raises(InputError, match="seed"):
        RandomWeights(TINY, value)
    with pytest.raises(InputError, match="block size"):
        WeightFormat("int8", value).check(TINY)
    if value is not None:
        with pytest.raises(InputError, match="max_positions"):
            check_max_positions(value, TINY)
        with pytest.raises(InputError, match="cache_capacity"):
            check_cache_capacity(value, TINY, "fp16", 64)


def test_a_geometry_of_numpys_numbers_is_that_of_pythons():
    scaling = RopeScaling(np.float64(8), np.float32(1), np.int32(4), np.int64(32))
    config = dataclasses.replace(TINY, rope_scaling=RopeScaling(8.0, 1.0, 4, 32))
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(ModelConfig)}
    odd = {name: np.int64(value) if type(value) is int else value for name, value in values.items()}
    odd |= {"rope_theta": np.float64(TINY.rope_theta), "tie_word_embeddings": np.False_, "rope_scaling": scaling}
    assert ModelConfig(**odd) == config
    assert json.dumps(ModelConfig(**odd).to_dict()) == json.dumps(config.to_dict())
    with pytest.raises(InputError, match="n_heads: got True"):
        dataclasses.replace(TINY, n_heads=np.True_)


def request(**fields) -> ExportRequest:
    return ExportRequest(TINY, Unit.parse("model", TINY), RandomWeights(TINY, 0), **fields)


def test_an_export_takes_numpys_numbers_lists_and_texts_of_paths(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    plain_request = request(max_positions=32, end_token_ids=(2, 100), tokenizer_files=(tmp_path / "tokenizer.json",))
    odd = request(
        max_positions=np.int64(32),
        n_parts=np.int64(1),
        end_token_ids=np.array([2, 100]),
        tokenizer_files=str(tmp_path / "tokenizer.json"),
    )
    for name, one in (("plain", plain_request), ("odd", odd)):
        export_bundle(one, str(tmp_path / name), validated=False)
    manifests = [(tmp_path / name / "manifest.json").read_bytes() for name in ("plain", "odd")]
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("tokens", [(101,), (-1,), (2, 2**40), (2.0,), (True,), "2", ("2",), None, [[2]]], ids=repr)
def test_an_end_token_that_is_not_in_the_vocabulary_is_refused_with_its_size(tokens):
    with pytest.raises(InputError, match=r"end_token_ids: got .*, expected whole numbers from 0 to 100"):
        request(end_token_ids=tokens)
