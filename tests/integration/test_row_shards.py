"""Tables of n-gram embeddings: their rows are in several tensors on the Hub, in one in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import CkptError
from ckptctl.planner.families.templates import Template, group_keys_by_kind
from tests.checkpoints.golden import Golden

TABLE = "model.layers.{}.ple.ple_embedding.ngram_embedding.{}weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Golden.read("qwen4_exp_text").save(tmp_path / "hf")


def test_index_after_shard_is_read_and_written() -> None:
    template = Template.parse("table.shard_{n}.weight")
    assert template.format_key({"n": 12}) == "table.shard_12.weight"
    [kind] = group_keys_by_kind(["table.shard_0.weight", "table.shard_12.weight"])
    assert (kind.skeleton, kind.columns) == (template.skeleton, ((0, 12),))
    [one, other] = group_keys_by_kind(["table.shard_0.weight", "table.shard_01.weight"])
    assert one.skeleton != other.skeleton


def test_tables_of_different_sizes_are_joined_and_split(folder: Path, tmp_path: Path) -> None:
    ckptctl.convert(folder, tmp_path / "memory.pt", to="torch", to_layout="hf-v5")
    found = torch.load(tmp_path / "memory.pt", weights_only=True)
    expected = load_file(folder / "model.safetensors")
    for layer in (0, 2):
        shards = [expected[TABLE.format(layer, f"shard_{n}.")] for n in range(4)]
        whole = found[TABLE.format(layer, "")]
        assert torch.equal(whole.view(torch.uint8), torch.cat(shards).view(torch.uint8))
    assert found[TABLE.format(0, "")].shape != found[TABLE.format(2, "")].shape


@pytest.mark.parametrize("number", [0, 3])
def test_missing_shard_is_found(folder: Path, number: int) -> None:
    file = folder / "model.safetensors"
    state = load_file(file)
    del state[TABLE.format(2, f"shard_{number}.")]
    save_file(state, file, {"format": "pt"})
    assert ckptctl.verify(folder, level="fast").verdict == "damaged"


def test_missing_layer_of_embeddings_is_found(folder: Path) -> None:
    file = folder / "model.safetensors"
    state = load_file(file)
    save_file({k: v for k, v in state.items() if ".2.ple." not in k}, file, {"format": "pt"})
    assert ckptctl.verify(folder, level="fast").verdict == "damaged"


def test_rows_that_shards_cannot_divide_are_an_error(folder: Path, tmp_path: Path) -> None:
    ckptctl.convert(folder, tmp_path / "memory.pt", to="torch", to_layout="hf-v5")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"split_ngram_parts": 7}))
    with pytest.raises(CkptError, match="ple_table"):
        ckptctl.convert(tmp_path / "memory.pt", tmp_path / "out", to="hf", assets=folder)


def test_shards_of_different_sizes_are_an_error(folder: Path, tmp_path: Path) -> None:
    file = folder / "model.safetensors"
    state = load_file(file)
    first, last = (TABLE.format(0, f"shard_{n}.") for n in (0, 3))
    state[first] = torch.cat([state[first], state[last][:1]])
    state[last] = state[last][1:].clone()
    save_file(state, file, {"format": "pt"})
    with pytest.raises(CkptError, match="different shapes"):
        ckptctl.convert(folder, tmp_path / "memory.pt", to="torch", to_layout="hf-v5")
