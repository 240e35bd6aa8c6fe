"""Destination of an output, and checks that it is free or may be overwritten."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptctl import formats
from ckptctl.errors import CkptError, RefusedError, UsageError, format_option, quote_names
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.checksums import read_carried_file_sizes
from ckptctl.formats.sidecar_files import WEIGHT_SUFFIXES, scan_sidecar_files
from ckptctl.storage import destinations
from ckptctl.storage.paths import expand_home, resolve_links
from ckptctl.storage.urls import is_url
from ckptctl.tree import TreePath
from ckptctl.units import sort_naturally

SAME_PATH_MESSAGE = "source and destination are the same"
SOURCE_INSIDE_MESSAGE = "the source is inside the destination"
OTHER_PATH_HINT = "choose a new path next to the source or elsewhere"


@dataclass(frozen=True, slots=True)
class Destination:
    """Destination of an output.

    Attributes:
        typed_path: Path or URL as typed by the user.
        path: Absolute path, or URL.
        is_upload: Whether *path* is a URL.
    """

    typed_path: TreePath
    path: TreePath
    is_upload: bool = False

    def count_free_bytes(self) -> int:
        """Return the free bytes at the destination, or in the temporary directory for an upload."""
        return destinations.count_free_bytes(
            Path(tempfile.gettempdir() if self.is_upload else self.path)
        )


def require_destination(
    source: TreePath,
    target: TreePath,
    overwrite: bool,
    is_checkpoint: Callable[[TreePath], bool],
    hint: str = OTHER_PATH_HINT,
) -> Destination:
    """Check that an output may be created at *target*, and return the destination.

    Args:
        source: Path of the source checkpoint, which the destination must not overlap.
        target: Path or URL as typed by the user.
        overwrite: Whether an existing checkpoint may be replaced.
        is_checkpoint: Function that checks if an existing path may be replaced.
        hint: Hint of the error if the destination overlaps the source.
    """
    if is_url(target):
        # The URL is only accessed when the run begins.
        if source == target or source in target.parents or target in source.parents:
            raise RefusedError("source and destination overlap", where=str(target))
        if not target.name or len(target.parts) < 2:
            raise RefusedError("the destination must have a name", where=str(target))
        return Destination(target, target, is_upload=True)
    destinations.require_local_path(target)
    destination = destinations.resolve_destination(expand_home(Path(target)).absolute())
    resolved_target, resolved_source = resolve_links(destination), resolve_links(source)
    if resolved_target == resolved_source:
        raise RefusedError(SAME_PATH_MESSAGE, where=str(target), hint=hint)
    if resolved_source.is_dir() and resolved_target.is_relative_to(resolved_source):
        raise RefusedError(
            "the destination is inside the source",
            where=str(target),
            why=f"ckptctl never writes into a source ({source})",
            hint=hint,
        )
    if resolved_source.is_relative_to(resolved_target):
        raise RefusedError(SOURCE_INSIDE_MESSAGE, where=str(target), hint=hint)
    destinations.check_target(destination, overwrite=overwrite, is_checkpoint=is_checkpoint)
    destinations.require_writable(destination)
    return Destination(target, destination)


def require_writable_format(source: str | TreePath, from_format: str | None) -> str:
    """Return the name of the format of *source*, or raise if it cannot be written.

    Args:
        source: The checkpoint.
        from_format: Name of its format, or None to detect it.
    """
    source_format = (
        formats.get_format(from_format) if from_format else formats.detect_format(source)
    )
    if source_format.name not in formats.list_writable_names():
        raise UsageError(
            f"format `{source_format.name}` can only be read",
            hint=f"choose an output format with {format_option('--to')}",
        )
    return source_format.name


def is_replaceable(path: TreePath) -> bool:
    """Check if *path* is a checkpoint that contains no unrelated files, so it may be replaced.

    A directory must match a format and contain only the files of that format, known sidecar files,
    files that its manifest lists as copied, and notes of other programs. A project folder with a
    single weight file is not a checkpoint. A file must have the suffix of a checkpoint or be
    readable as a checkpoint, because office documents are zip files, too. Damaged checkpoints and
    per-rank shards without metadata may be replaced.

    Raises:
        RefusedError: The checkpoint contains unrelated files.
    """
    sniffed = formats.sniff_formats(path)
    if not sniffed and not formats.find_interrupted_format(path):
        return False
    parts = (formats.get_format(name).find_inner_checkpoint(path) for name in sniffed)
    if inner := next(filter(None, parts), None):
        return is_replaceable(inner)
    if not path.is_dir():
        return path.suffix in WEIGHT_SUFFIXES or _is_readable(path)
    assets, other_names = _list_sidecar_names(path)
    recorded_names = [
        name
        for name, size in read_carried_file_sizes(path).items()
        if _is_file_of_size(path / name, size)
    ]
    folders = {name.partition("/")[0] for name in (*assets, *recorded_names)}
    if any(item.is_dir() and item.name not in folders for item in path.iterdir()):
        return False
    other_names = [name for name in _iterate_files(path, other_names) if name not in recorded_names]
    if other_names:
        raise RefusedError(
            "the destination contains more than a checkpoint",
            where=str(path),
            why=f"{quote_names(other_names)} would be lost",
            hint="move these files away, or choose another destination",
        )
    return True


def _list_sidecar_names(path: TreePath) -> tuple[Collection[str], list[str]]:
    """Return the names of the sidecar files and of the unrelated files in a folder.

    If the checkpoint cannot be read, its files are recognized by their names.
    """
    try:
        catalog = formats.open_checkpoint(path, options=ReadOptions(partial=True), manifest=False)
    except CkptError:
        sidecars = scan_sidecar_files(path, read_configs=False)
        return sidecars.assets, sort_naturally(sidecars.others)
    return catalog.assets, sort_naturally(catalog.others)


def _iterate_files(path: TreePath, names: Iterable[str]) -> Iterator[str]:
    """Yield the files among *names*, and all files in the folders among *names*."""
    for name in names:
        items = (path / name).rglob("*") if name.endswith("/") else ()
        yield from (str(item.relative_to(path)) for item in items if not item.is_dir())
        if not name.endswith("/"):
            yield name


def _is_file_of_size(file: TreePath, size: int) -> bool:
    return not file.is_symlink() and file.is_file() and file.stat().st_size == size


def _is_readable(path: TreePath) -> bool:
    try:
        return bool(formats.open_checkpoint(path).tensors)
    except CkptError:
        return False
