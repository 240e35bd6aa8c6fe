"""Files that a thread of a run opens by name, and the creation of output files."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from ckptctl.catalog import ComputedTensor
from ckptctl.errors import StorageError, wrap_os_errors
from ckptctl.planner.copying.blocks import MIB
from ckptctl.planner.copying.tile import Write
from ckptctl.planner.plan import OutputFile
from ckptctl.storage import trash
from ckptctl.storage.byte_files import ByteSink, ByteSource
from ckptctl.storage.compute_device import ComputeDevice
from ckptctl.storage.computed import OpenFiles, StoredFile
from ckptctl.storage.crc import crc32
from ckptctl.storage.file_system import sync_directory
from ckptctl.storage.files import SourceFiles, skip_bytes
from ckptctl.storage.page_cache import PAGE_BYTES, enable_direct_reads, is_mostly_uncached
from ckptctl.storage.paths import require_relative
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

MAX_OPEN_FILES = 64
"""Maximum number of open files, each of which has one or, with direct I/O, two descriptors."""
MAX_ITEM_BYTES = 16
"""Largest element size in bytes. The size of a direct read is a multiple of it."""
LocalFile = TypeVar("LocalFile", "LocalSource", "LocalSink")


class RunFiles(OpenFiles):
    """Memory, virtual files, stored files and output files of one thread.

    The most recently used files with descriptors stay open.

    Args:
        computed: Virtual files of the plan.
        open_root: Returns the source files of a directory.
        root: Directory of the output files.
        memory: Memory of the plan, by name.
        direct: Whether to read long ranges of uncached files with direct I/O.
        device: Device that computes elements, or None for the CPU.
    """

    def __init__(
        self,
        computed: Mapping[str, ComputedTensor],
        open_root: Callable[[TreePath], SourceFiles],
        root: Path,
        memory: Mapping[str, ByteSource | ByteSink],
        *,
        direct: bool = False,
        device: ComputeDevice | None = None,
    ) -> None:
        super().__init__(computed, open_root, device)
        self._root = root
        self._memory = memory
        self._direct = direct
        # Sinks have no source files.
        self._open: OrderedDict[tuple[SourceFiles | None, str], LocalSource | LocalSink]
        self._open = OrderedDict()

    def open_source(self, files: SourceFiles, name: str) -> ByteSource:
        """Open *name* as memory, a virtual file or one of *files*.

        Use the result immediately. It is closed when :data:`MAX_OPEN_FILES` other files have been
        opened.
        """
        file = self._memory.get(name) or self._find_open(files, name)
        if file is None:
            if not files.local or name in self._computed:
                return super().open_source(files, name)
            file = self._keep_open(files, LocalSource(self, files, name, direct=self._direct))
        assert isinstance(file, ByteSource)
        return file

    def open_sink(self, name: str) -> ByteSink:
        """Open *name* as memory or an output file (see :meth:`open_source`)."""
        file = self._memory.get(name) or self._find_open(None, name)
        if file is None:
            file = self._keep_open(None, LocalSink(self._root, name))
        assert isinstance(file, ByteSink)
        return file

    def close(self) -> None:
        """Close all files, and drop the references to virtual files.

        Virtual files and this object refer to each other. Otherwise, only the garbage collector
        would free their tensors.
        """
        self._memory = {}
        self._virtual.clear()
        with ExitStack() as stack:
            for file in self._open.values():
                stack.callback(file.close)
            self._open.clear()

    def _find_open(self, files: SourceFiles | None, name: str) -> LocalSource | LocalSink | None:
        """Return the open file *name* and mark it as most recently used, or None if it is not open.

        *files* contains a source file, and is None for an output file.
        """
        key = files, name
        file = self._open.get(key)
        if file is not None:
            self._open.move_to_end(key)
        return file

    def _keep_open(self, files: SourceFiles | None, file: LocalFile) -> LocalFile:
        while len(self._open) >= MAX_OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        self._open[files, file.name] = file
        return file


class LocalSource(StoredFile):
    """Local source file opened with a separate descriptor for this thread.

    Args:
        opened: Open files of this thread, which count the bytes read.
        files: Source files that contain the file.
        name: Name of the file relative to the root of *files*.
        direct: Whether direct I/O is allowed.
    """

    def __init__(self, opened: OpenFiles, files: SourceFiles, name: str, *, direct: bool) -> None:
        super().__init__(opened, files, name)
        self.descriptor: int = files.open_descriptor(name)
        self._direct_descriptor: int | None = None
        self._cache_unchecked = direct  # whether the page cache has not been checked yet

    def read_into(self, offset: int, views: Sequence[memoryview], nbytes: int) -> None:
        """See :meth:`ByteSource.read_into`."""
        self._opened.bytes_read += nbytes
        try:
            count = os.preadv(self.descriptor, views, offset)
        except OSError as error:
            raise self._read_error(error) from error
        if count != nbytes:
            self._files.readv(self.name, skip_bytes(views, count), offset + count)

    @property
    def should_bypass_cache(self) -> bool:
        """See :meth:`ByteSource.should_bypass_cache`. False if most of the file is cached."""
        if self._cache_unchecked:
            self._cache_unchecked = False
            if is_mostly_uncached(self.descriptor):
                self._direct_descriptor = enable_direct_reads(
                    self._files.open_descriptor(self.name)
                )
        return self._direct_descriptor is not None

    def read_bypassing_cache(
        self, offset: int, nbytes: int, buffer: memoryview
    ) -> memoryview | None:
        """See :meth:`ByteSource.read_bypassing_cache`. After a failure, direct I/O is disabled."""
        if self._direct_descriptor is None:
            return None
        page_offset = offset % PAGE_BYTES
        max_bytes = len(buffer) // PAGE_BYTES * PAGE_BYTES - page_offset
        end = page_offset + min(nbytes, max_bytes // MAX_ITEM_BYTES * MAX_ITEM_BYTES)
        view = buffer[: -(-end // PAGE_BYTES) * PAGE_BYTES]
        with suppress(OSError):  # a read through the page cache succeeds or raises
            if os.preadv(self._direct_descriptor, (view,), offset - page_offset) >= end:
                self._opened.bytes_read += end - page_offset
                return view[page_offset:end]
        os.close(self._direct_descriptor)
        self._direct_descriptor = None
        return None

    def close(self) -> None:
        """Close the descriptors that this thread opened for the file."""
        with wrap_os_errors("close", self._files.root / self.name):
            if self._direct_descriptor is not None:
                os.close(self._direct_descriptor)
            os.close(self.descriptor)

    def _read_error(self, error: OSError) -> StorageError:
        return StorageError.from_os_error(error, "read", str(self._files.root / self.name))


class LocalSink(ByteSink):
    """Existing output file opened for writing."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self._path = root / name
        with wrap_os_errors("open", self._path):
            flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            self.descriptor: int = os.open(self._path, flags)

    def write(self, offset: int, view: memoryview) -> None:
        """See :meth:`ByteSink.write`."""
        try:
            written = os.pwrite(self.descriptor, view, offset)
            while written < len(view):
                count = os.pwrite(self.descriptor, view[written:], offset + written)
                if not count:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                written += count
        except OSError as error:
            raise _write_error(error, self._path) from error

    def sync(self) -> None:
        """Sync the data of the file to disk."""
        with wrap_os_errors("sync", self._path):
            os.fsync(self.descriptor)

    def close(self) -> None:
        """Close the file. On NFS, this may raise the error of an earlier write."""
        with wrap_os_errors("close", self._path):
            os.close(self.descriptor)


