"""Destinations of outputs: preflight checks, and what ``--overwrite`` may replace."""

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
from ckptctl.storage.paths import expand_home, resolve_links
from ckptctl.storage.urls import is_url
from ckptctl.tree import TreePath
from ckptctl.units import natural

SAME = "source and destination are the same"
AROUND = "the source is inside the destination"
ELSEWHERE = "choose a new path next to the source or elsewhere"


@dataclass(frozen=True, slots=True)
class Destination:
    """Destination of an output, which is an absolute path or a URL.

    Attributes:
        given: Path as typed by the user.
    """

    given: TreePath
    path: TreePath
    upload: bool = False

    def free_bytes(self) -> int:
        """Return the free bytes of the file system that is written to, even for an upload."""
        return destinations.count_free_bytes(
            Path(tempfile.gettempdir() if self.upload else self.path)
        )


def require_destination(
    source: TreePath,
    target: TreePath,
    overwrite: bool,
    is_checkpoint: Callable[[TreePath], bool],
    elsewhere: str = ELSEWHERE,
) -> Destination:
    """Check that an output may be created at *target*, and return it.

    *elsewhere* is the hint if the destination overlaps the source.
    """
    if is_url(target):
        # The URL is only accessed when the run begins.
        if source == target or source in target.parents or target in source.parents:
            raise RefusedError("source and destination overlap", where=str(target))
        if not target.name or len(target.parts) < 2:
            raise RefusedError("the destination must have a name", where=str(target))
        return Destination(target, target, upload=True)
    destinations.require_local_path(target)
    found = destinations.resolve_destination(expand_home(Path(target)).absolute())
    real, origin = resolve_links(found), resolve_links(source)
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
    """Check if *path* is a checkpoint without unrelated files.

    A directory must match a format and contain only the files of that format, known sidecar files,
    files that its manifest lists as copied, and notes of programs: a project with one stray weight
    file is not a checkpoint. A file must have a suffix of checkpoints or be readable as one,
    because documents are zip files as well. Damaged checkpoints may be replaced, and so may saves
    of ranks without metadata.

    Raises:
        RefusedError: The checkpoint contains unrelated files.
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
    """Return the names of sidecar files in a folder, and of unrelated files.

    If the checkpoint cannot be read, its files are recognized by their names.
    """
    try:
        found = formats.open_checkpoint(path, asked=ReadOptions(partial=True), manifest=False)
    except CkptError:
        known = beside(path, documented=False)
        return known.assets, natural(known.others)
    return found.assets, natural(found.others)


def _files(path: TreePath, names: Iterable[str]) -> Iterator[str]:
    """Yield *names*, with folders replaced by the files in them."""
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
