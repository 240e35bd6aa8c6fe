"""What is said of a path at which there is nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest

import ckptctl
from ckptctl.errors import UsageError
from ckptctl.storage.paths import build_path_hint, leads_outside


def test_path_hint_suggests_similar_or_existing_names(tmp_path: Path) -> None:
    assert build_path_hint(tmp_path / "x") == f"`{tmp_path}` contains nothing"
    for name in ("step-1000", "step-2000", "step-10000", "logs", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    assert build_path_hint(tmp_path / "stpe-2000") == f"did you mean `{tmp_path / 'step-2000'}`?"
    assert build_path_hint(tmp_path / "lgos" / "deeper") == f"did you mean `{tmp_path / 'logs'}`?"
    few = "`file`, `logs`, `step-1000` and 2 more"
    assert build_path_hint(tmp_path / "q") == f"`{tmp_path}` contains {few}"
    assert build_path_hint(tmp_path / "file") == f"`{tmp_path / 'file'}` is a file"
    assert build_path_hint(tmp_path / "file" / "x") == f"did you mean `{tmp_path / 'file'}`?"


def test_path_hint_explains_broken_symlink(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    (tmp_path / "b").symlink_to("gone/away")
    said = f"`{tmp_path / 'a'}` is a symbolic link to `a`: Too many levels of symbolic links"
    assert build_path_hint(tmp_path / "a") == said
    gone = f"`{tmp_path / 'b'}` is a symbolic link to `gone/away`, which does not exist"
    assert build_path_hint(tmp_path / "b") == gone == build_path_hint(tmp_path / "b" / "model")


def test_path_hint_suggests_hf_scheme_for_repository_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hub = "; write a Hub repository as `hf://meta-llama/Llama-3.1-8B`"
    assert build_path_hint("meta-llama/Llama-3.1-8B") == f"`{tmp_path}` contains nothing{hub}"
    assert "hf://" not in build_path_hint("outputs/model.safetensors")
    assert "contains" in build_path_hint("meta-llama/Llama/3.1")
    assert "contains" in build_path_hint("Llama-3.1-8B")
    (tmp_path / "meta-llama").mkdir()
    assert "contains" in build_path_hint("meta-llama/Llama-3.1-8B")


def test_unknown_user_home_is_a_usage_error(tmp_path: Path) -> None:
    calls: dict[str, Callable[[], object]] = {
        "inspect": lambda: ckptctl.inspect("~no.such.user/x"),
        "convert": lambda: ckptctl.convert(tmp_path, "~no.such.user/x", to="hf"),
        "manager": lambda: ckptctl.CheckpointManager("~no.such.user/x"),
    }
    for call in calls.values():
        with pytest.raises(UsageError, match=r"`~no\.such\.user` is not a home directory"):
            call()


def test_links_and_parents_that_lead_outside_are_found(tmp_path: Path) -> None:
    """Through any part of the name, and also where a link leads to the root."""
    root, away = tmp_path / "real" / "root", tmp_path / "away"
    for folder in (root / "inner", away / "inner"):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    (root / "near").symlink_to("inner/file")
    (root / "far").symlink_to(away / "inner/file")
    (root / "folder").symlink_to(away / "inner")
    (tmp_path / "root").symlink_to(root)
    names = {
        "inner/file": False,
        "gone": False,
        "near": False,
        "inner/../near": False,
        "far": True,
        "folder/file": True,
        "../../away/inner/file": True,
        "inner/../../../away/inner/file": True,
    }
    for place in (root, tmp_path / "root"):
        assert {name: leads_outside(place / name, place) for name in names} == names
