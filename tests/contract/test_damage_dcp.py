"""DCP metadata that contradicts itself or the data."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.errors import CoverageError, UnsupportedError
from tests.checkpoints import (
    differences,
    load_any_reference,
    save_dcp,
)
from tests.contract.damaged import (
    convert,
)
from tests.contract.support import (
    message,
    refused,
)


def _metadata(source: Path) -> Any:
    with (source / ".metadata").open("rb") as file:
        return pickle.load(file)


def _save_metadata(source: Path, metadata: Any) -> None:
    (source / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.fixture
def chunked(tmp_path: Path) -> Path:
    """Return a DCP directory whose ``weight`` lies in two chunks of rows."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    source = tmp_path / "in" / "chunked"
    state = {"weight": torch.arange(32.0).reshape(8, 4), "other": torch.ones(3), "n": 5}
    save_dcp(source, {**state, "tail": torch.arange(32.0).reshape(8, 4)[4:].clone()})
    metadata = _metadata(source)
    weight = metadata.state_dict_metadata["weight"]
    first, size = torch.Size([0, 0]), torch.Size([4, 4])
    tail = metadata.storage_data.pop(MetadataIndex("tail", first))
    del metadata.state_dict_metadata["tail"]
    metadata.planner_data.pop("tail")
    save_dcp(tmp_path / "half", {"weight": torch.arange(16.0).reshape(4, 4)})
    shutil.move(tmp_path / "half" / "__0_0.distcp", source / "__1_0.distcp")
    half = next(iter(_metadata(tmp_path / "half").storage_data.values()))
    shutil.rmtree(tmp_path / "half")
    weight.chunks[:] = [
        ChunkStorageMetadata(first, size),
        ChunkStorageMetadata(torch.Size([4, 0]), size),
    ]
    half.relative_path = "__1_0.distcp"
    del metadata.storage_data[MetadataIndex("weight", first)]
    metadata.storage_data[MetadataIndex("weight", first, 0)] = half
    metadata.storage_data[MetadataIndex("weight", torch.Size([4, 0]), 1)] = tail
    _save_metadata(source, metadata)
    (tmp_path / "outputs").mkdir()
    return source


def test_undamaged_dcp_chunks_convert_without_differences(tmp_path: Path, chunked: Path) -> None:
    found = load_any_reference(convert(chunked, tmp_path))
    assert torch.equal(found["weight"], torch.arange(32.0).reshape(8, 4))
    assert not differences(found, load_any_reference(chunked))


def _chunks(metadata: Any) -> Any:
    return metadata.state_dict_metadata["weight"].chunks


def _set_offset(metadata: Any, row: int) -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    chunk = _chunks(metadata)[1]
    old = MetadataIndex("weight", chunk.offsets, 1)
    chunk.offsets = torch.Size([row, 0])
    info = metadata.storage_data.pop(old)
    metadata.storage_data[MetadataIndex("weight", chunk.offsets, 1)] = info


def _lose(metadata: Any) -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    del _chunks(metadata)[1]
    del metadata.storage_data[MetadataIndex("weight", torch.Size([4, 0]))]


def _lose_item(metadata: Any) -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    del metadata.storage_data[MetadataIndex("weight", torch.Size([4, 0]))]


def _other_size(metadata: Any) -> None:
    _chunks(metadata)[1].sizes = torch.Size([3, 4])


def _global_size(metadata: Any) -> None:
    metadata.state_dict_metadata["weight"].size = torch.Size([9, 4])


def _global_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["weight"].properties.dtype = torch.int32


def _path(metadata: Any, path: str) -> None:
    for info in metadata.storage_data.values():
        if info.relative_path == "__1_0.distcp":
            info.relative_path = path


