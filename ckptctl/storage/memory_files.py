"""Bytes in memory, read as a file of a checkpoint is."""

from __future__ import annotations

from pathlib import Path

from ckptctl.errors import DamagedError
from ckptctl.storage.files import SourceFiles


class MemoryFiles(SourceFiles):
    """One file, whatever its name.

    Args:
        content: All of it.
        root: Where it comes from, for errors.
    """

    def __init__(self, content: bytes, root: Path) -> None:
        self.root = root
        self.local = False
        self._content = content

    def close(self) -> None:
        """There is nothing to let go of."""

    def size(self, name: str) -> int:  # noqa: ARG002
        """Return the number of bytes."""
        return len(self._content)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:  # noqa: ARG002
        """Return exactly *nbytes* bytes from *offset*.

        Raises:
            DamagedError: There are not so many.
        """
        found = self._content[offset : offset + nbytes]
        if offset < 0 or len(found) != nbytes:
            raise DamagedError(
                "it is truncated",
                where=str(self.root),
                why=f"bytes {offset:,} to {offset + nbytes:,} are needed, "
                f"there are {len(self._content):,}",
            )
        return found
