"""Where elements lie is what the bytes there show, in columns or as objects."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
import torch

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.columns import ExtentColumns
from ckptctl.errors import DamagedError
from tests.checkpoints.dcp import save_dcp

STATE = {
    "usual": torch.arange(24, dtype=torch.float32).reshape(4, 6),
    "turned": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
    "empty": torch.empty(0, 3),
    "number": torch.tensor(7),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_dcp(tmp_path / "dcp", STATE)


def located(path: Path) -> Catalog:
    return formats.resolve_codecs(formats.open_checkpoint(path))


def test_extents_match_bytes_on_disk(saved: Path) -> None:
    catalog = located(saved)
    for name, tensor in STATE.items():
        (extent,) = catalog.tensors[name].extents
        content = (saved / extent.file).read_bytes()[extent.offset :][: extent.nbytes]
        stored = tensor.t() if extent.strides else tensor
        assert content == stored.contiguous().numpy().tobytes()
        assert extent.codec == "raw" and extent.box.sizes == tuple(tensor.shape)
        assert extent.crc32 in (None, zlib.crc32(content)), name
        if name == "usual":
            assert extent.crc32 == zlib.crc32(content)


def test_contiguous_tensors_stay_extent_columns(saved: Path) -> None:
    tensors = located(saved).tensors
    kept = {name for name, entry in tensors.items() if isinstance(entry.extents, ExtentColumns)}
    assert kept == STATE.keys() - {"turned"}
    assert tensors["turned"].extents[0].strides == (1, 4)


def test_many_items_take_about_one_read_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{number:02}": torch.full((4096,), float(number)) for number in range(40)}
    path = save_dcp(tmp_path / "dcp", state, thread_count=1)
    catalog, pread = formats.open_checkpoint(path), os.pread
    reads: list[tuple[int, ...]] = []

    def counted(*where: int) -> bytes:
        reads.append(where)
        return pread(*where)

    monkeypatch.setattr(os, "pread", counted)
    tensors = formats.resolve_codecs(catalog).tensors
    assert len(reads) < 40 + 20, "the first one is read as a whole"
    for name, tensor in state.items():
        (extent,) = tensors[name].extents
        content = (path / extent.file).read_bytes()[extent.offset :][: extent.nbytes]
        assert content == tensor.numpy().tobytes() and extent.crc32 == zlib.crc32(content)


def test_item_at_another_tensor_position_is_damaged(saved: Path) -> None:
    catalog = formats.open_checkpoint(saved)
    extents = catalog.tensors["usual"].extents
    catalog.tensors["number"].extents.starts = extents.starts  # type: ignore[attr-defined]
    catalog.tensors["number"].extents.lengths = extents.lengths  # type: ignore[attr-defined]
    with pytest.raises(DamagedError, match="a chunk of `number` does not match the metadata"):
        formats.resolve_codecs(catalog)
