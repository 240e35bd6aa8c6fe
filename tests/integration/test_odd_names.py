"""Names and numbers that Python can hold and cannot write: an answer or a refusal, never a bug."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ckptctl.cli.app import app
from tests.conftest import DATA

HUGE = 10**5000


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*map(str, arguments)], prog_name="ckptctl")
    return result.exit_code, result.output


@pytest.mark.parametrize("options", [(), ("--json",), ("--stats",), ("--markdown",)])
def test_huge_integer_is_inspected_and_converted(tmp_path: Path, options: tuple[str, ...]) -> None:
    torch.save({"w": torch.ones(2), "step": HUGE, "epoch": 3}, tmp_path / "a.pt")
    code, said = run("inspect", tmp_path / "a.pt", *options)
    assert code == 0 and "bug" not in said
    out = tmp_path / "b.pt"
    assert run("convert", tmp_path / "a.pt", out, "--to", "torch", "--only", "all")[0] == 0
    assert torch.load(out, weights_only=False)["step"] == HUGE


def test_surrogate_tensor_name_is_refused_only_with_checksums(tmp_path: Path) -> None:
    name = "w\ud800"
    torch.save({name: torch.ones(2), "v": torch.ones(3)}, tmp_path / "a.pt")
    asked = ("--to", "dcp")
    code, said = run("consolidate", tmp_path / "a.pt", tmp_path / "out", *asked)
    assert code == 6 and "w\\ud800" in said
    assert not list(tmp_path.glob("*out*"))
    without = (*asked, "--exclude", "w*")
    assert run("consolidate", tmp_path / "a.pt", tmp_path / "out", *without)[0] == 0
    assert run("convert", tmp_path / "a.pt", tmp_path / "bare", *asked, "--no-checksum")[0] == 0
    assert run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch")[0] == 0
    assert set(torch.load(tmp_path / "b.pt")) == {name, "v"}


def test_undecodable_file_name_is_converted(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    target = tmp_path / os.fsdecode(b"b\xff.pt")
    assert run("convert", tmp_path / "a.pt", target, "--to", "torch")[0] == 0
    assert torch.equal(torch.load(target)["w"], torch.ones(2))


def test_symlink_loops_never_crash_and_convert_nothing(
    tiny_llama3_hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loop = Path("loop")
    loop.symlink_to(loop)
    model = tmp_path / "model"
    model.mkdir()
    for item in tiny_llama3_hf.iterdir():
        (model / item.name).symlink_to(item.name if item.suffix == ".json" else item)
    for command in ("inspect", "verify", "ls", "latest"):
        for source in (loop, model, loop / "inner"):
            assert run(command, source)[0] in range(10)
    for source, target, more in (
        (tiny_llama3_hf, loop, ()),
        (tiny_llama3_hf, loop / "inner", ()),
        (tiny_llama3_hf, "out", ("--assets", loop)),
        (tiny_llama3_hf, "out", ("--like", loop)),
        (loop, "out", ()),
        (model, "out", ()),
    ):
        assert run("convert", source, target, "--to", "hf", *more)[0] in range(1, 10)
    assert not Path("out").exists()


def test_undecodable_name_of_copied_file_is_reported(tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(DATA / "tiny-llama3-hf", source)
    odd = os.fsdecode(b"notes\xff.txt")
    (source / odd).write_text("x")
    asked = ("convert", source, tmp_path / "out", "--to", "hf", "--carry", "*.txt")
    code, said = run(*asked)
    assert code == 6 and "file `notes\\udcff.txt`" in said
    assert "to skip the tensor" not in said
    assert run(*asked, "--no-checksum")[0] == 0
    assert (tmp_path / "out" / odd).exists()
