"""Interfaces for files that are read or written by position.

A plan refers to files by name. :class:`~ckptctl.storage.computed.OpenFiles` decides whether a name
is a local file, a remote file, a virtual file or memory; other code only uses these interfaces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from ckptctl.storage.outcome import NO_OUTCOME, Outcome

MEMORY_STEP_BYTES = 4 << 20
"""Bytes of host memory to write at a time, large because every write waits for the GIL."""
Piece = tuple[int, int, int]
"""Byte range to read, as file offset, number of bytes and buffer offset."""


class ByteSource(ABC):
    """File opened for reading by one thread.

    Attributes:
        descriptor: File descriptor for ``copy_file_range``, or None if the file has none.
        batches_pieces: Whether reading all pieces of a tile in one call of :meth:`read_pieces` is
            faster than reading them in separate calls.
    """

    descriptor: int | None = None
    batches_pieces = False

    @abstractmethod
    def read_into(self, offset: int, views: Sequence[memoryview], nbytes: int) -> None:
        """Fill *views* in order with the bytes of the file from *offset*.

        Args:
            offset: File offset of the first byte.
            views: At most ``IOV_MAX`` writable byte views.
            nbytes: Total length of *views* in bytes.

        Raises:
            DamagedError: The file ends before *views* are full.
            StorageError: The read failed.
        """

    def read_pieces(self, pieces: Iterable[Piece], buffer: memoryview) -> Outcome:
        """Read *pieces* into *buffer*, which is fastest if they are sorted by offset.

        Returns:
            Out-of-range counts and quantization errors of computed elements. They are zero for
            stored files.
        """
        for offset, nbytes, start in pieces:
            self.read_into(offset, [buffer[start : start + nbytes]], nbytes)
        return NO_OUTCOME

    def choose_read_size(self, offset: int, nbytes: int) -> int:  # noqa: ARG002
        """Return a number of bytes close to *nbytes* that is efficient to read at *offset*."""
        return nbytes

    def view_memory(self, offset: int, nbytes: int) -> memoryview | None:  # noqa: ARG002
        """Return a view of *nbytes* bytes from *offset*, or None if they are not in memory.

        The view is valid until the next call.
        """
        return None

    @property
    def should_bypass_cache(self) -> bool:
        """Whether long ranges should be read with :meth:`read_bypassing_cache`."""
        return False

    def read_bypassing_cache(
        self,
        offset: int,  # noqa: ARG002
        nbytes: int,  # noqa: ARG002
        buffer: memoryview,  # noqa: ARG002
    ) -> memoryview | None:
        """Read *nbytes* bytes from *offset* with direct I/O, which fills whole pages of *buffer*.

        Returns:
            The slice of *buffer* with the bytes from *offset*, at most *nbytes*, or None if direct
            I/O failed.
        """
        return None

    def limit_read_ahead(self, stop: int) -> None:  # noqa: B027
        """Limit read-ahead to the bytes before *stop*, at which the current range ends."""

    def close(self) -> None:  # noqa: B027
        """Close the file descriptors, after which the file cannot be read."""


class ByteSink(ABC):
    """File opened for writing by one thread.

    Attributes:
        descriptor: File descriptor for ``copy_file_range``, or None if the file has none.
        checksummed: Whether to compute checksums of the bytes written.
    """

    descriptor: int | None = None
    checksummed = True

    @abstractmethod
    def write(self, offset: int, view: memoryview) -> None:
        """Write all of *view* at *offset*.

        Raises:
            StorageError: The write failed.
        """

    def view_memory(self, offset: int, nbytes: int) -> memoryview | None:  # noqa: ARG002
        """Return writable memory for a byte range, or None if :meth:`write` must be called."""
        return None

    def close(self) -> None:  # noqa: B027
        """Close the file descriptors, after which the file cannot be written."""


class HostMemory(ByteSource, ByteSink):
    """File interface that reads and writes a block of host memory."""

    checksummed = False

    def __init__(self, content: memoryview) -> None:
        self._content = content

    def read_into(self, offset: int, views: Sequence[memoryview], nbytes: int) -> None:  # noqa: ARG002
        """See :meth:`ByteSource.read_into`."""
        for view in views:
            view[:] = self._content[offset : offset + len(view)]
            offset += len(view)

    def choose_read_size(self, offset: int, nbytes: int) -> int:  # noqa: ARG002
        """Return :data:`MEMORY_STEP_BYTES` for any *nbytes*, because no buffer is needed."""
        return MEMORY_STEP_BYTES

    def view_memory(self, offset: int, nbytes: int) -> memoryview:
        """Return a view of *nbytes* bytes of the memory from *offset*."""
        return self._content[offset : offset + nbytes]

    def write(self, offset: int, view: memoryview) -> None:
        """See :meth:`ByteSink.write`."""
        self._content[offset : offset + len(view)] = view

    def close(self) -> None:
        """Do nothing, because the memory belongs to the caller."""


Memory = memoryview | ByteSource | ByteSink
"""Memory that a plan reads or fills.

Host memory is a memory view. Device memory is accessed through a source or sink.
"""


def wrap_memory(memory: Mapping[str, Memory]) -> dict[str, ByteSource | ByteSink]:
    """Wrap each memory view in :class:`HostMemory`, and return device memory objects unchanged."""
    return {
        name: HostMemory(content) if isinstance(content, memoryview) else content
        for name, content in memory.items()
    }
