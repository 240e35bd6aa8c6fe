"""The files that a plan writes: made at their full size, looked at again, made durable."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from ckptctl.errors import StorageError, storage_errors
from ckptctl.planner.copying.blocks import MIB
from ckptctl.planner.copying.tile import Write
from ckptctl.planner.plan import OutputFile
from ckptctl.storage import trash
from ckptctl.storage.byte_files import ByteSink
from ckptctl.storage.crc import crc32
from ckptctl.storage.file_system import sync_directory
from ckptctl.storage.paths import contained
from ckptctl.units import counted


class LocalSink(ByteSink):
    """An output file that exists."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self._path = root / name
        with storage_errors("open", self._path):
            flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            self.descriptor: int = os.open(self._path, flags)

    def write(self, offset: int, view: memoryview) -> None:
        """See :meth:`ByteSink.write`."""
        try:
            done = os.pwrite(self.descriptor, view, offset)
            while done < len(view):
                count = os.pwrite(self.descriptor, view[done:], offset + done)
                if not count:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                done += count
        except OSError as error:
            raise _write_failed(error, self._path) from error

    def sync(self) -> None:
        """Have the disk hold what is written."""
        with storage_errors("sync", self._path):
            os.fsync(self.descriptor)

    def close(self) -> None:
        """Close the file; over NFS this may be what says that written bytes are lost."""
        with storage_errors("close", self._path):
            os.close(self.descriptor)


def _write_failed(error: OSError, path: Path) -> StorageError:
    """Return the error of a failed write to *path*."""
    failure = StorageError.from_os_error(error, "write", str(path))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        found = os.statvfs(path.parent)
        free = found.f_bavail * found.f_frsize
        failure.why = f"only {counted(free, 'byte is', 'bytes are')} free"
        failure.hint = "free some space or choose another destination"
    return failure


class OutputFiles:
    """The output files of a plan."""

    def __init__(
        self, files: Sequence[OutputFile], root: Path, *, shared: bool, sync: bool
    ) -> None:
        self._files = files
        self._root = root
        self._shared = shared
        self._sync = sync

    def intact(self) -> bool:
        """Return whether the output files are there, at their full size."""
        return all(
            path.is_file() and not path.is_symlink() and path.stat().st_size == file.size
            for file in self._files
            for path in (self._root / file.path,)
        )

    def create(self) -> None:
        """Create the output files at their full size."""
        if self._files and not self._shared:
            trash.clear(self._root)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        for file in self._files:
            path = self._root / contained(file.path, str(self._root))
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, flags, 0o666)
                try:
                    os.ftruncate(descriptor, file.size)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise _write_failed(error, path) from error

    def sync_directories(self) -> None:
        """Sync every directory that holds an output file."""
        if not self._files or not self._sync:
            return
        found = {self._root}
        for file in self._files:
            found.update(self._root / parent for parent in Path(file.path).parents)
        for directory in sorted(found, reverse=True):
            sync_directory(directory)

    def crc(self, write: Write) -> int:
        """Return the CRC-32 of the bytes on disk at the place of *write*."""
        crc = 0
        with (self._root / write.file).open("rb") as file:
            for at in range(0, write.nbytes, MIB):
                size = min(MIB, write.nbytes - at)
                crc = crc32(os.pread(file.fileno(), size, write.offset + at), crc)
        return crc
