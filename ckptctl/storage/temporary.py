"""Bytes that take part in a run and lie in no file of a checkpoint."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckptctl.errors import StorageError
from ckptctl.file_identity import FileIdentity
from ckptctl.storage.files import IOV_MAX, SourceFiles, after


class TemporaryFile(SourceFiles):
    """One file without a name on the disk, which is gone with this object.

    *root* and *name* are those of what it was made of, for errors.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        self.nbytes = 0
        self._folder = tempfile.gettempdir()
        self._descriptor = -1
        try:
            with tempfile.TemporaryFile(prefix="ckptctl-") as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise self._unwritten(error) from error

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def append(self, pieces: Iterable[bytes]) -> None:
        """Write *pieces* behind what there is."""
        for piece in pieces:
            left = memoryview(piece)
            while left:
                try:
                    count = os.write(self._descriptor, left)
                except OSError as error:
                    raise self._unwritten(error) from error
                left = left[count:]
            self.nbytes += len(piece)

    def path(self, name: str) -> Path:
        """Return the path that it is shown under."""
        return self.root / name

    def identity(self, name: str) -> FileIdentity:  # noqa: ARG002
        """Return its size."""
        return FileIdentity(self.nbytes, 0, 0, 0, 0)

    def read_some(self, name: str, offset: int, nbytes: int) -> bytes:
        """See :meth:`~ckptctl.storage.files.SourceFiles.read_some`."""
        try:
            return os.pread(self._descriptor, nbytes, offset)
        except OSError as error:
            raise StorageError.from_os_error(error, "read", str(self.root / name)) from error

    def fill(self, name: str, views: Sequence[memoryview], offset: int) -> int:
        """See :meth:`~ckptctl.storage.files.SourceFiles.fill`."""
        done = 0
        left = [view for view in views if view]
        try:
            while left:
                count = os.preadv(self._descriptor, left[:IOV_MAX], offset + done)
                if not count:
                    break
                done += count
                left = after(left, count)
        except OSError as error:
            raise StorageError.from_os_error(error, "read", str(self.root / name)) from error
        return done

    def _unwritten(self, error: OSError) -> StorageError:
        found = StorageError.from_os_error(error, "write a temporary file", self._folder)
        found.why = f"the file buffers parts of {self.root / self.name}"
        found.hint = "set `TMPDIR` to another folder"
        return found
