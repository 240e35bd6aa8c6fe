"""The one atomic step in which a finished output appears under its final name.

Work happens in a sibling directory of one fixed name, ``.NAME.ckptctl-staging``::

    lock       held (flock) by the process at work; contains its pid
    journal    what is durably written (see journal.py)
    data/      the output: the directory to be published, or the directory of the one file

Killed at any point, a run leaves the destination as it was or complete, and at most that directory
beside it, which the next run for the same destination uses or removes.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from ckptctl.errors import CkptError, RefusedError, StorageError, UsageError
from ckptctl.storage import lock, rename, trash
from ckptctl.storage.sync import sync_directory
from ckptctl.storage.urls import SCHEME, is_url, masked

Recognise = Callable[[Path], bool]


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; handled like Ctrl-C."""


class Staging:
    """The place where one output is made.

    Attributes:
        target: Absolute destination.
        data: Directory of the output files.
        journal: Path of the journal.
        notes: What the user should know about the way it was published.
    """

    def __init__(
        self, target: Path, *, overwrite: bool, single_file: bool, is_checkpoint: Recognise
    ) -> None:
        self.target = target
        self.root = staging_directory(target)
        self.data = self.root / "data"
        self.journal = self.root / "journal"
        self.notes: list[str] = []
        self.published = False
        self._replaced = False
        self._identity = (0, 0)
        self._overwrite = overwrite
        self._finished = self.data / target.name if single_file else self.data
        self._is_checkpoint = is_checkpoint

    def held(self) -> int:
        """Return the bytes on disk that are already taken by the staged output."""
        return sum(
            entry.lstat().st_blocks * 512 for entry in self.data.rglob("*") if entry.is_file()
        )

    def publish(self) -> list[str]:
        """Give the output its final name; its files and directories are synced already.

        Returns:
            Notes for the user on how it was published, if there is anything to say.

        Raises:
            RefusedError: Something is there, or appeared meanwhile.
            StorageError: The system failed the rename or a sync.
        """
        check_target(self.target, overwrite=self._overwrite, is_checkpoint=self._is_checkpoint)
        try:
            # After an exchange `data` is the old output: no journal may vouch for it.
            self.journal.unlink(missing_ok=True)
            sync_directory(self.root)
            self._rename()
            self.published = True
            sync_directory(self.target.parent)
            sync_directory(self.root)
        except OSError as error:
            raise StorageError.from_os_error(error, "publish", str(self.target)) from error
        return self.notes

    def revert(self) -> str:
        """Take the published output back; it is removed with the staging directory.

        Returns:
            What was done, for the user.

        Raises:
            RefusedError: Something else has been put in its place; nothing is touched.
            StorageError: The system failed the rename or a sync.
        """
        try:
            if _inode(self.target) != self._identity:
                raise RefusedError("the output was replaced meanwhile", where=str(self.target))
            if self._replaced:
                rename.rename(self.target, self._finished, rename.EXCHANGE)
            else:
                self.target.rename(self._finished)
            sync_directory(self.target.parent)
            sync_directory(self._finished.parent)
        except OSError as error:
            raise StorageError.from_os_error(error, "take back", str(self.target)) from error
        return "what was there before is back" if self._replaced else "the output was removed"

    def _rename(self) -> None:
        self._identity = _inode(self._finished)
        exists = self._overwrite and os.path.lexists(self.target)
        if exists:
            check_target(self.target, overwrite=True, is_checkpoint=self._is_checkpoint)
        flags = rename.EXCHANGE if exists else rename.NOREPLACE
        try:
            rename.rename(self._finished, self.target, flags)
            self._replaced = exists
        except FileExistsError:
            raise _exists(self.target) from None
        except rename.UnsupportedRenameError:
            if exists:
                raise RefusedError(
                    "this file system cannot replace a checkpoint in one step",
                    where=str(self.target),
                    hint="remove the old one first, or choose another destination",
                ) from None
            if os.path.lexists(self.target):
                raise _exists(self.target) from None
            self._finished.rename(self.target)
            self.notes.append(
                "the file system lacks renameat2; the output was published by a check and a rename"
            )


@contextmanager
def staging(
    target: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    keep_on_error: bool = False,
    single_file: bool = False,
    is_checkpoint: Recognise = lambda _: False,
) -> Iterator[Staging]:
    """Make room beside *target* to build it in, and clean up afterwards.

    Args:
        target: The destination. Its parent directories are made.
        overwrite: Whether to replace what is there.
        resume: Whether to keep what an earlier, unfinished run staged.
        keep_on_error: Whether to leave the staged files after an error, for *resume*.
        single_file: Whether the output is the one file ``data/NAME`` instead of ``data``.
        is_checkpoint: Whether a path is something that may be overwritten.

    Raises:
        RefusedError: *target* exists, is a symbolic link, is no name for an output, or another
            process is at work on it.
        StorageError: A directory cannot be made.
    """
    target = destination(target)
    found = Staging(
        target, overwrite=overwrite, single_file=single_file, is_checkpoint=is_checkpoint
    )
    try:
        check_target(target, overwrite=overwrite, is_checkpoint=is_checkpoint)
    except RefusedError:
        _sweep(found)
        raise
    with ExitStack() as stack:
        _make_parents(target.parent)
        stack.enter_context(_locked(found))
        keep = False
        try:
            stack.enter_context(terminable())
            _prepare(found, resume=resume)
            yield found
        except BaseException:
            keep = keep_on_error and not found.published
            raise
        finally:
            if not keep:
                _discard(found)


