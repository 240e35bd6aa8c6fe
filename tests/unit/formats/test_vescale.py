"""veScale: what its own storage wrote, with torch's planner in place of veScale's (see README)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError, DamagedError
from ckptctl.formats.base import ReadOptions
from tests.checkpoints.readers import differences
from tests.unit.formats.damage import converted, damaged

State = dict[str, torch.Tensor]


@pytest.fixture
def source(data: Path) -> Path:
    return data / "vescale" / "w2" / "ckpt"


@pytest.fixture
def model(data: Path) -> State:
    return load_file(data / "vescale" / "w2" / "expected.safetensors")


@pytest.fixture
def moments(data: Path) -> State:
    return load_file(data / "vescale" / "w2" / "moments.safetensors")


@pytest.mark.parametrize("to", ["hf", "torch"])
def test_vescale_model_matches_reference(
    source: Path, tmp_path: Path, model: State, to: str
) -> None:
    assert list(formats.sniff_formats(source)) == ["vescale"]
    assert not differences(converted(source, tmp_path, to), model)
    assert ckptctl.verify(source, level="full").verdict == "complete"


def test_optimizers_of_all_pipeline_stages_are_converted(
    source: Path, tmp_path: Path, model: State, moments: State
) -> None:
    found = converted(source, tmp_path, only="all")
    expected = {f"model.{name}": value for name, value in model.items()} | moments
    assert not differences({name: found.get(name) for name in expected}, expected)
    assert [found[f"optimizer.pp_{n}.param_group_meta.0.lr"] for n in (0, 1)] == [0.1, 0.2]


def test_each_subfolder_opens_as_checkpoint(source: Path, tmp_path: Path, model: State) -> None:
    assert list(formats.sniff_formats(source / "model")) == ["dcp"]
    assert not differences(converted(source / "model", tmp_path), model)
    assert ckptctl.inspect(source / "optimizer" / "pp_1").verdict == "complete"
    copy = tmp_path / "alone"
    shutil.copytree(source / "model", copy / "model")
    assert not differences(converted(copy, tmp_path), model)


SLOW = pytest.param("optimizer/pp_1", marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["model", "optimizer/pp_0", SLOW])
def test_damaged_parts_never_convert_silently_wrong(
    source: Path, tmp_path: Path, model: State, moments: State, folder: str
) -> None:
    expected = {f"model.{name}": value for name, value in model.items()} | moments
    for number, (what, part) in enumerate(damaged(source / folder, tmp_path)):
        whole = tmp_path / f"whole{number}"
        shutil.copytree(source, whole)
        shutil.rmtree(whole / folder)
        shutil.copytree(part, whole / folder)
        try:
            found = converted(whole, tmp_path, only="all")
        except CkptError as error:
            assert error.exit_code in (3, 4, 5, 9), (what, error.to_json())
        else:
            wrong = differences({key: found.get(key) for key in expected}, expected)
            assert not wrong, (what, wrong[:3])
        shutil.rmtree(whole)


def test_missing_optimizer_stage_is_damaged_but_partially_readable(
    source: Path, tmp_path: Path, model: State
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    shutil.rmtree(copy / "optimizer" / "pp_0")
    with pytest.raises(DamagedError) as caught:
        formats.open_checkpoint(copy)
    assert "optimizer/pp_0" in str(caught.value.why)
    found = formats.open_checkpoint(copy, options=ReadOptions(partial=True))
    assert [one.file for one in found.findings] == ["optimizer/pp_0"]
    assert {f"model.{name}" for name in model} <= found.tensors.keys()


def test_missing_data_file_loses_only_its_tensors(
    source: Path, tmp_path: Path, model: State
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    (copy / "model" / "__1_0.distcp").unlink()
    found = formats.open_checkpoint(copy, options=ReadOptions(partial=True))
    assert {file for boxes in found.lost.values() for _, file in boxes} == {"model/__1_0.distcp"}
    assert {one.file for one in found.findings} == {"model/__1_0.distcp"}
    assert ckptctl.verify(copy).verdict != "complete"
    kept = converted(copy, tmp_path, allow_missing=True)
    assert not differences(kept, {name: model[name] for name in kept})
