"""Paths in messages are shown as they were typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckptctl.cli.typed_paths import remember_command_line, restore_typed_paths


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "place" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


@pytest.mark.parametrize(
    ("typed", "text", "shown"),
    [
        ("run", "{here}/run", "run"),
        ("run", "`{here}/run/step-1` is missing", "`run/step-1` is missing"),
        ("./run/", "{here}/run/step-1", "./run/step-1"),
        ("run", "{here}/runs and {here}/run.bak", "runs and run.bak"),
        ("../other", "{here}/../other/x, {above}/other", "../other/x, ../other"),
        ("../other", "{above}/third", "../third"),
        ("--out=../other", "{above}/other", "../other"),
        ("{here}/run", "{here}/run/x: bad", "{here}/run/x: bad"),
        (".", "{here}", "."),
        ("run", "x{here}/run", "x{here}/run"),
        ("s3://bucket/run", "s3://bucket/run/x", "s3://bucket/run/x"),
        ("/", "/etc/passwd", "/etc/passwd"),
    ],
)
def test_absolute_paths_are_shown_as_typed(here: Path, typed: str, text: str, shown: str) -> None:
    places = {"here": here, "above": here.parent}
    remember_command_line([typed.format(**places)])
    assert restore_typed_paths(text.format(**places)) == shown.format(**places)


def test_links_are_shown_as_typed(here: Path) -> None:
    (here / "latest").symlink_to(here / "run")
    remember_command_line(["latest"])
    assert restore_typed_paths(f"{here}/run/x") == "latest/x"


def test_errors_show_typed_path(run, tiny_llama3_hf, here: Path) -> None:
    shutil.copytree(tiny_llama3_hf, here / "hf")
    file = here / "hf" / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for typed in ("hf", "./hf", "../place/hf", here / "hf"):
        result = run("convert", typed, "out", "--to", "dcp")
        assert f"  where: {typed}/{file.name}\n" in result.stderr
    error = json.loads(run("convert", "hf", "out", "--to", "dcp", "--json").stderr)["error"]
    assert error["where"] == str(file), "a program gets the absolute path"


def test_deleted_working_directory_leaves_paths_unchanged(here: Path) -> None:
    shutil.rmtree(here)
    remember_command_line(["run"])
    assert restore_typed_paths(f"{here}/run") == f"{here}/run"


def test_unknown_home_directory_is_left_unchanged(here: Path) -> None:
    remember_command_line(["ls", "~nosuchuser/x", "//"])
    assert (
        restore_typed_paths("where: ~nosuchuser/x, s3:///x, /")
        == "where: ~nosuchuser/x, s3:///x, /"
    )
