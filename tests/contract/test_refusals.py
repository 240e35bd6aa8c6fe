"""Foreign things, pipes, destinations and full disks."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.errors import CkptError
from tests.contract.damaged import (
    DAMAGE,
    KINDS,
    NORM,
    STATE,
    convert,
    data_files,
    found_or_harmless,
    is_complete,
)
from tests.contract.support import (
    WRITABLE,
    message,
    refused,
    single_file,
    snapshot,
)
from tests.sweeps import one_in


@pytest.mark.parametrize("name", one_in(3, KINDS))
def test_fifo_replacing_data_file_is_refused_without_hanging(
    tmp_path: Path, copy: Callable[[str], Path], originals: dict[str, Path], name: str
) -> None:
    source = copy(name)
    for file in data_files(source):
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        if file.suffix == ".json":
            found_or_harmless(source, tmp_path, originals["hf"], file.name)
        else:
            with pytest.raises(CkptError) as caught:
                convert(source, tmp_path)
            assert caught.value.exit_code in DAMAGE, file.name
            assert not list((tmp_path / "outputs").iterdir())
            assert not is_complete(source)
        file.unlink()
        file.write_bytes(content)


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("pickle")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))


def _legacy(path: Path) -> None:
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)


def _folder(name: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        (path / name).write_bytes(b"x")

    return make


FOREIGN: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "legacy": ("old.pt", _legacy, "legacy"),
    "tar": ("old.tar", _tar, "tar"),
    "tar-pt": ("old.pt", _tar, "tar"),
    "onnx": ("m.onnx", lambda p: p.write_bytes(b"\x08\x07"), "ONNX"),
    "hdf5": ("m.h5", lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n"), "HDF5"),
    "tensorflow": ("saved", _folder("saved_model.pb"), "TensorFlow"),
    "tensorflow-index": ("tf", _folder("model.ckpt.index"), "TensorFlow"),
    "no-gguf": ("gguf", _folder("model.gguf"), "not a recognized checkpoint"),
    "flax": ("flax", _folder("flax_model.msgpack"), "Flax"),
    "empty-folder": ("empty", lambda p: p.mkdir(), "not a recognized checkpoint"),
    "empty-file": ("empty.pt", lambda p: p.write_bytes(b""), "not a recognized checkpoint"),
    "text": ("note.txt", lambda p: p.write_bytes(b"hello"), "not a recognized checkpoint"),
    "pickle": ("state.pkl", lambda p: p.write_bytes(pickle.dumps({"a": 1})), "pickle"),
    "nothing": ("nowhere", lambda p: None, "no such"),
    "pipe": ("pipe", os.mkfifo, ""),
    "device": ("device", lambda p: p.symlink_to("/dev/zero"), ""),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_other_file_types_are_refused_with_exit_3(tmp_path: Path, case: str) -> None:
    name, make, word = FOREIGN[case]
    (tmp_path / "in").mkdir()
    (tmp_path / "outputs").mkdir()
    make(tmp_path / "in" / name)
    for call in (
        lambda path: convert(path, tmp_path),
        lambda path: ckptctl.inspect(path),
    ):
        with pytest.raises(CkptError) as caught:
            call(tmp_path / "in" / name)
        assert caught.value.exit_code == 3, message(caught.value)
        assert word.lower() in message(caught.value).lower()
        assert name in message(caught.value)
    assert not list((tmp_path / "outputs").iterdir())


@pytest.mark.parametrize("source_format", WRITABLE)
@pytest.mark.parametrize("case", ["exists", "same", "inside", "around", "file", "link"])
def test_occupied_or_overlapping_destinations_are_refused(
    tmp_path: Path, copy: Callable[[str], Path], source_format: str, case: str
) -> None:
    source = copy(source_format)
    outputs = tmp_path / "outputs"
    (outputs / "there").mkdir()
    (outputs / "there" / "mine").touch()
    (outputs / "file").write_text("mine")
    (outputs / "link").symlink_to(outputs / "there")
    if source.is_file() and case == "inside":
        source = source.parent / source.name
    target = {
        "exists": outputs / "there",
        "same": source,
        "inside": source / "deep" / "out" if source.is_dir() else source,
        "around": source.parent,
        "file": outputs / "file",
        "link": outputs / "link",
    }[case]
    for overwrite in {False, case in ("same", "inside", "around", "file")}:
        with refused(source, target, 6) as caught:
            ckptctl.convert(source, target, to="dcp", overwrite=overwrite)
        assert target.name in message(caught.value)


@pytest.mark.parametrize("target", WRITABLE)
def test_full_disk_is_refused_before_writing(
    tmp_path: Path, copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    source = copy("hf")
    real = os.statvfs

    def full(path: Any) -> Any:
        found = real(path)
        values = list(found)
        values[3] = values[4] = 1
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", full)
    with refused(source, tmp_path / "outputs" / "out", 6) as caught:
        convert(source, tmp_path, target)
    assert "space" in message(caught.value)


@pytest.mark.parametrize("case", ["missing-shard", "flip", "exists"])
def test_failed_convert_shows_error_without_traceback(
    tmp_path: Path, copy: Callable[[str], Path], case: str
) -> None:
    from typer.testing import CliRunner

    from ckptctl.cli.app import app

    source = copy("dcp")
    needle = STATE[NORM].view(torch.uint8).numpy().tobytes()
    data = next(file for file in source.glob("*.distcp") if needle in file.read_bytes())
    target = tmp_path / "outputs" / "out"
    if case == "missing-shard":
        data.unlink()
    elif case == "flip":
        content = bytearray(data.read_bytes())
        content[content.index(needle)] ^= 1
        data.write_bytes(content)
    else:
        (target / "mine").mkdir(parents=True)
    before = snapshot(source)
    result = CliRunner().invoke(app, ["convert", str(source), str(target), "--to", "hf"])
    assert result.exit_code == (6 if case == "exists" else 4), result.output
    assert result.stdout == ""
    assert "error: " in result.stderr
    assert "Traceback" not in result.output
    assert (data.name in result.stderr) == (case != "exists")
    assert snapshot(source) == before
    assert [item.name for item in target.parent.iterdir()] == (["out"] if case == "exists" else [])


def test_single_file_formats_are_written_as_files(originals: dict[str, Path]) -> None:
    assert {name for name in WRITABLE if originals[name].is_file()} == {
        name for name in WRITABLE if single_file(name)
    }
