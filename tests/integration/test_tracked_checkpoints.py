"""The hook of pre-commit and the extension of ``hf``, as their tools call them."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ckptctl import delta, pre_commit

TINY = Path("tests/data/tiny-llama3-hf")
FILES = tuple(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))


@pytest.fixture
def tracked(tmp_path: Path) -> Path:
    """A folder with a checkpoint of three shards."""
    return shutil.copytree(TINY, tmp_path / "tracked")


def test_changed_files_of_one_checkpoint_are_verified_once(
    tracked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pre_commit.main(["--level=full", *(str(tracked / name) for name in FILES)]) == 0
    output = capsys.readouterr().out
    assert output.count(str(tracked)) == 1 and "complete" in output and "level full" in output


def test_commit_without_one_shard_fails(tracked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tracked / FILES[1]).unlink()
    assert pre_commit.main([str(tracked / FILES[0])]) == 4
    assert f"`{FILES[1]}` is missing" in capsys.readouterr().out


def test_file_in_other_folder_is_verified_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"\0" * 20)
    shutil.copytree(TINY, tmp_path / "a")
    paths = [str(tmp_path / "weights.safetensors"), str(tmp_path / "a" / FILES[0])]
    assert pre_commit.main(paths) == 4
    assert "weights.safetensors" in capsys.readouterr().out


def test_file_next_to_checkpoints_is_verified_itself(
    tracked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`verify` of the folder fails with 3, because it is no checkpoint."""
    shutil.copytree(tracked, tracked.parent / "second")
    torch = pytest.importorskip("torch")
    torch.save({"scale": torch.ones(2)}, tracked.parent / "scales.pt")
    assert pre_commit.main([str(tracked.parent / "scales.pt")]) == 0
    assert "scales.pt" in capsys.readouterr().out


def test_file_names_are_never_options(
    tracked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A converter is a program, so the name of a tracked file must not choose one."""
    monkeypatch.chdir(tracked)
    program = "import pathlib; pathlib.Path('executed').touch()"
    Path("evil.bin").write_text(program)
    Path("--converter=evil.bin").write_text(program)
    Path("-folder").mkdir()
    Path("-folder/model.safetensors").write_bytes(b"\0")
    for name in ("--converter=evil.bin", "-folder/model.safetensors"):
        assert pre_commit.main([name, FILES[0]]) == 2
        assert f"{name}" in capsys.readouterr().out
    assert not Path("executed").exists()


def test_deltas_are_verified_as_deltas(
    tracked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = tracked / FILES[0]
    state = {key: tensor + 1 for key, tensor in load_file(name).items()}
    save_file(state, name, {"format": "pt"})
    delta.make(TINY, tracked, tmp_path / "delta")
    payload = tmp_path / "delta" / "delta-00001.safetensors"
    assert pre_commit.main(["--level=full", str(payload)]) == 0
    payload.write_bytes(payload.read_bytes()[:-1] + b"\0")
    assert pre_commit.main([str(payload)]) == 4
    delta.make(TINY, tracked, tmp_path / "weight_v000001", weight_version=1)
    capsys.readouterr()
    (shard,) = (tmp_path / "weight_v000001").glob("*.safetensors")
    assert pre_commit.main([str(shard)]) == 9
    assert "published update of weights" in capsys.readouterr().out


def test_hook_names_an_existing_program() -> None:
    text = Path(".pre-commit-hooks.yaml").read_text()
    (entry,) = (line for line in text.splitlines() if line.strip().startswith("entry:"))
    assert entry.split()[1:] == ["python", "-P", "-m", pre_commit.__name__]


def test_hook_needs_no_torch(tracked: Path) -> None:
    """pre-commit installs ckptctl without extras into an environment of its own."""
    program = f"runpy.run_module({pre_commit.__name__!r}, run_name='__main__')"
    code = f"import runpy, sys; sys.modules['torch'] = None; {program}"
    result = subprocess.run(
        [sys.executable, "-c", code, str(tracked / FILES[0])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "complete" in result.stdout


def test_hf_runs_the_extension(tmp_path: Path) -> None:
    cli = pytest.importorskip("huggingface_hub.cli.extensions")
    project = tomllib.loads(Path("docs/hf-ckpt/pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["hf-ckpt"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    folder = tmp_path / ".local/share/hf/extensions/hf-ckpt"
    program = folder / "hf-ckpt"
    folder.mkdir(parents=True)
    program.write_text(f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n")
    program.chmod(0o755)
    manifest = {"owner": "org", "repo": "hf-ckpt", "repo_id": "org/hf-ckpt", "short_name": "ckpt"}
    manifest |= {"executable_path": str(program), "type": "python"}
    manifest["installed_at"] = "2026-01-02T03:04:05+00:00"
    (folder / cli.MANIFEST_FILENAME).write_text(json.dumps(manifest))
    result = subprocess.run(
        [sys.executable, "-m", "huggingface_hub.cli.hf", "ckpt", "inspect", str(TINY), "--json"],
        env={**os.environ, "HOME": str(tmp_path), "HF_HUB_DISABLE_UPDATE_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["model_type"] == "llama3"
