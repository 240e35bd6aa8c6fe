"""Files of a run, opened by name for each thread, and its output files."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from ckptctl.catalog import Computed
from ckptctl.errors import StorageError, storage_errors
from ckptctl.planner.copying.blocks import MIB
from ckptctl.planner.copying.tile import Write
from ckptctl.planner.plan import OutputFile
from ckptctl.storage import trash
from ckptctl.storage.byte_files import ByteSink, ByteSource
from ckptctl.storage.computed import OpenFiles, StoredFile
from ckptctl.storage.crc import crc32
from ckptctl.storage.file_system import sync_directory
from ckptctl.storage.files import SourceFiles, after
from ckptctl.storage.page_cache import PAGE, cold, past_cache
from ckptctl.storage.paths import contained
from ckptctl.tree import TreePath
from ckptctl.units import counted

MAX_OPEN = 64
"""Open files, each with one descriptor, or two if it is also read with direct I/O."""
ITEM = 16
"""Direct reads end at a multiple of the largest element size."""
LocalFile = TypeVar("LocalFile", "LocalSource", "LocalSink")


class RunFiles(OpenFiles):
    """Memory, virtual files, stored files and output files of one thread.

    The most recently used files with descriptors stay open.

    Args:
        computed: Virtual files of the plan.
        roots: Returns the source files of a directory.
        root: Directory of the output files.
        memory: Memory of the plan, by name.
        direct: Whether to read long ranges of uncached files with direct I/O.
    """

    def __init__(
        self,
        computed: Mapping[str, Computed],
        roots: Callable[[TreePath], SourceFiles],
        root: Path,
        memory: Mapping[str, ByteSource | ByteSink],
        *,
        direct: bool = False,
    ) -> None:
        super().__init__(computed, roots)
        self._root = root
        self._memory = memory
        self._direct = direct
        # Sinks have no source files.
        self._open: OrderedDict[tuple[SourceFiles | None, str], LocalSource | LocalSink]
        self._open = OrderedDict()

    def source(self, files: SourceFiles, name: str) -> ByteSource:
        """Open *name* as memory, a virtual file or one of *files*.

        Files with descriptors are closed after ``MAX_OPEN`` others have been opened, so the result
        is for immediate use.
        """
        found = self._memory.get(name) or self._used(files, name)
        if found is None:
            if not files.local or name in self._computed:
                return super().source(files, name)
            found = self._keep(files, LocalSource(self, files, name, direct=self._direct))
        assert isinstance(found, ByteSource)
        return found

    def sink(self, name: str) -> ByteSink:
        """Open *name* as memory or an output file (see :meth:`source`)."""
        found = self._memory.get(name) or self._used(None, name)
        if found is None:
            found = self._keep(None, LocalSink(self._root, name))
        assert isinstance(found, ByteSink)
        return found

    def close(self) -> None:
        """Close all files, and release memory.

        Virtual files refer to this object, which would delay freeing the tensors of both.
        """
        self._memory = {}
        self._virtual.clear()
        with ExitStack() as stack:
            for file in self._open.values():
                stack.callback(file.close)
            self._open.clear()

    def _used(self, files: SourceFiles | None, name: str) -> LocalSource | LocalSink | None:
        """Return an open file and mark it as most recently used, or return None."""
        key = files, name
        found = self._open.get(key)
        if found is not None:
            self._open.move_to_end(key)
        return found

    def _keep(self, files: SourceFiles | None, file: LocalFile) -> LocalFile:
        while len(self._open) >= MAX_OPEN:
            self._open.popitem(last=False)[1].close()
        self._open[files, file.name] = file
        return file


class LocalSource(StoredFile):
    """Local source file with a separate descriptor for this thread.

    Args:
        opened: Counts the bytes read.
        files: Source files that contain it.
        name: Name relative to their root.
        direct: Whether direct I/O is allowed.
    """

    def __init__(self, opened: OpenFiles, files: SourceFiles, name: str, *, direct: bool) -> None:
        super().__init__(opened, files, name)
        self.descriptor: int = files.descriptor(name)
        self._direct: int | None = None
        self._unseen = direct  # whether the page cache is still to be checked

    def read_into(self, offset: int, views: Sequence[memoryview], nbytes: int) -> None:
        """See :meth:`ByteSource.read_into`."""
        self._opened.bytes_read += nbytes
        try:
            count = os.preadv(self.descriptor, views, offset)
        except OSError as error:
            raise self._failed(error) from error
        if count != nbytes:
            self._files.readv(self.name, after(views, count), offset + count)

    @property
    def past_cache(self) -> bool:
        """See :meth:`ByteSource.past_cache`. True unless the page cache has the file."""
        if self._unseen:
            self._unseen = False
            if cold(self.descriptor):
                self._direct = past_cache(self._files.descriptor(self.name))
        return self._direct is not None

    def read_past_cache(self, offset: int, nbytes: int, room: memoryview) -> memoryview | None:
        """See :meth:`ByteSource.read_past_cache`. After a failure, direct I/O is disabled."""
        if self._direct is None:
            return None
        before = offset % PAGE
        most = len(room) // PAGE * PAGE - before
        end = before + min(nbytes, most // ITEM * ITEM)
        view = room[: -(-end // PAGE) * PAGE]
        with suppress(OSError):  # a read through the page cache succeeds or raises
            if os.preadv(self._direct, (view,), offset - before) >= end:
                self._opened.bytes_read += end - before
                return view[before:end]
        os.close(self._direct)
        self._direct = None
        return None

    def close(self) -> None:
        """Close its descriptors."""
        with storage_errors("close", self._files.root / self.name):
            if self._direct is not None:
                os.close(self._direct)
            os.close(self.descriptor)

    def _failed(self, error: OSError) -> StorageError:
        return StorageError.from_os_error(error, "read", str(self._files.root / self.name))


class LocalSink(ByteSink):
    """Existing output file opened for writing."""

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
        """Sync the file."""
        with storage_errors("sync", self._path):
            os.fsync(self.descriptor)

    def close(self) -> None:
        """Close the file, which may report lost writes on NFS."""
        with storage_errors("close", self._path):
            os.close(self.descriptor)


def _write_failed(error: OSError, path: Path) -> StorageError:
    """Build the error for a failed write to *path*."""
    failure = StorageError.from_os_error(error, "write", str(path))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        found = os.statvfs(path.parent)
        free = found.f_bavail * found.f_frsize
        failure.why = f"only {counted(free, 'byte is', 'bytes are')} free"
        failure.hint = "free some space or choose another destination"
    return failure


class OutputFiles:
    """Output files of a plan."""

    def __init__(
        self, files: Sequence[OutputFile], root: Path, *, shared: bool, sync: bool
    ) -> None:
        self._files = files
        self._root = root
        self._shared = shared
        self._sync = sync

    def intact(self) -> bool:
        """Return whether all output files exist at their full size."""
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
        """Compute the CRC-32 of the bytes on disk that *write* wrote."""
        crc = 0
        with (self._root / write.file).open("rb") as file:
            for at in range(0, write.nbytes, MIB):
                size = min(MIB, write.nbytes - at)
                crc = crc32(os.pread(file.fileno(), size, write.offset + at), crc)
        return crc
