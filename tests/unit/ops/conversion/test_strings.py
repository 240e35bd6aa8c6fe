"""The strings of a safetensors header: carried, or named as left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ckptctl

STATE = {"a.weight": torch.arange(64.0).reshape(8, 8), "b.weight": torch.ones(4, 4)}
KOHYA = {"ss_tag_frequency": '{"dog": 3}', "modelspec.title": "mine", "sshs_model_hash": "0f"}
TORCHAO = {"tensor_names": json.dumps(list(STATE)), "a.weight": '{"_type": "Float8Tensor"}'}
HASH = {"sshs_model_hash"}
BOUND = HASH | TORCHAO.keys()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    save_file(STATE, path, metadata=KOHYA | TORCHAO)
    return path


def read(path: Path) -> dict[str, str]:
    """Return what safetensors itself finds, the same in each file of *path*."""
    found: list[dict[str, str]] = []
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found.append(opened.metadata())
    assert all(one == found[0] for one in found)
    assert found[0].pop("format") == "pt"
    return found[0]


@pytest.mark.parametrize("shard", [128, 10**9])
def test_strings_are_carried(source: Path, tmp_path: Path, shard: int) -> None:
    """All of them; but a hash of one file's tensors is none of several files."""
    lost = HASH if shard == 128 else set()
    kept = {key: text for key, text in (KOHYA | TORCHAO).items() if key not in lost}
    done = ckptctl.convert(source, tmp_path / "out", to="hf", max_shard_size=shard)
    assert read(tmp_path / "out") == kept
    assert done.plan.left_out.keys() == {f"__metadata__.{key}" for key in lost}
    again = ckptctl.convert(tmp_path / "out", tmp_path / "again", to="hf")
    assert read(tmp_path / "again") == kept
    assert not again.plan.left_out


def test_a_hash_goes_where_shards_become_one_file(tmp_path: Path) -> None:
    for number, (name, tensor) in enumerate(STATE.items(), 1):
        file = tmp_path / f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensor}, file, metadata={"modelspec.hash_sha256": "0f", "a": "b"})
    done = ckptctl.convert(tmp_path, tmp_path.parent / "one", to="hf")
    assert read(tmp_path.parent / "one") == {"a": "b"}
    assert list(done.plan.left_out) == ["__metadata__.modelspec.hash_sha256"]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_extracted_tensors_have_the_strings_that_hold_for_them(
    source: Path, tmp_path: Path, suffix: str
) -> None:
    target = tmp_path / f"out{suffix}"
    done = ckptctl.extract(source, "a.weight", output=target)
    kept = KOHYA.keys() - HASH if suffix == ".safetensors" else set()
    if kept:
        with safe_open(target, "pt") as opened:
            assert opened.metadata() == {"format": "pt", **{key: KOHYA[key] for key in kept}}
    (note,) = done.notes
    assert all(f"`__metadata__.{key}`" in note for key in (KOHYA | TORCHAO).keys() - kept)
    assert not any(f"`__metadata__.{key}`" in note for key in kept)


@pytest.mark.parametrize("option", [{"dtype": "fp16"}, {"exclude": "b*"}])
def test_what_no_longer_holds_is_named(source: Path, tmp_path: Path, option) -> None:
    done = ckptctl.convert(source, tmp_path / "out", to="hf", **option)
    assert read(tmp_path / "out").keys() == KOHYA.keys() - BOUND
    assert {name for name in done.plan.left_out if name.startswith("__")} == {
        f"__metadata__.{key}" for key in BOUND
    }


def test_formats_without_a_place_name_them(source: Path, tmp_path: Path) -> None:
    done = ckptctl.convert(source, tmp_path / "out", to="dcp")
    assert set(done.plan.left_out) == {f"__metadata__.{key}" for key in KOHYA | TORCHAO}


def test_shards_that_contradict_each_other(tmp_path: Path) -> None:
    files = {}
    for number, (name, tensor) in enumerate(STATE.items(), 1):
        files[name] = f"model-{number:05d}-of-00002.safetensors"
        said = {"modelspec.title": f"{number}", "modelspec.author": "same"}
        save_file({name: tensor}, tmp_path / files[name], metadata=said)
    for index in (False, True):
        if index:
            content = json.dumps({"metadata": {"total_size": 320}, "weight_map": files})
            (tmp_path / "model.safetensors.index.json").write_text(content)
        done = ckptctl.convert(tmp_path, tmp_path.parent / f"out-{index}", to="hf")
        assert read(tmp_path.parent / f"out-{index}") == {"modelspec.author": "same"}
        assert any("`modelspec.title`" in note for note in done.plan.notes)
