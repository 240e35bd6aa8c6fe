"""Items that are recognized by their pattern are what the strict reader says, or go to it."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckptctl.errors import CkptError, DamagedError
from ckptctl.storage.files import source_files
from ckptctl.storage.zips import items
from ckptctl.storage.zips.items import read_item_tensor
from ckptctl.storage.zips.zip_reader import StoredTensor
from tests.sweeps import one_in

TENSORS = {
    "small": torch.arange(60.0).reshape(20, 3),
    "large": torch.arange(20_000.0),
    "view": torch.arange(60.0)[10:30],
    "empty": torch.zeros(0, 4),
    "transposed": torch.arange(60.0).reshape(20, 3).t(),
}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    items._PATTERNS.clear()
    yield
    items._PATTERNS.clear()


def item(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def outcome(folder: Path, length: int) -> object:
    """Return what is read, or what the error says."""
    try:
        with source_files(folder) as files:
            return read_item_tensor(files, "a", 100, length)
    except CkptError as error:
        return type(error), error.what, error.why, error.where


def strictly(folder: Path, length: int) -> object:
    """Return the outcome without any pattern; those that were known are known again."""
    known = dict(items._PATTERNS)
    items._PATTERNS.clear()
    try:
        return outcome(folder, length)
    finally:
        items._PATTERNS.clear()
        items._PATTERNS.update(known)


@pytest.mark.parametrize("name", TENSORS)
def test_pattern_reader_reads_new_elements_like_strict_reader(tmp_path: Path, name: str) -> None:
    first, second = item(TENSORS[name]), item(TENSORS[name] + 1)
    for content in (first, second, first):
        (tmp_path / "a").write_bytes(bytes(100) + content + b"after")
        found = outcome(tmp_path, len(content))
        assert found == strictly(tmp_path, len(content))
        assert isinstance(found, StoredTensor)
    assert bool(items._PATTERNS) == (name != "empty")


@pytest.mark.parametrize("name", one_in(3, TENSORS))
def test_flipped_byte_has_same_outcome_in_both_readers(tmp_path: Path, name: str) -> None:
    content = item(TENSORS[name])
    (tmp_path / "a").write_bytes(bytes(100) + content)
    outcome(tmp_path, len(content))
    chance = random.Random(4)
    head, tail = range(700), range(len(content) - 1000, len(content))
    for at in sorted({*chance.sample(head, 250), *chance.sample(tail, 350)}):
        broken = bytearray(bytes(100) + content)
        broken[100 + at] ^= 1 << chance.randrange(8)
        (tmp_path / "a").write_bytes(broken)
        assert outcome(tmp_path, len(content)) == strictly(tmp_path, len(content)), at


def test_truncated_item_has_same_outcome_in_both_readers(tmp_path: Path) -> None:
    content = item(TENSORS["large"])
    (tmp_path / "a").write_bytes(bytes(100) + content)
    outcome(tmp_path, len(content))
    (tmp_path / "a").write_bytes((bytes(100) + content)[:-10])
    assert outcome(tmp_path, len(content)) == strictly(tmp_path, len(content))
    assert not isinstance(outcome(tmp_path, len(content)), StoredTensor)


def test_zeros_in_zip_directory_are_damaged(tmp_path: Path) -> None:
    """A disk block that was never written: the end of the zip says that there is something."""
    content = item(TENSORS["small"])
    second = content.index(b"PK\x01\x02", content.index(b"PK\x01\x02") + 1)
    torn = content[:second] + bytes(46) + content[second + 46 :]
    (tmp_path / "a").write_bytes(bytes(100) + torn)
    with source_files(tmp_path) as files, pytest.raises(DamagedError, match="damaged zip"):
        read_item_tensor(files, "a", 100, len(torn))
