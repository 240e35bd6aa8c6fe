"""Errors that stay: from some call on, every one of its kind fails. What is left is spoken of."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptctl
from ckptctl.errors import CkptError
from tests.integration.test_failing_calls import TINY, digest
from tests.sweeps import one_in

TROUBLES = {
    "write": (errno.ENOSPC, ("pwrite", "write", "ftruncate")),
    "sync": (errno.EIO, ("fsync",)),
    "unlink": (errno.EIO, ("unlink", "rmdir")),
    "mkdir": (errno.ENOSPC, ("mkdir",)),
    "open": (errno.ENOSPC, ("open",)),
    "all": (errno.EIO, ("pwrite", "write", "ftruncate", "fsync", "unlink", "rmdir", "mkdir")),
}


def convert(root: Path) -> None:
    asked: dict[str, Any] = {"to": "dcp", "jobs": 1, "max_shard_size": 60_000}
    ckptctl.convert(root / "hf", root / "there" / "out", overwrite=True, **asked)


class Trouble:
    """Lets calls of some kinds fail from a number on.

    Args:
        start: The first that fails.
        number: With which ``errno``.
    """

    def __init__(self, start: float, number: int) -> None:
        self.start, self.number, self.count = start, number, 0

    def wrap(self, function: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: Any, **options: Any) -> object:
            making = function.__name__ != "open" or (len(args) > 1 and args[1] & os.O_CREAT)
            self.count += bool(making)
            if making and self.count >= self.start:
                raise OSError(self.number, os.strerror(self.number))
            return function(*args, **options)

        return counted

    def run(self, root: Path, names: tuple[str, ...]) -> CkptError | None:
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(os, name, self.wrap(getattr(os, name)))
            try:
                convert(root)
            except CkptError as error:
                return error
        return None


@pytest.mark.parametrize("kind", one_in(4, TROUBLES))
def test_error_lists_leftover_files(tmp_path: Path, kind: str) -> None:
    shutil.copytree(TINY, tmp_path / "hf")
    convert(tmp_path)
    number, names = TROUBLES[kind]
    counting = Trouble(float("inf"), number)
    assert counting.run(tmp_path, names) is None
    place, whole = tmp_path / "there", digest(tmp_path / "there" / "out")
    for start in sorted({1, 2, counting.count // 2, counting.count - 1, counting.count}):
        error = Trouble(max(start, 1), number).run(tmp_path, names)
        assert digest(place / "out") == whole
        left = [name for name in os.listdir(place) if name != "out"]
        if error is not None:
            assert error.exit_code == 8
            assert all(name in str(error.why) for name in left), (kind, start, error.why)
        convert(tmp_path)
        assert os.listdir(place) == ["out"] and digest(place / "out") == whole
