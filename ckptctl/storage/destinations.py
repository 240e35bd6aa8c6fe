"""Checks of a destination path before any output is written to it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptctl.errors import (
    RefusedError,
    StorageError,
    UsageError,
    format_option,
    quote_names,
    wrap_os_errors,
)
from ckptctl.storage.paths import require_local, resolve_links
from ckptctl.storage.urls import SCHEME, to_local_path
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

STAGING_SUFFIX = ".ckptctl-staging"
Recognize = Callable[[TreePath], bool]
"""Returns whether a path may be overwritten (see :class:`Replaceable`)."""


@dataclass(frozen=True, slots=True)
class Replaceable:
    """Kind of output that may be overwritten.

    Attributes:
        recognize: Returns whether a path is such an output.
        noun: Name of this kind of output in messages, with an article.
        is_file: Whether such an output is a file instead of a folder.
    """

    recognize: Recognize
    noun: str = "a checkpoint"
    is_file: bool = False

    def __call__(self, path: TreePath) -> bool:
        """Return whether *path* may be overwritten."""
        return self.recognize(path)


ANYTHING = Replaceable(lambda _: True)


def resolve_destination(target: Path) -> Path:
    """Return *target* as an absolute path, with symbolic links resolved in its parent only."""
    require_local_path(target)
    if target.name in ("", ".", ".."):
        raise RefusedError(
            "the destination has no name",
            where=str(target),
            hint="pass the path of a directory that does not exist yet",
        )
    return resolve_links(target.parent) / target.name


def require_local_path(path: str | os.PathLike[str]) -> None:
    """Raise if *path* is a URL, or a path that was constructed from a URL.

    For example, ``Path("s3://a")`` is the path ``s3:/a``.
    """
    require_local(path, "URLs are not supported here", hint="pass a path")
    for folder in Path(to_local_path(path)).parents:
        if SCHEME.match(f"{folder.name}//") and not folder.is_dir():
            raise UsageError(
                "this path looks like a URL",
                where=str(path),
                why=f"the folder `{folder.name}` does not exist",
                hint="pass a URL as a string, with `://`",
            )


def require_folder(path: Path) -> None:
    """Raise if *path* exists and is not a folder."""
    if path.exists() and not path.is_dir():
        raise UsageError("expected a folder, found a file", where=str(path))


def get_staging_directory(target: Path) -> Path:
    """Return the path of the staging directory for *target*."""
    return target.parent / f".{target.name}{STAGING_SUFFIX}"


def parse_staging_name(name: str) -> str:
    """Return the output name for which *name* is a staging directory, or an empty string."""
    return (
        name[1:].removesuffix(STAGING_SUFFIX)
        if name[0] == "." and name.endswith(STAGING_SUFFIX)
        else ""
    )


def check_target(target: Path, *, overwrite: bool, is_checkpoint: Recognize) -> None:
    """Raise if an output at *target* must not be replaced.

    *is_checkpoint* returns whether a path may be overwritten.
    """
    if target.is_symlink():
        raise RefusedError(
            "the destination is a symbolic link",
            where=str(target),
            hint="pass the path that it points to",
        )
    if not os.path.lexists(target):
        return
    replaceable = (
        is_checkpoint if isinstance(is_checkpoint, Replaceable) else Replaceable(is_checkpoint)
    )
    is_folder = target.is_dir()
    if is_folder and replaceable.is_file and not replaceable(target):
        raise RefusedError(
            "the destination is a folder, but the output is a file",
            where=str(target),
            hint="pass a file name in it, or choose another destination",
        )
    if is_empty_folder(target):
        _require_movable(target)
        return
    if not overwrite:
        raise destination_exists_error(target, replaceable)
    if not replaceable(target):
        raise RefusedError(
            f"the destination is not {replaceable.noun} and is not overwritten",
            where=str(target),
            why=f"it contains {quote_names(sorted(item.name for item in target.iterdir()))}"
            if is_folder
            else None,
            hint="move it away or choose another destination",
        )
    if is_folder:
        _require_movable(target)


def is_empty_folder(path: Path) -> bool:
    """Return whether *path* is an empty folder, which an output may replace, and not a link."""
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _require_movable(folder: Path) -> None:
    """Raise if a rename cannot replace *folder*, for example because it is a mount point."""
    from ckptctl.storage.file_system import list_mounts_in  # few destinations exist already

    if os.path.ismount(folder) or list_mounts_in(resolve_links(folder)):
        message = "the destination is a mount point"
    elif folder.samefile(os.curdir) and is_empty_folder(folder):
        message = "the destination is the working directory"
    else:
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            error = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            raise StorageError.from_os_error(error, "write to the destination", str(folder))
        return
    raise RefusedError(
        message,
        where=str(folder),
        why="the output is published in one step, as a new folder",
        hint=f"pass a folder in it, such as `{folder / 'converted'}`",
    )


def require_writable(target: Path) -> None:
    """Raise if *target* cannot be created, before time is spent on reading the source."""
    parent = target.parent
    while not os.path.lexists(parent) and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        code = errno.ENOTDIR
    elif not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        code = errno.EROFS if os.statvfs(parent).f_flag & os.ST_RDONLY else errno.EACCES
    else:
        return
    error = OSError(code, os.strerror(code))
    raise StorageError.from_os_error(error, f"create `{target.name}`", str(parent))


def count_free_bytes(path: Path) -> int:
    """Return the free bytes on the file system of *path*, which does not need to exist yet."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    with wrap_os_errors("access", path):
        status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def require_space(path: Path, needed: int, allocated: int = 0) -> None:
    """Raise unless the file system of *path* has free space for *needed* bytes of output.

    *allocated* bytes of the output are already on disk, so they need no more space.
    """
    free = count_free_bytes(path)
    if free < needed - allocated:
        raise RefusedError(
            "not enough disk space for the output",
            where=str(path),
            why=f"{pluralize(needed - allocated, 'byte')} needed, {free:,} free",
        )


def destination_exists_error(target: TreePath, kind: Replaceable = ANYTHING) -> RefusedError:
    """Build the error for an existing destination.

    Its hint mentions ``--overwrite``, which only replaces a destination of the given *kind*.
    """
    if kind(target):
        hint = (
            f"choose another destination, or pass {format_option('--overwrite')} to replace "
            f"{kind.noun}"
        )
    else:
        hint = (
            f"choose another destination; {format_option('--overwrite')} only replaces {kind.noun}"
        )
    return RefusedError("the destination exists", where=str(target), hint=hint)
