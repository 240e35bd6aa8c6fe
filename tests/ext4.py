"""File systems of their own, in files, for what only a disk can do: fill up, and lose its power."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def make(image: Path, nbytes: int, *options: str) -> None:
    """Make an empty ext4 in the file *image*; without ``mkfs.ext4`` the test is skipped.

    Args:
        image: The file.
        nbytes: Its size.
        options: Of ``mkfs.ext4``.
    """
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no ext4 here")
    with image.open("wb") as file:
        file.truncate(nbytes)
    subprocess.run(["mkfs.ext4", "-q", "-F", *options, str(image)], check=True)


def mounted(image: Path) -> Iterator[Path]:
    """Yield where the file system in *image* is mounted; where that is not allowed, skip."""
    point = image.with_name(f"{image.name}-mounted")
    point.mkdir()
    command = ["mount", "-o", "loop", str(image), str(point)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)
        point.rmdir()
