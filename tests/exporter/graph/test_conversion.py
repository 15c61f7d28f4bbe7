"""Weights on their way into a narrower dtype: what does not fit is refused, what becomes zero is counted, by name."""

from __future__ import annotations

import pytest
import torch

from exporter.common.errors import CheckpointError
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.unit import Unit
from tests.conftest import MAX_POSITIONS, TINY

NAME = "blocks.0.mlp.up_proj.weight"


class Planted(RandomWeights):
    """Random weights with one value replaced."""

    def __init__(self, value: float):
        super().__init__(TINY, 0)
        self._value = value

    def read(self, name, columns=slice(None)):
        weight = super().read(name)
        if name == NAME:
            weight[3, 5] = self._value
        return weight[..., columns]


def export(tmp_path, value: float, dtype: str):
    request = ExportRequest(TINY, Unit.parse("block", TINY), Planted(value), dtype, MAX_POSITIONS)
    return export_bundle(request, tmp_path / "bundle", validated=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path, value, dtype):
    with pytest.raises(CheckpointError, match=rf"{NAME}: 1 of its values are inf or NaN"):
        export(tmp_path, value, dtype)
    assert list(tmp_path.iterdir()) == []


def test_a_value_beyond_half_precision_is_refused_with_its_size_and_the_fix(tmp_path):
    with pytest.raises(
        CheckpointError,
        match=rf"{NAME}: 1 of its values do not fit fp16, the largest is 7e\+04; export with dtype bf16 or fp32",
    ):
        export(tmp_path, 70_000.0, "fp16")
    export(tmp_path, 70_000.0, "bf16")


def test_values_that_become_zero_are_counted_in_the_report(tmp_path):
    assert export(tmp_path, 1e-9, "fp16").read_report()["flushed_to_zero"] == {NAME: 1}
    assert export(tmp_path, 1e-9, "fp32").read_report()["flushed_to_zero"] == {}
    assert export(tmp_path, 0.0, "fp16").read_report()["flushed_to_zero"] == {}


def test_slices_of_a_large_weight_are_counted_together(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "exporter.graph.weight_writer.SLICE_BYTES", 4 * TINY.intermediate_size * 7
    )  # seven columns at a time
    whole = export(tmp_path, 1e-9, "fp16")
    assert whole.read_report()["flushed_to_zero"] == {NAME: 1}
    monkeypatch.undo()
    data = (whole.folder / "model.onnx.data").read_bytes()
    assert (export(tmp_path, 1e-9, "fp16").folder / "model.onnx.data").read_bytes() == data
    assert torch.finfo(torch.float16).tiny > 1e-9