def _beyond(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.length += 10_000


def _negative(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.offset = -1


def _swap_items(metadata: Any) -> None:
    items = list(metadata.storage_data.items())
    other = next(info for index, info in items if index.fqn == "other")
    for index, _ in items:
        if index.fqn == "weight":
            metadata.storage_data[index] = other


DCP: dict[str, tuple[Callable[[Any], None], str]] = {
    "hole": (lambda m: _set_offset(m, 5), "weight"),
    "overlap": (lambda m: _set_offset(m, 3), "weight"),
    "same-place": (lambda m: _set_offset(m, 0), "weight"),
    "chunk-missing": (_lose, "weight"),
    "item-missing": (_lose_item, "weight"),
    "chunk-size": (_other_size, "weight"),
    "global-size": (_global_size, "weight"),
    "global-dtype": (_global_dtype, "weight"),
    "another-item": (_swap_items, "weight"),
    "beyond": (_beyond, ".distcp"),
    "negative": (_negative, ".metadata"),
    "parent": (lambda m: _path(m, "../half/__1_0.distcp"), "__1_0.distcp"),
    "absolute": (lambda m: _path(m, "/etc/passwd"), "/etc/passwd"),
    "folder": (lambda m: _path(m, "."), "`.`"),
    "nothing": (lambda m: _path(m, ""), ""),
}


@pytest.mark.parametrize("case", DCP)
def test_contradicting_dcp_chunks_are_refused(tmp_path: Path, chunked: Path, case: str) -> None:
    metadata = _metadata(chunked)
    change, word = DCP[case]
    change(metadata)
    _save_metadata(chunked, metadata)
    with refused(chunked, tmp_path / "outputs" / "out", 4, 9) as caught:
        convert(chunked, tmp_path)
    assert word in message(caught.value), message(caught.value)


def test_two_chunks_at_one_position_are_damage(tmp_path: Path, chunked: Path) -> None:
    metadata = _metadata(chunked)
    first, second = (i for key, i in metadata.storage_data.items() if key.fqn == "weight")
    for name in ("relative_path", "offset", "length"):
        setattr(second, name, getattr(first, name))
    _save_metadata(chunked, metadata)
    result = ckptctl.verify(chunked, level="fast")
    (finding,) = result.errors
    assert result.verdict == "damaged"
    assert (finding.what, finding.tensor, finding.basis) == (
        "two chunks of `weight` have the same position",
        "weight",
        "index",
    )
    with pytest.raises(CoverageError):
        convert(chunked, tmp_path)


def test_item_without_tensor_in_metadata_is_unknown(tmp_path: Path, chunked: Path) -> None:
    metadata = _metadata(chunked)
    del metadata.state_dict_metadata["other"]
    _save_metadata(chunked, metadata)
    (finding,) = ckptctl.verify(chunked, level="fast").unknown
    assert "`storage_data` lists `other`" in str(finding.why)
    with pytest.raises(UnsupportedError):
        convert(chunked, tmp_path)


def _lose_path(metadata: Any) -> None:
    del metadata.planner_data["other"]


def _rename_path(metadata: Any) -> None:
    metadata.planner_data["other"] = ("an", "other")


def _lose_tensor(metadata: Any) -> None:
    del metadata.state_dict_metadata["other"]
    for index in [index for index in metadata.storage_data if index.fqn == "other"]:
        del metadata.storage_data[index]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_lose_path, "`planner_data` contains no path of `other`"),
        (_rename_path, "`planner_data` contains other paths of `other`"),
        (_lose_tensor, "`planner_data` contains paths without values: `other`"),
    ],
)
def test_contradicting_planner_data_is_a_warning(
    tmp_path: Path, change: Callable[[Any], None], why: str
) -> None:
    source = save_dcp(tmp_path / "dcp", {"weight": torch.ones(2), "other": torch.ones(3), "n": 5})
    assert ckptctl.verify(source, level="fast").findings == ()
    metadata = _metadata(source)
    change(metadata)
    _save_metadata(source, metadata)
    result = ckptctl.verify(source, level="fast")
    assert result.verdict == "complete"
    warnings = {finding.why for finding in result.findings}
    item_bytes = {w for w in warnings if str(w).startswith("it does not list")}
    assert warnings - item_bytes == {why}
    assert bool(item_bytes) == (change is _lose_tensor)


def test_dcp_symlink_outside_checkpoint_is_refused(tmp_path: Path, chunked: Path) -> None:
    (chunked / "__1_0.distcp").rename(tmp_path / "in" / "secret")
    (chunked / "__1_0.distcp").symlink_to(tmp_path / "in" / "secret")
    with refused(chunked, tmp_path / "outputs" / "out", 4, 9) as caught:
        convert(chunked, tmp_path)
    assert "__1_0.distcp" in message(caught.value)
