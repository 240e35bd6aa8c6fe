"""What ``--overwrite`` may replace: a checkpoint, and nothing that merely resembles one."""

from __future__ import annotations

from pathlib import Path

from ckptctl import formats
from ckptctl.errors import CkptError

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".th", ".ckpt")


def replaceable(path: Path) -> bool:
    """Return whether *path* is a checkpoint and holds nothing else of its owner's.

    A directory must look like one of the formats and have no directories of its own: a project
    with one stray weight file in it is no checkpoint. A file must be named as checkpoints are, or
    be readable as one: documents are zip files, too. Damaged ones may be replaced.
    """
    if not formats.sniff(path):
        return False
    if path.is_dir():
        return not any(item.is_dir() for item in path.iterdir())
    return path.suffix in SUFFIXES or _readable(path)


def _readable(path: Path) -> bool:
    try:
        return bool(formats.open_checkpoint(path).tensors)
    except CkptError:
        return False
