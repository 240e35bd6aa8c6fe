"""Where outputs go: room for them, and what they must not touch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptctl
from ckptctl.conversion.destinations import Destination, is_replaceable, require_destination
from ckptctl.errors import RefusedError
from ckptctl.storage import destinations
from tests.checkpoints import save_hf, tiny_llama


def test_destination_delegates_free_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destinations, "count_free_bytes", lambda _: 41)
    assert Destination(tmp_path, tmp_path).count_free_bytes() == 41


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("in", "are the same"),
        ("in/inner/out", "inside the source"),
        (".", "inside the destination"),
    ],
)
def test_overlapping_source_and_destination_are_refused(
    tmp_path: Path, target: str, what: str
) -> None:
    folder = tmp_path / "here"
    (folder / "in" / "inner").mkdir(parents=True)
    wanted = folder.parent / "here" / target
    with pytest.raises(RefusedError, match=what):
        require_destination(folder / "in", wanted, True, is_replaceable)
    found = require_destination(folder / "in", folder / "out", False, is_replaceable)
    assert found.path == folder.resolve() / "out"


FOREIGN = (
    *("thesis.docx", ".env", "photo.JPG", "notes.txt", "train.py", "eval.csv", "run.log"),
    *("optimizer.pt", "other.safetensors.json", "config.yaml", "id_rsa"),
)


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_folder_with_foreign_files_is_not_replaced(
    tiny_llama3_hf: Path, tmp_path: Path, name: str, damaged: bool
) -> None:
    if damaged and name == "optimizer.pt":
        pytest.skip("whether a file of weights is part of it cannot be told")
    target = Path(shutil.copytree(tiny_llama3_hf, tmp_path / "out"))
    for usual in ("README.md", "LICENSE", ".gitattributes", "ckptctl.manifest.json"):
        (target / usual).touch()
    if damaged:
        for weights in target.glob("*.safetensors"):
            weights.write_bytes(b"cut off")
    assert is_replaceable(target)
    (target / name).write_text("mine")
    with pytest.raises(RefusedError, match="more than a checkpoint") as caught:
        ckptctl.convert(tiny_llama3_hf, target, to="dcp", overwrite=True)
    assert name in str(caught.value.why)
    assert (target / name).read_text() == "mine"


def test_url_needs_file_name_for_single_file_formats(tmp_path: Path) -> None:
    weights, config = tiny_llama()
    source = save_hf(tmp_path / "hf", weights, config)
    with pytest.raises(RefusedError, match="the destination has no file name"):
        ckptctl.plan_conversion(source, "memory://bucket", to="torch")
    assert ckptctl.plan_conversion(source, "memory://bucket/model.pt", to="torch").nbytes
