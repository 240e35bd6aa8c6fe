"""Damaged input of every format: the right exit code, a message that names things, no traces."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.contract.damaged import (
    DAMAGE,
    KINDS,
    STATE,
    convert,
    data_files,
    found_or_harmless,
    is_complete,
)
from tests.contract.support import (
    message,
    refused,
)
from tests.sweeps import one_in


@pytest.mark.parametrize("name", KINDS)
def test_checkpoint_with_deleted_data_file_is_refused(
    tmp_path: Path, copy: Callable[[str], Path], originals: dict[str, Path], name: str
) -> None:
    """Without any one of its files a checkpoint is refused, or is complete all the same."""
    for file in data_files(originals[name]):
        if file.suffix == ".json":
            continue
        source = copy(name)
        damaged = source if source.is_file() else source / file.name
        damaged.unlink()
        with refused(source, tmp_path / "outputs" / "out", *DAMAGE) as caught:
            convert(source, tmp_path)
        said = message(caught.value)
        assert file.name in said or "missing shard" in said or caught.value.exit_code == 3
        assert not is_complete(source), file.name
        shutil.rmtree(source.parent)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_checkpoint_with_truncated_data_file_is_refused(
    tmp_path: Path, copy: Callable[[str], Path], originals: dict[str, Path], name: str
) -> None:
    for file in data_files(originals[name]):
        size = file.stat().st_size
        for length in {0, 1, 7, 8, 100, size // 2, max(size - 200, 0), size - 1}:
            source = copy(name)
            os.truncate(source if source.is_file() else source / file.name, length)
            with refused(source, tmp_path / "outputs" / "out", *DAMAGE) as caught:
                convert(source, tmp_path)
            assert file.name in message(caught.value), (file.name, length)
            assert not is_complete(source), (file.name, length)
            shutil.rmtree(source.parent)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(3, KINDS))
def test_flipped_bits_are_detected_or_harmless(
    tmp_path: Path, copy: Callable[[str], Path], originals: dict[str, Path], name: str
) -> None:
    """A flip is found, or it is harmless; only bare safetensors data has nothing to find it by."""
    source = copy(name)
    for number, file in enumerate(data_files(source)):
        content = file.read_bytes()
        checked = file.suffix != ".safetensors"
        stop = len(content) if checked else 8 + struct.unpack("<Q", content[:8])[0]
        # A step without a factor in common with 64, the alignment of data; of the many files of
        # DCP a few places each, never the same ones.
        step = max(stop // (6 if file.suffix == ".distcp" else 24), 1) | 1
        for position in range(number * 37 % step, stop, step):
            changed = bytearray(content)
            changed[position] ^= 1 << position % 8
            file.write_bytes(changed)
            found_or_harmless(source, tmp_path, originals["hf"], f"{file.name} {position}")
        file.write_bytes(content)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "hf"])
def test_flipped_data_bit_is_refused_naming_tensor_and_file(
    tmp_path: Path, copy: Callable[[str], Path], name: str
) -> None:
    source = copy(name)
    needle = STATE["model.norm.weight"].view(torch.uint8).numpy().tobytes()
    holders = [file for file in data_files(source) if needle in file.read_bytes()]
    file = holders[0]
    content = bytearray(file.read_bytes())
    content[content.index(needle) + 5] ^= 4
    file.write_bytes(content)
    with refused(source, tmp_path / "outputs" / "out", 4, 9) as caught:
        convert(source, tmp_path)
    assert "norm.weight" in message(caught.value)
    assert file.name in message(caught.value)
