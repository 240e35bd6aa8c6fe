"""Hugging Face directories whose index, headers and configuration disagree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from tests.checkpoints import (
    differences,
    load_any_reference,
    save_hf,
)
from tests.contract.damaged import (
    CONFIG,
    NORM,
    STATE,
    convert,
    is_complete,
)
from tests.contract.support import (
    message,
    refused,
)


def _shard(source: Path, key: str) -> Path:
    index = json.loads((source / "model.safetensors.index.json").read_text())
    return source / str(index["weight_map"][key])


def _index(source: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def _drop_norm(source: Path) -> None:
    path = _shard(source, NORM)
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if k != NORM}, path, {"format": "pt"})


def _norm_twice(source: Path) -> None:
    first = _shard(source, NORM)
    other = next(path for path in sorted(source.glob("*.safetensors")) if path != first)
    save_file(load_file(other) | {NORM: STATE[NORM]}, other, {"format": "pt"})


def _misplaced(source: Path) -> None:
    def move(index: dict[str, Any]) -> None:
        files = sorted(set(index["weight_map"].values()) - {index["weight_map"][NORM]})
        index["weight_map"][NORM] = files[0]

    _index(source, move)


def _ghost(source: Path) -> None:
    _index(source, lambda i: i["weight_map"].update(ghost=i["weight_map"][NORM]))


def _wrong_shape(source: Path) -> None:
    path = _shard(source, NORM)
    save_file(load_file(path) | {NORM: torch.ones(33)}, path, {"format": "pt"})


def _shared_name(source: Path) -> None:
    for path in source.glob("*.index.json"):
        path.unlink()
    first = sorted(source.glob("*.safetensors"))
    tensors = load_file(first[0])
    tensors.update({next(iter(load_file(first[1]))): torch.ones(2)})
    save_file(tensors, first[0], {"format": "pt"})


HF = {
    "header-lacks": (_drop_norm, 4, NORM),
    "in-two-shards": (_norm_twice, 9, NORM),
    "in-two-shards-no-index": (_shared_name, 9, "two shards"),
    "in-another-shard": (_misplaced, 4, NORM),
    "index-invents": (_ghost, 4, "ghost"),
    "shape-contradicts-config": (_wrong_shape, 5, NORM),
}


@pytest.mark.parametrize("case", HF)
def test_index_contradicting_headers_is_refused(
    tmp_path: Path, copy: Callable[[str], Path], case: str
) -> None:
    source = copy("hf")
    damage, code, word = HF[case]
    damage(source)
    with refused(source, tmp_path / "outputs" / "out", code) as caught:
        convert(source, tmp_path, "meta")
    assert word in message(caught.value)


ESCAPES = {
    "parent": "../secret.safetensors",
    "absolute": "/{}/secret.safetensors",
    "deep": "a/../../secret.safetensors",
    "link": "link.safetensors",
    "folder-link": "folder/secret.safetensors",
}


@pytest.mark.parametrize("case", ESCAPES)
def test_weight_map_path_outside_checkpoint_is_refused(
    tmp_path: Path, copy: Callable[[str], Path], case: str
) -> None:
    source = copy("hf")
    outside = tmp_path / "in"
    shutil.copy(_shard(source, NORM), outside / "secret.safetensors")
    old = _shard(source, NORM).name
    if case == "link":
        (source / "link.safetensors").symlink_to(outside / "secret.safetensors")
    if case == "folder-link":
        (source / "folder").symlink_to(outside)
    name = ESCAPES[case].format(str(outside).strip("/"))

    def change(index: dict[str, Any]) -> None:
        found = index["weight_map"]
        found.update({key: name for key, file in found.items() if file == old})

    _index(source, change)
    (source / old).unlink()
    with refused(source, tmp_path / "outputs" / "out", 9) as caught:
        convert(source, tmp_path)
    assert "secret" in message(caught.value) or name in message(caught.value)
    assert not is_complete(source)


def test_hub_cache_snapshot_of_symlinks_is_converted(
    tmp_path: Path, originals: dict[str, Path]
) -> None:
    """Snapshots of the Hub's cache link to ``../../blobs``."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (tmp_path / "outputs").mkdir()
    for number, item in enumerate(originals["hf"].iterdir()):
        shutil.copy(item, blobs / f"{number:064x}")
        (snapshot / item.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    target = convert(snapshot, tmp_path)
    assert not differences(load_any_reference(target), STATE)


def test_misspelled_tensor_error_names_both_spellings(tmp_path: Path) -> None:
    state = dict(STATE)
    state["model.layers.0.self_attn.q_prox.weight"] = state.pop(
        "model.layers.0.self_attn.q_proj.weight"
    )
    source = save_hf(tmp_path / "source", state, CONFIG)
    with refused(source, tmp_path / "out", 4) as caught:
        ckptctl.convert(source, tmp_path / "out", to="meta")
    said = message(caught.value)
    assert "q_prox" in said
    assert "model.layers.0.self_attn.q_proj.weight" in said


@pytest.mark.parametrize("key", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_missing_tensor_is_refused_by_name(tmp_path: Path, key: str) -> None:
    state = {name: value for name, value in STATE.items() if name != key}
    source = save_hf(tmp_path / "source", state, CONFIG)
    with refused(source, tmp_path / "out", 4) as caught:
        ckptctl.convert(source, tmp_path / "out", to="meta")
    assert key in message(caught.value)


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "heads": {"num_attention_heads": 3},
    "kv-heads": {"num_key_value_heads": 1},
    "hidden": {"hidden_size": 64},
    "layers": {"num_hidden_layers": 2},
    "vocab": {"vocab_size": 65},
    "ffn": {"intermediate_size": 97},
    "head-dim": {"head_dim": 8},
    "text": {"num_attention_heads": "two"},
    "negative": {"num_attention_heads": -2},
    "zero": {"num_attention_heads": 0, "head_dim": None},
    "huge": {"num_hidden_layers": 10**9},
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_config_contradicting_shapes_is_refused(tmp_path: Path, case: str) -> None:
    source = save_hf(tmp_path / "source", STATE, CONFIG | CONTRADICTIONS[case])
    lacks = "num_hidden_layers" in CONTRADICTIONS[case]
    with refused(source, tmp_path / "out", 4 if lacks else 5) as caught:
        ckptctl.convert(source, tmp_path / "out", to="meta")
    assert message(caught.value)


def test_missing_config_is_refused_when_head_count_is_needed(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "source", STATE)
    with refused(source, tmp_path / "out", 5) as caught:
        ckptctl.convert(source, tmp_path / "out", to="meta", model_type="llama3")
    assert "config.json" in message(caught.value)
    assert "assets=" in message(caught.value)
