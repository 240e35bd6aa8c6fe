"""Metadata that claims more than there can be."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ckptctl.verbs.verification.verify import verify_checkpoint
from ckptctl.verbs.verification.verify_options import VerifyOptions

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("shape", [(1 << 60,), (1 << 62, 1 << 62)])
@pytest.mark.parametrize("name", [".metadata", "__0.metadata"])
def test_item_shorter_than_its_chunk_is_an_index_error(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    start = torch.Size([0] * len(shape))
    chunk = m.ChunkStorageMetadata(start, torch.Size(shape))
    entry = m.TensorStorageMetadata(
        m.TensorProperties(dtype=torch.float32), torch.Size(shape), [chunk]
    )
    where = {m.MetadataIndex("w", start): _StorageInfo("__0_0.distcp", 0, 64)}
    content = m.Metadata({"w": entry}, planner_data={"w": ("w",)}, storage_data=where)
    (tmp_path / name).write_bytes(pickle.dumps(content))
    (tmp_path / "__0_0.distcp").write_bytes(b"PK\3\4" + bytes(38) + b"PK\5\6" + bytes(18))
    found = verify_checkpoint(tmp_path, VerifyOptions(level="fast"))
    assert [one.what for one in found.errors] == ["a chunk has the wrong number of bytes"]
    assert (found.errors[0].tensor, found.errors[0].basis) == ("w", "index")
    assert not found.shows_damaged_files, (
        "the index is odd; no file shows that a write was cut short"
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("after", [bytes(22), bytes(4000), b"of some writer"])
def test_trailing_bytes_after_last_item_are_not_damage(tmp_path: Path, after: bytes) -> None:
    """As of a writer that fills up whole blocks: torch passes over it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    stored = {"w": torch.arange(6.0)}
    save(stored, checkpoint_id=tmp_path)
    file, index = tmp_path / "__0_0.distcp", tmp_path / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    length = file.stat().st_size
    file.write_bytes(file.read_bytes() + after)
    place = _StorageInfo(file.name, 0, length + len(after))
    metadata.storage_data = dict.fromkeys(metadata.storage_data, place)
    index.write_bytes(pickle.dumps(metadata))
    loaded = {"w": torch.zeros(6)}
    load(loaded, checkpoint_id=tmp_path)
    assert torch.equal(loaded["w"], stored["w"])
    assert not verify_checkpoint(tmp_path, VerifyOptions(level="fast")).findings
    file.write_bytes(file.read_bytes()[: length - 100] + bytes(100 + len(after)))
    (torn,) = verify_checkpoint(tmp_path, VerifyOptions(level="fast")).findings
    assert torn.severity == "error"
