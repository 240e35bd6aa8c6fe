"""``ckptctl.run.json`` in a checkpoint: what it was rated with, and which save of its run it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ckptctl.errors import CkptError
from ckptctl.formats.assets import SIDECAR
from ckptctl.planner.branches import UNKNOWN, Lineage, Resume
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.json_reader import read_json

SCHEMA = "ckptctl.run/1"


def record(folder: Path) -> Mapping[str, object]:
    """Return what the checkpoint *folder* says of its run; nothing where that cannot be read."""
    try:
        if not (folder / SIDECAR).is_file():
            return {}
        with SourceFiles(folder) as files:
            found = read_json(files, SIDECAR, constants=True)
    except (CkptError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def lineage_of(folder: Path) -> Lineage:
    """Return which save of its run the checkpoint *folder* is."""
    said = record(folder)
    save, resumed = said.get("save"), said.get("resumed")
    if not _is_count(save) or not isinstance(resumed, list):
        return UNKNOWN
    found = [one for one in resumed if isinstance(one, dict)]
    numbers = [[one.get(name) for name in Resume._fields] for one in found]
    if len(found) < len(resumed) or not all(_is_count(n) for some in numbers for n in some):
        return UNKNOWN
    before = tuple(Resume(*(int(str(n)) for n in some)) for some in numbers)
    left = said.get("left")
    return Lineage(int(str(save)), before, int(str(left)) if _is_count(left) else 0)


def encoded(metrics: Mapping[str, float], known: Mapping[str, object]) -> bytes:
    """Return the content of a record.

    Args:
        metrics: What the checkpoint is rated with.
        known: Its other members: of a record that is there, or of :func:`members`.
    """
    whole = {"schema": SCHEMA, **known, "metrics": dict(metrics)}
    return json.dumps(whole, indent=2).encode()


def members(lineage: Lineage) -> Mapping[str, object]:
    """Return what says which save of its run a checkpoint is."""
    left = {"left": lineage.left} if lineage.left else {}
    return {"save": lineage.save, "resumed": [one._asdict() for one in lineage.resumed], **left}


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
