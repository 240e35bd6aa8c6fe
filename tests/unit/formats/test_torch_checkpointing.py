"""``torch_checkpointing`` directories, with ``metadata.pkl`` and without."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError, DamagedError, FormatError, UnsafePickleError, UnsupportedError
from tests.checkpoints.readers import differences
from tests.unit.formats.damage import converted, damaged, refused_or_right

NAMES = ("single", "two_rank")


def sample(data: Path, name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = data / "torch_checkpointing" / name
    return folder / "ckpt", load_file(folder / "expected.safetensors")


def copied(data: Path, name: str, tmp_path: Path) -> Path:
    source, _ = sample(data, name)
    shutil.copytree(source, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_samples_match_reference_with_and_without_metadata(
    data: Path, tmp_path: Path, name: str, described: bool
) -> None:
    source, expected = copied(data, name, tmp_path), sample(data, name)[1]
    if not described:
        (source / "metadata.pkl").unlink()
    assert list(formats.sniff_formats(source)) == ["torch-checkpointing"]
    found = converted(source, tmp_path, only="all")
    assert not differences({key: found.get(key) for key in expected}, expected)
    leaves = json.loads((data / "torch_checkpointing" / name / "expected_leaves.json").read_text())
    assert all(_leaf(found, key) == value for key, value in leaves.items())
    assert not any(isinstance(v, torch.Tensor) for k, v in found.items() if k not in expected)


def _leaf(found: dict[str, Any], key: str) -> Any:
    """Return a leaf by a name that may run into lists, which stay whole here."""
    if key in found:
        value = found[key]
        return {"bytes_hex": value.hex()} if isinstance(value, bytes) else value
    head, _, last = key.rpartition(".")
    value = found.get(head, {})
    return value[int(last)] if last.isdigit() and value else value


@pytest.mark.parametrize("name", NAMES)
def test_model_converts_to_safetensors_exactly(data: Path, tmp_path: Path, name: str) -> None:
    source, expected = sample(data, name)
    model = {
        key.removeprefix("model."): value
        for key, value in expected.items()
        if key.startswith("model.")
    }
    assert not differences(converted(source, tmp_path, "hf"), model)


@pytest.mark.slow
def test_damaged_files_never_convert_silently_wrong(data: Path, tmp_path: Path) -> None:
    source, expected = sample(data, "two_rank")
    for what, copy in damaged(source, tmp_path):
        error = refused_or_right(copy, tmp_path, expected, what)
        if what.endswith("missing") and what.split("_")[0] in ("model", "optimizer"):
            assert isinstance(error, DamagedError), what
            assert what.split()[0] in str(error.why), (what, error.to_json())


@pytest.mark.parametrize("file", ["model_1.pt", "model_0.pt", "train_state_1.pt", "step_0.pt"])
def test_missing_file_is_named_without_metadata(data: Path, tmp_path: Path, file: str) -> None:
    source = copied(data, "two_rank", tmp_path)
    (source / "metadata.pkl").unlink()
    (source / file).unlink()
    with pytest.raises(CkptError) as caught:
        formats.open_checkpoint(source, format="torch-checkpointing")
    assert file in str(caught.value.why)
    assert not ckptctl.inspect(source, format="torch-checkpointing").complete


def test_file_of_another_save_is_unsupported(data: Path, tmp_path: Path) -> None:
    source = copied(data, "single", tmp_path)
    state = {"w": torch.ones(2)}
    torch.save(state, source / "model_0.pt")
    with pytest.raises(UnsupportedError, match="list different tensors"):
        ckptctl.inspect(source)


def test_hostile_metadata_pickle_is_refused(data: Path, tmp_path: Path) -> None:
    source = copied(data, "single", tmp_path)
    (source / "metadata.pkl").write_bytes(pickle.dumps(print))
    with pytest.raises(UnsafePickleError):
        ckptctl.inspect(source)


@pytest.mark.parametrize("change", ["world_size", "ranks", "path", "shape"])
def test_malicious_metadata_fields_are_unsupported(data: Path, tmp_path: Path, change: str) -> None:
    source = copied(data, "two_rank", tmp_path)
    content = pickle.loads((source / "metadata.pkl").read_bytes())
    model = content["metadata"]["model"]
    group = next(iter(model["nested_path_to_metadata"].values()))[0]
    if change == "world_size":
        content["world_size"] = 1 << 60
    elif change == "ranks":
        group["ranks"] = (0, 1 << 60)
    elif change == "path":
        model["rank_to_layout_info"][0] = {"file_path": "../../etc/passwd"}
    else:
        group["sharding_metadata"]["data"]["global_shape"] = [1, 2, 3]
    (source / "metadata.pkl").write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(UnsupportedError):
        formats.open_checkpoint(source)


def test_files_in_metadata_paths_are_read(data: Path, tmp_path: Path) -> None:
    source = copied(data, "two_rank", tmp_path)
    content = pickle.loads((source / "metadata.pkl").read_bytes())
    layout = content["metadata"]["model"]["rank_to_layout_info"]
    (source / "sub").mkdir()
    for rank in (0, 1):
        (source / f"model_{rank}.pt").rename(source / "sub" / f"m-{rank}.pt")
        layout[rank] = {"file_path": f"sub/m-{rank}.pt", "serialization_format": {"type": "Torch"}}
    (source / "metadata.pkl").write_bytes(pickle.dumps(content, protocol=4))
    expected = sample(data, "two_rank")[1]
    found = converted(source, tmp_path, only="all")
    assert not differences({key: found.get(key) for key in expected}, expected)


def test_unfinished_save_is_damaged(data: Path, tmp_path: Path) -> None:
    source = copied(data, "single", tmp_path).rename(tmp_path / "tmp_step-5")
    with pytest.raises(DamagedError, match="did not finish"):
        ckptctl.inspect(source)


def test_item_only_on_rank_0_is_noted(data: Path, tmp_path: Path) -> None:
    source = copied(data, "two_rank", tmp_path)
    (source / "raw_1.bin").unlink()
    assert any("only rank 0 has `raw`" in note for note in ckptctl.inspect(source).notes)


def test_local_shards_in_safetensors_are_refused(data: Path, tmp_path: Path) -> None:
    source = copied(data, "single", tmp_path)
    (source / "extra_0.safetensors").write_bytes(b"\0" * 16)
    with pytest.raises(FormatError, match="safetensors of local shards"):
        ckptctl.inspect(source, format="torch-checkpointing")
