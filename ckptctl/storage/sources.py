"""Source files of a plan, and checks that they have not changed since the plan was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from typing import TYPE_CHECKING

from ckptctl.catalog import list_input_files
from ckptctl.errors import ChangedError, CkptError, SourceNotFoundError, wrap_os_errors
from ckptctl.file_identity import FileIdentity
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

if TYPE_CHECKING:
    from ckptctl.planner.plan import Plan


class Sources:
    """Source directories of a plan, which stay open while the plan is executed."""

    def __init__(self, plan: Plan, stack: ExitStack) -> None:
        self._plan = plan
        roots = {plan.source_root}
        roots |= {raw.root or plan.source_root for raw in plan.raw_copies}
        roots |= {root for root, _ in list_input_files(plan.computed)}
        roots |= {root for root, _ in plan.inputs} | {check.root for check in plan.checks}
        self._open = {root: stack.enter_context(source_files(root)) for root in roots}
        self._identities = {
            (plan.source_root, name): identity for name, identity in plan.sources.items()
        }
        self._identities |= plan.inputs

    def get_files(self, root: TreePath) -> SourceFiles:
        """Return the open files below the source directory *root*."""
        return self._open[root]

    def list_identities(self) -> list[tuple[object, ...]]:
        """List names and identities of the source files for the header of the journal.

        Directories and device numbers are omitted, because a network file system has a different
        device number on each machine and mount.
        """
        return sorted(
            (name, *astuple(identity)[:-1]) for (_, name), identity in self._identities.items()
        )

    def require_unchanged(self) -> None:
        """Raise `ChangedError` if a source file has changed since the plan was made."""
        require_same_file(self._plan.opened)
        sizes = {file.path: file.size for file in self._plan.files}
        for files in self._open.values():
            files.drop_metadata()
        for raw in self._plan.raw_copies:
            key = (raw.root or self._plan.source_root, raw.source)
            if key in self._identities:
                continue
            current = self._identities[key] = self._read_identity(*key)
            is_complete = raw.offset == raw.target_offset == 0 and raw.nbytes == sizes[raw.target]
            if is_complete and current.size != raw.nbytes:
                raise ChangedError(
                    *key, f"it had {pluralize(raw.nbytes, 'byte')} and now has {current.size:,}"
                )
        for (root, name), identity in self._identities.items():
            _require_same_identity(self._open[root], name, identity)

    def _read_identity(self, root: TreePath, name: str) -> FileIdentity:
        return _read_current_identity(self._open[root], name)


def require_same_files(root: TreePath, identities: Mapping[str, FileIdentity]) -> None:
    """Raise `ChangedError` if a file below *root* has no longer the identity in *identities*."""
    with source_files(root) as files:
        files.drop_metadata()
        for name, identity in identities.items():
            _require_same_identity(files, name, identity)


def _require_same_identity(files: SourceFiles, name: str, identity: FileIdentity) -> None:
    current = _read_current_identity(files, name)
    if current != identity:
        raise ChangedError(files.root, name, _describe_difference(identity, current))


def _read_current_identity(files: SourceFiles, name: str) -> FileIdentity:
    # Use the path instead of the open descriptor, to detect replaced files.
    try:
        status = files.path(name).stat()
    except (SourceNotFoundError, FileNotFoundError):
        raise ChangedError(files.root, name, "it was deleted") from None
    return FileIdentity.from_stat(status)


def read_identity(path: TreePath) -> FileIdentity:
    """Return size, times and inode of the file or folder at *path*, to detect changes."""
    with wrap_os_errors("access", path):
        return FileIdentity.from_stat(path.stat())


def require_same_file(opened: tuple[TreePath, FileIdentity] | None) -> None:
    """Raise `ChangedError` if another file has replaced the file that was opened.

    *opened* contains path and identity of the file. Nothing is checked if it is None.
    """
    if opened is None:
        return
    path, original = opened
    try:
        if original.is_same_inode(FileIdentity.from_stat(path.stat())):
            return
    except FileNotFoundError:
        pass
    except (OSError, CkptError):
        return  # an inaccessible file is no evidence of a change
    raise ChangedError(path.parent, path.name, "another file has replaced it")


@contextmanager
def raise_changed_if(check: Callable[[], None]) -> Iterator[None]:
    """If the block raises `CkptError`, call *check*, which may raise `ChangedError` instead."""
    try:
        yield
    except CkptError:
        check()
        raise


def _describe_difference(was: FileIdentity, now: FileIdentity) -> str:
    if was.size != now.size:
        return f"it had {pluralize(was.size, 'byte')} and now has {now.size:,}"
    if not was.is_same_inode(now):
        return "another file has replaced it"
    return "its content, time, mode, owner or links changed"
