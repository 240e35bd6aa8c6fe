"""Where an output may go: what is refused before a run, and what ``--overwrite`` may replace."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptctl import formats
from ckptctl.errors import CkptError, RefusedError, listed
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.checksums import carried
from ckptctl.formats.sidecar_files import WEIGHTS, beside
from ckptctl.storage import destinations
from ckptctl.storage.paths import home_expanded, real_path
from ckptctl.storage.urls import is_url
from ckptctl.tree import TreePath
from ckptctl.units import natural

SAME = "source and destination are the same"
AROUND = "the source is inside the destination"
ELSEWHERE = "choose a new path next to the source or elsewhere"


@dataclass(frozen=True, slots=True)
class Destination:
    """A place where an output may be made: an absolute path, or a URL to upload files to.

    Attributes:
        given: The path as the user names it.
    """

    given: TreePath
    path: TreePath
    upload: bool = False

    def free_bytes(self) -> int:
        """Free bytes of the file system that is written to, be it on the way to a URL."""
        return destinations.free_bytes(Path(tempfile.gettempdir() if self.upload else self.path))


def require_destination(
    source: TreePath,
    target: TreePath,
    overwrite: bool,
    is_checkpoint: Callable[[TreePath], bool],
    elsewhere: str = ELSEWHERE,
) -> Destination:
    """Return a destination after checking that an output may be made there.

    *elsewhere* is the hint where it would be in the source.
    """
    if is_url(target):
        # What is there is looked at when the run begins.
        if source == target or source in target.parents or target in source.parents:
            raise RefusedError("source and destination overlap", where=str(target))
        if not target.name or len(target.parts) < 2:
            raise RefusedError("the destination must have a name", where=str(target))
        return Destination(target, target, upload=True)
    destinations.require_path(target)
    found = destinations.destination(home_expanded(Path(target)).absolute())
    real, origin = real_path(found), real_path(source)
    if real == origin:
        raise RefusedError(SAME, where=str(target), hint=elsewhere)
    if origin.is_dir() and real.is_relative_to(origin):
        raise RefusedError(
            "the destination is inside the source",
            where=str(target),
            why=f"ckptctl never writes into a source ({source})",
            hint=elsewhere,
        )
    if origin.is_relative_to(real):
        raise RefusedError(AROUND, where=str(target), hint=elsewhere)
    destinations.check_target(found, overwrite=overwrite, is_checkpoint=is_checkpoint)
    destinations.require_writable(found)
    return Destination(target, found)


def replaceable(path: TreePath) -> bool:
    """Return whether *path* is a checkpoint and holds nothing else of its owner's.

    A directory must look like one of the formats, and hold its files, files of the kinds that
    travel with a model, what its manifest says was carried along, and what programs note of them,
    nothing else: a project with one stray weight file in it is no checkpoint. A file must be named
    as checkpoints are, or be readable as one: documents are zip files, too. Damaged ones may be
    replaced, and what ranks saved without the metadata that comes last.
    """
    sniffed = formats.sniff(path)
    if not sniffed and not formats.interrupted(path):
        return False
    parts = (formats.get(name).only_part(path) for name in sniffed)
    if inner := next(filter(None, parts), None):
        return replaceable(inner)
    if not path.is_dir():
        return path.suffix in WEIGHTS or _readable(path)
    assets, others = _beside(path)
    ours = [name for name, size in carried(path).items() if _has(path / name, size)]
    folders = {name.partition("/")[0] for name in (*assets, *ours)}
    if any(item.is_dir() and item.name not in folders for item in path.iterdir()):
        return False
    others = [name for name in _files(path, others) if name not in ours]
    if others:
        raise RefusedError(
            "the destination contains more than a checkpoint",
            where=str(path),
            why=f"{listed(others)} would be lost",
            hint="move these files away, or choose another destination",
        )
    return True


def _beside(path: TreePath) -> tuple[Collection[str], list[str]]:
    """Return what in a folder travels with its checkpoint, and what is neither that nor part of it.

    Of one that cannot be read, names tell what is part of it.
    """
    try:
        found = formats.open_checkpoint(path, asked=ReadOptions(partial=True), manifest=False)
    except CkptError:
        known = beside(path, documented=False)
        return known.assets, natural(known.others)
    return found.assets, natural(found.others)


def _files(path: TreePath, names: Iterable[str]) -> Iterator[str]:
    """Yield *names*, and of folders among them what is in there."""
    for name in names:
        inside = (path / name).rglob("*") if name.endswith("/") else ()
        yield from (str(item.relative_to(path)) for item in inside if not item.is_dir())
        if not name.endswith("/"):
            yield name


def _has(file: TreePath, size: int) -> bool:
    return not file.is_symlink() and file.is_file() and file.stat().st_size == size


def _readable(path: TreePath) -> bool:
    try:
        return bool(formats.open_checkpoint(path).tensors)
    except CkptError:
        return False
