"""The action for GitHub's runners: its steps are run as a runner would, and its page names them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptctl.verbs.verification.verify_options import VerifyOptions
from tests.conftest import DATA

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / ".github" / "actions" / "verify"
ACTION: dict[str, Any] = yaml.safe_load((FOLDER / "action.yml").read_text())
INSTALL, VERIFY = ACTION["runs"]["steps"]
PAGE = REPOSITORY / "docs" / "how-to" / "check-a-download-in-ci.md"


@pytest.fixture
def runner(tmp_path: Path) -> Path:
    """Return a runner's temporary folder in which ckptctl is installed."""
    programs = tmp_path / "temp" / "ckptctl" / "bin"
    programs.mkdir(parents=True)
    for name, more in (("ckptctl", "-m ckptctl"), ("python", "")):
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {more} "$@"\n')
        script.chmod(0o755)
    return tmp_path


def step(
    runner: Path, found: dict[str, Any], path: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a step as a runner does, its inputs in the environment."""
    (runner / "step.sh").write_text(found["run"])
    said = {"ARGS": "", "CHECKPOINT": path, "LEVEL": ACTION["inputs"]["level"]["default"], **env}
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"],
        cwd=runner,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "GITHUB_ACTION_PATH": str(FOLDER),
            "GITHUB_OUTPUT": str(runner / "outputs"),
            "GITHUB_PATH": str(runner / "path"),
            "RUNNER_TEMP": str(runner / "temp"),
            **{name: said[name] for name in {**found["env"]}},
            **{name: value for name, value in env.items() if name == "PATH"},
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_action_inputs_reach_scripts_only_through_environment() -> None:
    """Inputs reach a script through its environment alone: none can become a command."""
    used = {name for one in (INSTALL, VERIFY) for name in re.findall(r"inputs\.(\w+)", str(one))}
    assert used == ACTION["inputs"].keys()
    for found in (INSTALL, VERIFY):
        assert found["shell"] == "bash" and "${{" not in found["run"]
    assert VerifyOptions(level=ACTION["inputs"]["level"]["default"]).level == "full"


def test_complete_checkpoint_has_no_annotation(runner: Path, tiny_llama3_hf: Path) -> None:
    done = step(runner, VERIFY, str(tiny_llama3_hf))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tiny_llama3_hf}: complete, data not verifiable, 0 findings\n"
    assert (runner / "outputs").read_text() == "exit-code=0\n"


def test_damaged_checkpoint_is_annotated(runner: Path) -> None:
    damaged = runner / "-damaged%"
    shutil.copytree(DATA / "tiny-llama3-hf", damaged, copy_function=shutil.copyfile)
    (damaged / "model-00002-of-00003.safetensors").unlink()
    done = step(runner, VERIFY, damaged.name, ARGS="--model-type llama3 --jobs 1", LEVEL="headers")
    assert done.returncode == 4
    lines = done.stdout.splitlines()
    assert lines[0].startswith("-damaged%25: damaged, data not read, ")
    command = r"::error title=ckptctl verify::[^\r\n]+%0A[^\r\n]+"
    assert re.fullmatch(command, lines[1]) and "model-00002-of-00003.safetensors" in lines[1]
    assert (runner / "outputs").read_text() == "exit-code=4\n"


def test_missing_checkpoint_exits_3_with_annotation(runner: Path) -> None:
    done = step(runner, VERIFY, "nothing")
    assert done.returncode == 3
    assert done.stdout.startswith("::error title=ckptctl verify::no such file or directory%0A")


@pytest.mark.parametrize(("args", "extra"), [("", ""), ("--jobs 2 --nan", "[torch]")])
def test_action_installs_torch_only_for_nan(runner: Path, args: str, extra: str) -> None:
    programs = runner / "programs"
    programs.mkdir()
    (programs / "python3").write_text('#!/bin/sh\necho "python3 $*"\n')
    pip = runner / "temp" / "ckptctl" / "bin" / "pip"
    pip.write_text('#!/bin/sh\necho "pip $*"; echo "$PIP_EXTRA_INDEX_URL"\n')
    for script in (programs / "python3", pip):
        script.chmod(0o755)
    done = step(runner, INSTALL, ARGS=args, PATH=f"{programs}:{os.environ['PATH']}")
    made, installed, index = done.stdout.splitlines()
    assert made == f"python3 -m venv {runner}/temp/ckptctl"
    root = f"{FOLDER}/../../.."
    assert installed == f"pip install -q -c {root}/tests/constraints.txt {root}{extra}"
    assert ("pytorch.org/whl/cpu" in index) is bool(extra)
    (folder,) = (runner / "path").read_text().splitlines()
    assert [path.resolve().name for path in Path(folder).iterdir()] == ["ckptctl"]


def test_docs_example_uses_existing_action_inputs() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (block,) = (block for block in blocks if "steps:" in block)
    (job,) = yaml.safe_load(block).values()
    (use,) = (found for found in job["steps"] if "verify" in found.get("uses", ""))
    assert use["uses"] == f"./ckptctl/{FOLDER.relative_to(REPOSITORY)}"
    assert use["with"].keys() <= ACTION["inputs"].keys() and "path" in use["with"]
