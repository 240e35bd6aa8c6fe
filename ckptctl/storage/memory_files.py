"""Bytes in memory, read as a file of a checkpoint is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptctl.file_identity import FileIdentity
from ckptctl.storage.files import SourceFiles


class MemoryFiles(SourceFiles):
    """One file, whatever its name.

    Args:
        content: All of it.
        root: Where it comes from, for errors.
    """

    def __init__(self, content: bytes, root: Path) -> None:
        self.root = root
        self._content = content

    def path(self, name: str) -> Path:
        """Return where it comes from."""
        return self.root / name

    def identity(self, name: str) -> FileIdentity:  # noqa: ARG002
        """Return its size: it does not change."""
        return FileIdentity(len(self._content), 0, 0, 0, 0)

    def read_some(self, name: str, offset: int, nbytes: int) -> bytes:  # noqa: ARG002
        """See :meth:`~ckptctl.storage.files.SourceFiles.read_some`."""
        return self._content[offset : offset + nbytes]

    def fill(self, name: str, views: Sequence[memoryview], offset: int) -> int:
        """See :meth:`~ckptctl.storage.files.SourceFiles.fill`."""
        start = offset
        for view in views:
            part = self.read_some(name, offset, len(view))
            view[: len(part)] = part
            offset += len(part)
        return offset - start
