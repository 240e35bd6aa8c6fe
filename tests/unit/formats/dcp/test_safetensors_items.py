"""DCP written with ``SerializationFormat.SAFETENSORS``: safetensors in ``.distcp`` files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, SerializationFormat

import ckptctl
from ckptctl import formats
from ckptctl.distributed import LoadPlanner, Reader
from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.verbs.consolidate_metadata import plan_metadata
from tests.checkpoints.dcp import in_three_shards, save_dcp
from tests.checkpoints.readers import differences, flatten, load_any_reference
from tests.unit.formats.damage import converted, damaged, refused_or_right

STATE: dict[str, Any] = {
    "model": {
        "w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "b": torch.arange(5, dtype=torch.bfloat16),
        "scale": torch.tensor(3.5),
        "none": torch.zeros(0, 3),
    },
    "step": 7,
    "rates": [0.1, {"decay": "cosine"}],
}
WRITERS: list[dict[str, Any]] = [{}, {"thread_count": 3}, {"single_file_per_rank": False}]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(folder: Path, state: Any = None, **writer: Any) -> Path:
    kind = SerializationFormat.SAFETENSORS
    return save_dcp(folder, state or STATE, serialization_format=kind, **writer)


@pytest.mark.parametrize("writer", WRITERS)
def test_safetensors_items_verify_and_convert_exactly(
    tmp_path: Path, writer: dict[str, Any]
) -> None:
    source = save(tmp_path / "in", **writer)
    assert ckptctl.inspect(source).verdict == "complete"
    for level in ("fast", "headers", "full"):
        assert ckptctl.verify(source, level=level).verdict == "complete", level
    expected = flatten(STATE)
    assert not differences(converted(source, tmp_path, only="all"), expected)
    ckptctl.convert(source, tmp_path / "dcp", to="dcp", only="all", verify=True)
    assert not differences(load_any_reference(tmp_path / "dcp"), expected)


def test_safetensors_items_load_unlike_in_stock_torch(tmp_path: Path) -> None:
    source = save(tmp_path / "in")
    for reader in (None, Reader(source), FileSystemReader(source)):
        model = {name: torch.full_like(tensor, 9) for name, tensor in STATE["model"].items()}
        state = {"model": model, "step": 0, "rates": [0.0, {"decay": ""}]}
        if reader is None:
            ckptctl.load(state, source)
        elif isinstance(reader, Reader):
            state_dict_loader.load(
                state, storage_reader=reader, planner=LoadPlanner(), no_dist=True
            )
        else:
            with pytest.raises(CheckpointException):
                state_dict_loader.load(state, storage_reader=reader, no_dist=True)
            return
        assert not differences(flatten(state), flatten(STATE))


def test_damaged_safetensors_items_are_refused_or_read_exactly(tmp_path: Path) -> None:
    source, scratch = save(tmp_path / "in"), tmp_path / "scratch"
    scratch.mkdir()
    tensors = flatten({"model": STATE["model"]})
    for what, copy in damaged(source, scratch):
        if "flipped" not in what:  # nothing proves names and elements
            assert refused_or_right(copy, scratch, tensors, what), what


def test_truncated_file_is_damaged_at_fast_level(tmp_path: Path) -> None:
    source = save(tmp_path / "in", thread_count=3)
    for file in source.glob("*.distcp"):
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        assert ckptctl.verify(source, level="fast").verdict == "damaged", file.name
        file.write_bytes(content)
    assert ckptctl.verify(source).verdict == "complete"


def test_overwritten_chunk_is_missing(tmp_path: Path) -> None:
    group = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=2, store=group.FakeStore())
    try:
        source = save(tmp_path / "in", {"w": in_three_shards(torch.ones(8, 6), 0)})
    finally:
        dist.destroy_process_group()
    with pytest.raises(DamagedError, match="a chunk of `w` is missing"):
        formats.open_checkpoint(source)
    assert ckptctl.verify(source).verdict == "damaged"


def test_safetensors_header_without_tensor_is_damaged(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"w": torch.ones(2)})
    (file,) = source.glob("*.distcp")
    file.write_bytes(file.read_bytes().replace(b'"w"', b'"v"'))
    with pytest.raises(DamagedError, match="`w` is not in the safetensors file"):
        formats.open_checkpoint(source)


def test_consolidating_metadata_of_safetensors_items_is_unsupported(tmp_path: Path) -> None:
    source = save(tmp_path / "in")
    (source / ".metadata").rename(source / "__0.metadata")
    with pytest.raises(UnsupportedError, match="safetensors"):
        plan_metadata(source)
    assert not differences(converted(source, tmp_path, only="all"), flatten(STATE))


def test_safetensors_items_with_extension_are_unknown(extension: Any, tmp_path: Path) -> None:
    source = save(tmp_path / "in", _extensions=[extension])
    found = ckptctl.verify(source, level="full")
    assert found.verdict == "unknown" and not found.errors


def test_zip_item_with_tensor_length_is_read_as_zip(tmp_path: Path) -> None:
    """A stride of 0: the zip has one element, and is as long as the metadata's 300."""
    source = save_dcp(tmp_path / "in", {"w": torch.ones(1)})
    raw = pickle.loads((source / ".metadata").read_bytes())
    (place,) = raw.storage_data.values()
    raw.state_dict_metadata["w"].properties.dtype = torch.uint8
    size = torch.Size([place.length])
    raw.state_dict_metadata["w"].size = size
    raw.state_dict_metadata["w"].chunks[0].sizes = size
    (source / ".metadata").write_bytes(pickle.dumps(raw))
    assert formats.open_checkpoint(source).tensors["w"].extents[0].codec == "torch"
    with pytest.raises(DamagedError, match="a chunk of `w` does not match the metadata"):
        ckptctl.convert(source, tmp_path / "out", to="dcp")
