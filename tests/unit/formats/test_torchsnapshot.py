"""torchsnapshot directories, and what their manifests can say beyond the sample."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as stock_load

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError, CoverageError, DamagedError, FormatError, UnsupportedError
from ckptctl.verbs.verification import surroundings
from tests.checkpoints.readers import differences
from tests.unit.formats.damage import converted


@pytest.fixture
def source(data: Path) -> Path:
    return data / "wrappers" / "torchsnapshot" / "ckpt" / "snap"


@pytest.fixture
def expected(data: Path) -> dict[str, torch.Tensor]:
    return load_file(data / "wrappers" / "torchsnapshot" / "expected.safetensors")


@pytest.mark.parametrize("to", ["hf", "torch"])
def test_sample_model_matches_reference(
    source: Path, tmp_path: Path, expected: dict[str, torch.Tensor], to: str
) -> None:
    assert list(formats.sniff_formats(source)) == ["torchsnapshot"]
    assert not differences(converted(source, tmp_path, to, root="model.module"), expected)


def test_all_values_convert_with_param_groups(source: Path, tmp_path: Path) -> None:
    ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["progress"] == {"step": 2}
    group = found["optim"]["param_groups"][0]
    assert (group["lr"], group["betas"], group["foreach"]) == (0.01, (0.9, 0.999), None)
    assert group["params"] == [0, 1, 2, 3, 4, 5]
    assert set(found["optim"]["state"]) == {0, 1, 2, 3, 4, 5}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_param_groups_load_from_dcp_output(source: Path, tmp_path: Path) -> None:
    """A list of plain values is one value of a DCP checkpoint."""
    ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all")
    ckptctl.convert(source, tmp_path / "out", to="dcp", only="all")
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    state["optim"]["param_groups"][0]["params"] = []
    stock_load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state["optim"]["param_groups"][0]["params"] == [0, 1, 2, 3, 4, 5]
    assert ckptctl.diff(source, tmp_path / "out.pt").same


@pytest.mark.slow
def test_damaged_files_never_convert_silently_wrong(
    source: Path, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    """Bytes of elements have no checksum; those of the manifest, and all sizes, are checked."""
    data = (source / ".snapshot_metadata").read_bytes()
    for at in range(0, len(data), max(len(data) // 40, 1)):
        _check(source, tmp_path, expected, ".snapshot_metadata", _flipped(data, at))
    files = [item for item in source.rglob("*") if item.is_file()]
    for file in files:
        name, content = str(file.relative_to(source)), file.read_bytes()
        for length in (0, len(content) // 2, len(content) - 1):
            _check(source, tmp_path, expected, name, content[:length])
        error = _check(source, tmp_path, expected, name, None)
        assert isinstance(error, CkptError), name
        if name != ".snapshot_metadata":
            assert name in str(error.why), (name, error.to_json())


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x04]) + data[at + 1 :]


def _check(
    source: Path,
    scratch: Path,
    expected: dict[str, torch.Tensor],
    name: str,
    content: bytes | None,
) -> CkptError | None:
    copy = scratch / "damaged"
    shutil.copytree(source, copy)
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)
    try:
        found = converted(copy, scratch, root="model.module")
    except CkptError as error:
        assert error.exit_code in (2, 3, 4, 5, 9), error.to_json()
        return error
    finally:
        shutil.rmtree(copy)
    wrong = differences(found, expected)
    renamed = {line.partition(": ")[2] for line in wrong if line.startswith("unexpected")}
    assert len(wrong) == 2 * len(renamed), (name, wrong)  # a name has no checksum either
    return None


def snapshot(
    folder: Path, manifest: dict[str, Any], files: dict[str, bytes], world: int = 2
) -> Path:
    folder.mkdir()
    content = {"version": "0.1.0", "world_size": world, "manifest": manifest}
    (folder / ".snapshot_metadata").write_text(json.dumps(content))
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def tensor(location: str, shape: list[int], span: list[int] | None = None) -> dict[str, Any]:
    return {
        "type": "Tensor",
        "location": location,
        "serializer": "buffer_protocol",
        "dtype": "torch.float32",
        "shape": shape,
        "replicated": False,
        "byte_range": span,
    }


def shard(location: str, offsets: list[int], sizes: list[int]) -> dict[str, Any]:
    return {"offsets": offsets, "sizes": sizes, "tensor": tensor(location, sizes)}


FULL = torch.arange(12.0).reshape(4, 3)
HALVES = {f"sharded/w.{n}": FULL[2 * n : 2 * n + 2].numpy().tobytes() for n in (0, 1)}


def test_sharded_tensors_of_all_ranks_are_joined(tmp_path: Path) -> None:
    manifest: dict[str, Any] = {
        f"{rank}/m/a%2Fb": {
            "type": "ShardedTensor",
            "shards": [shard(f"sharded/w.{rank}", [2 * rank, 0], [2, 3])],
        }
        for rank in (0, 1)
    }
    manifest |= {f"{rank}/m": {"type": "dict", "keys": ["a/b"]} for rank in (0, 1)}
    found = converted(snapshot(tmp_path / "x", manifest, HALVES), tmp_path)
    assert not differences(found, {"m.a/b": FULL})


def test_chunks_that_do_not_cover_shape_are_an_error(tmp_path: Path) -> None:
    chunks = [shard(f"sharded/w.{n}", [2 * n, 0], [2, 3]) for n in (0, 1)]
    whole = {"type": "ChunkedTensor", "dtype": "torch.float32", "shape": [4, 3], "chunks": chunks}
    manifest = {"0/w": {**whole, "replicated": True}}
    found = converted(snapshot(tmp_path / "x", manifest, HALVES), tmp_path)
    assert not differences(found, {"w": FULL})
    lacking = {"0/w": {**whole, "replicated": True, "chunks": chunks[:1]}}
    with pytest.raises(CoverageError):
        converted(snapshot(tmp_path / "y", lacking, HALVES), tmp_path)


def test_torch_save_and_per_rank_tensors_are_read(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(FULL.t(), buffer)
    saved = {**tensor("0/t", [3, 4]), "serializer": "torch_save"}
    manifest = {"0/t": saved, "0/r": tensor("0/r", [1]), "1/r": tensor("1/r", [1])}
    files = {"0/t": buffer.getvalue(), "0/r": b"\0\0\x80?", "1/r": b"\0\0\0@"}
    found = converted(snapshot(tmp_path / "x", manifest, files), tmp_path)
    assert not differences(
        found, {"t": FULL.t(), "r": torch.tensor([1.0]), "rank_1.r": torch.tensor([2.0])}
    )


@pytest.mark.parametrize(
    "manifest",
    [
        {"0/w": tensor("../w", [1])},
        {"0/w": tensor("w", [2])},
        {"0/w": tensor("w", [1], [1, 5])},
        {"0/w": tensor("w", [1], [4, 0])},
        {"7/w": tensor("w", [1])},
        {"0/w": {**tensor("w", [1]), "serializer": "per_tensor_qtensor"}},
        {"0/w": {**tensor("w", [1]), "dtype": "torch.qint8"}},
        {"0/w": {"type": "strange"}},
        {"0/w": {"type": "int", "serialized_value": "x"}},
        {"0/w": {"type": "bool", "serialized_value": "x"}},
        {"0/w": {"type": "float", "serialized_value": "AAAA"}},
        {"0/w": {"type": "ShardedTensor", "shards": []}},
        {"0/d": {"type": "dict", "keys": ["lost"]}},
        {"0/w": 1},
        {},
    ],
)
def test_invalid_manifest_entries_are_refused(tmp_path: Path, manifest: dict[str, Any]) -> None:
    source = snapshot(tmp_path / "x", manifest, {"w": b"\0" * 4})
    with pytest.raises(CkptError) as caught:
        converted(source, tmp_path)
    assert caught.value.exit_code in (3, 4, 5, 9)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("renamed", "problem"),
    [
        ("optim/state/1/exp_avg_Sq", "state/1` does not list the key `exp_avg_Sq`"),
        ("opti/state/1/exp_avg_sq", "opti/state/1` is not in the manifest"),
    ],
)
def test_value_outside_of_its_dictionary_is_damage(
    source: Path, tmp_path: Path, renamed: str, problem: str, rank: int
) -> None:
    """The other rank has a value of the right name, which does not replace the renamed one."""
    copy = tmp_path / "snap"
    shutil.copytree(source, copy)
    text = (copy / ".snapshot_metadata").read_text()
    text = text.replace(f"{rank}/optim/state/1/exp_avg_sq", f"{rank}/{renamed}")
    (copy / ".snapshot_metadata").write_text(text)
    with pytest.raises(DamagedError, match=problem):
        ckptctl.convert(copy, tmp_path / "out.pt", to="torch", only="all")
    assert ckptctl.verify(copy, level="fast").verdict == "damaged"


def _stage_manifest() -> dict[str, Any]:
    """Build the manifest of DTensors that are replicated within each of two pipeline stages."""
    manifest: dict[str, Any] = {}
    for rank in range(4):
        name = f"stage{rank // 2}"
        manifest[f"{rank}/m"] = {"type": "dict", "keys": ["state"]}
        manifest[f"{rank}/m/state"] = {"type": "dict", "keys": [name]}
        manifest[f"{rank}/m/state/{name}"] = {"type": "dict", "keys": ["w"]}
    for name in ("stage0", "stage1"):
        shards = [shard(f"replicated/{name}", [0], [1])]
        fields = {"type": "DTensor", "shards": shards, "mesh": [2, 3], "dim_map": [[-1]]}
        manifest[f"0/m/state/{name}/w"] = fields
    return manifest


def test_replicated_dtensor_of_other_ranks_is_read(tmp_path: Path) -> None:
    files = {"replicated/stage0": b"\0\0\x80?", "replicated/stage1": b"\0\0\0@"}
    source = snapshot(tmp_path / "x", _stage_manifest(), files, world=4)
    assert ckptctl.verify(source, level="fast").verdict == "complete"
    ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all")
    state = torch.load(tmp_path / "out.pt", weights_only=True)["m"]["state"]
    assert state == {
        "stage0": {"w": torch.tensor([1.0])},
        "stage1": {"w": torch.tensor([2.0])},
    }


def test_dtensor_that_no_rank_lists_is_damage(tmp_path: Path) -> None:
    manifest = _stage_manifest()
    manifest["0/m/state/stage1/v"] = manifest.pop("0/m/state/stage1/w")
    manifest |= {f"{rank}/m/state/stage1": {"type": "dict", "keys": []} for rank in (2, 3)}
    files = {f"replicated/stage{n}": b"\0" * 4 for n in (0, 1)}
    source = snapshot(tmp_path / "x", manifest, files, world=4)
    assert ckptctl.verify(source, level="fast").verdict == "damaged"


def test_list_of_replicated_values_is_read(tmp_path: Path) -> None:
    number = {"type": "int", "serialized_value": "3", "replicated": True}
    manifest: dict[str, Any] = {f"{rank}/m/lr": {"type": "list"} for rank in (0, 1)}
    manifest |= {f"{rank}/m": {"type": "dict", "keys": ["lr", "w"]} for rank in (0, 1)}
    manifest |= {"0/m/lr/0": number, "0/m/w": tensor("w", [1])}
    source = snapshot(tmp_path / "x", manifest, {"w": b"\0" * 4})
    ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all")
    assert torch.load(tmp_path / "out.pt", weights_only=True)["m"]["lr"] == [3]


def test_unreferenced_data_files_are_reported(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "snap"
    shutil.copytree(source, copy)
    strays = ["0/other/w", "batched/5d0a86c4-3ba0-4f8c-9c4f-0a3c6b4bd0a1", "sharded/w.0"]
    for name in strays:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_bytes(b"\0" * 4)
    result = ckptctl.verify(copy, level="fast")
    assert result.verdict == "complete"
    assert [finding.file for finding in result.findings] == strays


def test_list_of_data_folder_is_bounded(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "MIN_FOLDER_ITEMS", 2)
    monkeypatch.setattr(surroundings, "FOLDER_ITEMS_PER_FILE", 0)
    findings = ckptctl.verify(source, level="fast").findings
    assert {(f.what, f.why) for f in findings} == {
        ("the folder contains too many items", "only the first 2 items were listed")
    }


def test_ranks_without_entries_are_noted(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "snap"
    shutil.copytree(source, copy)
    manifest = json.loads((copy / ".snapshot_metadata").read_text())
    (copy / ".snapshot_metadata").write_text(json.dumps({**manifest, "world_size": 10**12}))
    note = "the manifest has no entries of 999,999,999,998 of 1,000,000,000,000 ranks"
    assert note in ckptctl.verify(copy, level="fast").notes


def test_yaml_manifest_of_old_snapshot_is_refused(tmp_path: Path) -> None:
    source = snapshot(tmp_path / "x", {}, {})
    (source / ".snapshot_metadata").write_text("version: 0.0.1\nmanifest: {}\n")
    with pytest.raises(FormatError, match="not JSON"):
        ckptctl.inspect(source)


def test_gap_between_tensors_is_unsupported(tmp_path: Path) -> None:
    manifest = {"0/a": tensor("w", [1], [0, 4]), "0/b": tensor("w", [1], [8, 12])}
    with pytest.raises(UnsupportedError, match="wrong position"):
        formats.open_checkpoint(snapshot(tmp_path / "x", manifest, {"w": b"\0" * 12}))


def test_truncated_file_names_tensor_with_largest_end_offset(tmp_path: Path) -> None:
    manifest = {f"0/{n}": tensor("w", [1], [4 * n, 4 * n + 4]) for n in (1, 2, 0)}
    with pytest.raises(DamagedError, match="truncated") as caught:
        formats.open_checkpoint(snapshot(tmp_path / "x", manifest, {"w": b"\0" * 3}))
    assert str(caught.value.where).endswith("`2`")
    assert caught.value.why == "12 bytes are needed, but the file has 3"
