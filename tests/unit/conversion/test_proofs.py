"""Verification: every byte of an output is compared, and a bad one does not stay."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptctl
from ckptctl.errors import StorageError
from ckptctl.storage.publish import Staging
from tests.sweeps import one_in

SOURCE = Path("tests/data/tiny-llama3-hf")


@pytest.fixture
def source(tmp_path):
    source = tmp_path / "in" / "source"
    shutil.copytree(SOURCE, source)
    (source / "tokenizer.json").write_bytes(b"0123456789" * 10)
    return source


def damage(monkeypatch, name, change):
    """Let the disk change a file between the last sync and the publication."""
    real = Staging.publish

    def publishing(stage):
        path = stage.data / name
        content = bytearray(path.read_bytes())
        change(content)
        path.write_bytes(content)
        return real(stage)

    monkeypatch.setattr(Staging, "publish", publishing)


def flip(position: int) -> Callable[[bytearray], None]:
    def change(content: bytearray) -> None:
        content[position] ^= 1

    return change


def append(content: bytearray) -> None:
    content += b"x"


CASES = [
    ("hf", "model.safetensors", flip(20)),
    ("hf", "tokenizer.json", flip(-1)),
    ("hf", "tokenizer.json", append),
    ("hf", "ckptctl.manifest.json", flip(-3)),
    ("dcp", ".metadata", flip(-3)),
    ("dcp", "__0_0.distcp", flip(1)),
    ("meta", "params.json", flip(1)),
    ("torch", "out", flip(-1)),
]


@pytest.mark.parametrize(("to", "name", "change"), one_in(3, CASES))
def test_output_damage_outside_tensors_fails_verification(
    tmp_path, source, monkeypatch, to, name, change
):
    ckptctl.convert(source, tmp_path / "out", to=to, verify=True)
    damage(monkeypatch, name, change)
    again = tmp_path / "again"
    again.mkdir()
    with pytest.raises(StorageError, match="read back") as caught:
        ckptctl.convert(source, again / "out", to=to, verify=True)
    assert name in caught.value.where
    assert "deleted" in caught.value.why
    assert not list(again.iterdir())


def test_failed_verification_restores_old_output(tmp_path, source, monkeypatch):
    out = tmp_path / "out"
    ckptctl.convert(source, out, to="dcp")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    damage(monkeypatch, "tokenizer.json", flip(0))
    with pytest.raises(StorageError) as caught:
        ckptctl.convert(source, out, to="hf", overwrite=True, verify=True)
    assert "was restored" in caught.value.why
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_failed_revert_is_reported_in_error(tmp_path, source, monkeypatch):
    damage(monkeypatch, "tokenizer.json", flip(0))

    def failing(_stage):
        raise StorageError("EIO")

    monkeypatch.setattr(Staging, "revert", failing)
    with pytest.raises(StorageError, match="read back") as caught:
        ckptctl.convert(source, tmp_path / "out", to="hf", verify=True)
    assert "still there" in caught.value.why
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())
