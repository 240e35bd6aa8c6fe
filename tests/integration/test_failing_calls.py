"""Whole conversions in four directions of which a system call kills the process, or fails.

The harness is that of ``test_kill.py``: a torch-free process forks a child for each point. Whatever
happens, the destination is absent or, byte for byte, what an undisturbed run makes; the source is
what it was; a failure is told as one; and the next run succeeds and leaves nothing beside.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ckptctl
from ckptctl.errors import CkptError
from ckptctl.storage import file_system, lock
from tests.integration.test_kill import HOOKED, MEMORY, forked
from tests.sweeps import one_in

TINY = Path(__file__).parents[1] / "data" / "tiny-llama3-hf"
DIRECTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hf to dcp": ("hf", "dcp", {"max_shard_size": 60_000}),
    "dcp to hf": ("dcp", "hf", {"max_shard_size": 60_000}),
    "hf to meta": ("hf", "meta", {"mp": 2}),
    "meta to torch": ("meta", "torch", {"to_layout": "hf"}),
}
POINTS = 5
"""For each direction and each kind of trouble, spread over all calls."""
NUMBERS = (errno.EIO, errno.ENOSPC, errno.EFBIG)
FAILING = ("ftruncate", "pwrite", "write", "fsync")
LOCK = lock.__file__
"""Where nothing is written for the output: a lock whose file says less is a lock."""


class Trouble:
    """Counts system calls; before the one numbered *at* the process is killed, or that one fails.

    Args:
        at: Which; 0: none.
        number: The ``errno`` that it fails with; None: the process is killed.
    """

    def __init__(self, at: int, number: int | None) -> None:
        self.at = at
        self.number = number
        self.count = 0

    def install(self) -> None:
        for name in HOOKED if self.number is None else FAILING:
            setattr(os, name, self.wrap(getattr(os, name)))
        setattr(file_system, "rename_atomically", self.wrap(file_system.rename_atomically))  # noqa: B010
        if self.number is None:
            setattr(fcntl, "flock", self.wrap(fcntl.flock))  # noqa: B010

    def wrap(self, function: Callable[..., object]) -> Callable[..., object]:
        def counted(*args, **options):
            if self.number and sys._getframe(1).f_code.co_filename == LOCK:
                return function(*args, **options)
            self.count += 1
            if self.count == self.at and self.number is None:
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.count == self.at:
                raise OSError(self.number, os.strerror(self.number or 0))
            return function(*args, **options)

        return counted


def digest(path: Path) -> str:
    found = hashlib.sha256()
    for item in (path, *sorted(path.rglob("*"))):
        found.update(str(item.relative_to(path)).encode())
        found.update(item.read_bytes() if item.is_file() else b"")
    return found.hexdigest()


def convert(root: Path, name: str, *, overwrite: bool = False) -> None:
    source, to, options = DIRECTIONS[name]
    asked: dict[str, Any] = {"to": to, "jobs": 1, "overwrite": overwrite, **options}
    if source != "hf":
        asked["assets"] = root.parent / "hf"
    ckptctl.convert(root.parent / source, root / "out", **asked)


def attempt(root: Path, name: str, trouble: Trouble) -> int:
    """Convert in trouble; return the exit code that the program would have."""
    trouble.install()
    try:
        convert(root, name)
    except CkptError as error:
        return error.exit_code
    return 0


def total(root: Path, name: str, number: int | None) -> int:
    """Return how many calls there are in an undisturbed run."""
    reading, writing = os.pipe()

    def body() -> int:
        trouble = Trouble(0, number)
        code = attempt(root, name, trouble)
        os.write(writing, str(trouble.count).encode())
        return code

    assert forked(body) == 0
    os.close(writing)
    with open(reading) as counted:
        return int(counted.read())


def settle(root: Path, name: str, whole: str) -> bool:
    """Check what is left, run again, and check that all is well; return whether it was there."""
    there = os.path.lexists(root / "out")
    assert not there or digest(root / "out") == whole

    def again() -> int:
        convert(root, name, overwrite=there)
        return 0

    assert forked(again) == 0
    assert digest(root / "out") == whole
    assert os.listdir(root) == ["out"]
    return there


def in_trouble(name: str, number: int | None) -> str:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        base = Path(folder)
        shutil.copytree(TINY, base / "hf")
        for to in ("dcp", "meta"):
            ckptctl.convert(base / "hf", base / to, to=to)
        (base / "first").mkdir()
        calls = total(base / "first", name, number)
        whole = digest(base / "first" / "out")
        sources = [digest(base / one) for one in ("hf", "dcp", "meta")]
        published = 0
        points = sorted({1 + n * (calls - 1) // (POINTS - 1) for n in range(POINTS)})
        for point in points:
            root = base / str(point)
            root.mkdir()
            cause = NUMBERS[point % len(NUMBERS)] if number else None
            code = forked(partial(attempt, root, name, Trouble(point, cause)))
            assert code == (8 if number else -signal.SIGKILL), (point, calls, code)
            if number:
                assert os.listdir(root) in ([], ["out"]), "it left something behind"
            published += settle(root, name, whole)
            shutil.rmtree(root)
        assert [digest(base / one) for one in ("hf", "dcp", "meta")] == sources
        return f"{calls} {published}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["killed", "failing"])
@pytest.mark.parametrize("name", one_in(4, DIRECTIONS))
def test_killed_or_failing_convert_leaves_complete_output_or_none(name: str, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.test_failing_calls", name, kind],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    calls, published = map(int, done.stdout.split())
    assert calls > 20
    assert published, "the last call comes after the output has its name"


if __name__ == "__main__":
    assert "torch" not in sys.modules
    print(in_trouble(sys.argv[1], errno.EIO if sys.argv[2] == "failing" else None))
    assert "torch" not in sys.modules