def destination(target: Path) -> Path:
    """Return *target* as an absolute path whose parents are resolved and whose name is not.

    Raises:
        RefusedError: It has no name of its own (``/``, ``.``, ``..``).
        UsageError: It was meant as a URL.
    """
    require_path(target)
    if target.name in ("", ".", ".."):
        raise RefusedError(
            "the destination needs a name of its own",
            where=str(target),
            hint="give the path of a directory that does not exist yet",
        )
    return target.parent.resolve() / target.name


def require_path(path: str | os.PathLike[str]) -> None:
    """Refuse a URL, and what was one: ``Path("s3://a")`` is ``s3:/a``, a folder of this machine.

    Raises:
        UsageError: It is a URL, or has a folder with a scheme as its name that does not exist.
    """
    if is_url(path):
        raise UsageError("a URL is not taken here", where=masked(str(path)), hint="name a path")
    for folder in Path(path).parents:
        if SCHEME.match(f"{folder.name}//") and not folder.is_dir():
            raise UsageError(
                "this looks like a URL, and is a path",
                where=str(path),
                why=f"there is no folder `{folder.name}`",
                hint="only checkpoints go to URLs, which have `://`; in Python they are text",
            )


def staging_directory(target: Path) -> Path:
    """Return where the output for *target* is staged."""
    return target.parent / f".{target.name}.ckptctl-staging"


def check_target(target: Path, *, overwrite: bool, is_checkpoint: Recognise) -> None:
    """Refuse a destination that must not be touched.

    Raises:
        RefusedError: It exists without *overwrite*, is a symbolic link, or is not a checkpoint.
    """
    if target.is_symlink():
        raise RefusedError(
            "the destination is a symbolic link", where=str(target), hint="name what it points to"
        )
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise _exists(target)
    empty = target.is_dir() and not any(target.iterdir())
    if not empty and not is_checkpoint(target):
        raise RefusedError(
            "the destination is not a checkpoint, so it is not overwritten",
            where=str(target),
            hint="remove it yourself, or choose another destination",
        )


def require_writable(target: Path) -> None:
    """Refuse a destination where nothing can be made, before anything is read for it.

    Args:
        target: The destination, absolute; directories above it may be missing.

    Raises:
        StorageError: What is there above it is no directory, or may not be written to.
    """
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
    raise StorageError.from_os_error(error, f"make `{target.name}`", str(parent))


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system that *path* is, or will be, on.

    Raises:
        StorageError: The system does not say.
    """
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        found = os.statvfs(path)
    except OSError as error:
        raise StorageError.from_os_error(error, "look at", str(path)) from error
    return found.f_bavail * found.f_frsize


def free_space(path: Path, needed: int, held: int = 0) -> None:
    """Refuse a run that cannot fit.

    Args:
        path: Where it will write; need not exist.
        needed: Bytes of the output.
        held: Bytes of it that are on disk already.

    Raises:
        RefusedError: The file system has less room.
    """
    free = free_bytes(path)
    if free < needed - held:
        raise RefusedError(
            "there is not enough space for the output",
            where=str(path),
            why=f"{needed - held:,} bytes are needed, {free:,} are free",
        )


def _inode(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _exists(target: Path) -> RefusedError:
    return RefusedError(
        "the destination exists",
        where=str(target),
        hint="choose another one, or pass --overwrite to replace a checkpoint",
    )


def _make_parents(parent: Path) -> None:
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    try:
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            sync_directory(path.parent)
    except OSError as error:
        raise StorageError.from_os_error(error, "make", str(parent)) from error


def _locked(found: Staging) -> AbstractContextManager[None]:
    """Hold the lock of the staging directory, which is made if need be."""
    return lock.held(found.root, found.target, "writing this destination")


def _prepare(found: Staging, *, resume: bool) -> None:
    if not resume or found.data.is_symlink() or not found.data.is_dir():
        trash.remove(found.journal)
        trash.remove(found.data)
    try:
        found.data.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError.from_os_error(error, "make", str(found.data)) from error


def _discard(found: Staging) -> None:
    """Remove the staging directory; after a success, a failure to do so is only noted."""
    try:
        trash.remove(found.journal)
        trash.remove(found.data)
        trash.remove(found.root)
    except CkptError as error:
        if not found.published:
            raise
        found.notes.append(f"{found.root} could not be removed: {error.what}")


def _sweep(found: Staging) -> None:
    """Remove what a run left that was killed after it had published."""
    if found.root.is_symlink() or not found.root.is_dir() or found.journal.exists():
        return
    with suppress(CkptError), _locked(found):
        if not found.journal.exists():
            _discard(found)


@contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, unless somebody else handles it."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