def _write_error(error: OSError, path: Path) -> StorageError:
    """Build the error for a failed write to *path*."""
    failure = StorageError.from_os_error(error, "write", str(path))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        status = os.statvfs(path.parent)
        free = status.f_bavail * status.f_frsize
        failure.why = f"only {pluralize(free, 'byte is', 'bytes are')} free"
        failure.hint = "free some space or choose another destination"
    return failure


class OutputFiles:
    """Creation and checks of the output files of a plan on disk."""

    def __init__(
        self, files: Sequence[OutputFile], root: Path, *, shared: bool, sync: bool
    ) -> None:
        self._files = files
        self._root = root
        self._shared = shared
        self._sync = sync

    def have_full_size(self) -> bool:
        """Return whether all output files exist at their full size."""
        return all(
            path.is_file() and not path.is_symlink() and path.stat().st_size == file.size
            for file in self._files
            for path in (self._root / file.path,)
        )

    def create_files(self) -> None:
        """Create the output files at their full size.

        Other files in the directory are removed first, unless several processes share it.
        """
        if self._files and not self._shared:
            trash.clear_folder(self._root)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        for file in self._files:
            path = self._root / require_relative(file.path, str(self._root))
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, flags, 0o666)
                try:
                    os.ftruncate(descriptor, file.size)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise _write_error(error, path) from error

    def sync_directories(self) -> None:
        """Sync every directory that contains an output file."""
        if not self._files or not self._sync:
            return
        directories = {self._root}
        for file in self._files:
            directories.update(self._root / parent for parent in Path(file.path).parents)
        for directory in sorted(directories, reverse=True):
            sync_directory(directory)

    def compute_crc(self, write: Write) -> int:
        """Read back the byte range of *write* from its output file and compute its CRC-32."""
        crc = 0
        with (self._root / write.file).open("rb") as file:
            for position in range(0, write.nbytes, MIB):
                size = min(MIB, write.nbytes - position)
                crc = crc32(os.pread(file.fileno(), size, write.offset + position), crc)
        return crc
