"""What is published: that two builds are one, what is in them, and what they say of themselves.

``CKPTCTL_BUILT`` names the folder with two builds, ``dist`` and ``again``; ``nox -s wheel`` makes
them: the first one's wheel of the sdist, the second one's of the tree.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import ckptctl

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
CONTAINER = CHECKOUT / ".github" / "container" / "Containerfile"
PYTHON = f"{shlex.quote(sys.executable)} "
BUILT = Path(os.environ.get("CKPTCTL_BUILT", "")).absolute()
built = pytest.mark.skipif(
    "CKPTCTL_BUILT" not in os.environ, reason="about builds, which `nox -s wheel` makes"
)


def wheel() -> zipfile.ZipFile:
    (found,) = (BUILT / "dist").glob("*.whl")
    return zipfile.ZipFile(found)


@built
def test_two_builds_are_identical() -> None:
    def digests(folder: Path) -> dict[str, str]:
        files = folder.iterdir()
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    first = digests(BUILT / "dist")
    assert first == digests(BUILT / "again")
    ends = (f"{ckptctl.__version__}-py3-none-any.whl", f"{ckptctl.__version__}.tar.gz")
    assert sorted(first) == [f"ckptctl-{end}" for end in ends]


@built
def test_sdist_contains_tracked_files() -> None:
    (found,) = (BUILT / "dist").glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(
        ["git", "-C", CHECKOUT, "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    assert names == {*filter(None, listed.stdout.split("\0")), "PKG-INFO"}


@built
def test_wheel_metadata_does_not_require_torch() -> None:
    with wheel() as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        said = Parser().parsestr(archive.read(metadata).decode())
    assert "ckptctl/py.typed" in names
    assert said["Version"] == ckptctl.__version__
    required = said.get_all("Requires-Dist") or []
    needed = [text for text in required if "extra ==" not in text]
    assert not any(text.startswith(("torch", "numpy")) for text in needed)
    assert any(re.fullmatch("torch>=.*; extra == 'torch'", text) for text in required)


@built
def test_container_build_steps_install_working_program(tmp_path: Path) -> None:
    """What it copies is enough for what it runs, which is run here, in another place."""
    text = CONTAINER.read_text().replace("\\\n", "")
    for line in re.findall(r"^COPY ([^-].*)$", text, re.M):
        *sources, target = line.split()
        for source in sources:
            path = tmp_path / target / (source if target == "./" else Path(source).name)
            path = tmp_path / target if target == source else path
            path.parent.mkdir(exist_ok=True)
            copy = shutil.copytree if (CHECKOUT / source).is_dir() else shutil.copyfile
            copy(CHECKOUT / source, path)
    (command,) = re.findall(r"^RUN (.*)$", text, re.M)
    command = command.replace("/opt/ckptctl", str(tmp_path / "opt")).replace("python ", PYTHON, 1)
    pip = f'pip() {{ {PYTHON} -m pip "$@"; }}; '
    subprocess.run(["bash", "-ec", pip + command], cwd=tmp_path, check=True, timeout=300)
    model = str(CHECKOUT / "tests/data/tiny-llama3-hf")
    program = str(tmp_path / "opt" / "bin" / "ckptctl")
    done = subprocess.run(
        [program, "verify", model], cwd="/", env={"HOME": "/tmp"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_container_runs_as_non_root_user() -> None:
    *_, last = re.split(r"^FROM .*$", CONTAINER.read_text(), flags=re.M)
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", last, re.M)
    assert last.rstrip().endswith('ENTRYPOINT ["ckptctl"]')
    named = set(re.findall(r"^FROM python:3\.(\d+)-slim", CONTAINER.read_text(), re.M))
    assert len(named) == 1
    assert f"Programming Language :: Python :: 3.{named.pop()}" in PROJECT["classifiers"]


def test_classified_python_versions_are_tested() -> None:
    start = "Programming Language :: Python :: 3."
    named = [text.removeprefix(start) for text in PROJECT["classifiers"] if text.startswith(start)]
    tested = re.search(r"^PYTHONS = \[(.*)\]$", (CHECKOUT / "noxfile.py").read_text(), re.M)
    assert tested and [f'"3.{minor}"' for minor in named] == tested[1].split(", ")
    workflow = (CHECKOUT / ".github" / "workflows" / "ci.yml").read_text()
    assert sorted(named) == sorted(re.findall(r"^ +3\.(\d+)$", workflow, re.M))
    assert PROJECT["requires-python"] == f">=3.{named[0]}"


def test_torch_is_an_extra_included_by_others() -> None:
    extras = PROJECT["optional-dependencies"]
    assert not any(text.startswith("torch") for text in PROJECT["dependencies"])
    for name in ("test", "lightning", "torchtitan", "torchtune", "transformers"):
        assert "ckptctl[torch]" in extras[name]
    for name in ("oracle", "servers", "dev"):
        assert any(re.match(r"ckptctl\[.*\btest\b.*\]", text) for text in extras[name])
