"""Files as a run sees them: bytes that are read or written by position, wherever they lie.

A plan has names. What opens a name (:class:`~ckptctl.storage.computed.OpenFiles`) knows whether it
is stored here or behind a URL, computed, or memory; nobody else asks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from ckptctl.storage.outcome import NOTHING, Outcome

MEMORY_STEP = 4 << 20
"""Bytes of memory that are written at a time: the next step waits for the interpreter's lock."""
Piece = tuple[int, int, int]
"""Where bytes begin in a file, how many they are, and where they go in a buffer."""


class ByteSource(ABC):
    """A file that one thread reads.

    Attributes:
        descriptor: Descriptor that the kernel can copy from, or None.
        together: Whether pieces are best read in one call of :meth:`gather`.
    """

    descriptor: int | None = None
    together = False

    @abstractmethod
    def read_into(self, offset: int, views: Sequence[memoryview], nbytes: int) -> None:
        """Fill *views*, one after the other, from *offset* on.

        Args:
            offset: First byte.
            views: At most ``IOV_MAX`` writable byte views.
            nbytes: Their length in all.

        Raises:
            DamagedError: The file ends before they are full.
            StorageError: The read failed.
        """

    def gather(self, pieces: Iterable[Piece], buffer: memoryview) -> Outcome:
        """Read *pieces* into their places in *buffer*; quickest when neighbors follow each other.

        Returns what of them became infinite, NaN or saturated when it was computed, and how far
        what was quantized is off.
        """
        for offset, nbytes, start in pieces:
            self.read_into(offset, [buffer[start : start + nbytes]], nbytes)
        return NOTHING

    def best_step(self, offset: int, nbytes: int) -> int:  # noqa: ARG002
        """Return how many bytes are best read from *offset* on, about *nbytes*."""
        return nbytes

    def view(self, offset: int, nbytes: int) -> memoryview | None:  # noqa: ARG002
        """Return bytes that lie in memory, until the next call, or None if they must be read."""
        return None

    @property
    def past_cache(self) -> bool:
        """Return whether long ranges are best read with :meth:`read_past_cache`."""
        return False

    def read_past_cache(self, offset: int, nbytes: int, room: memoryview) -> memoryview | None:  # noqa: ARG002
        """Read bytes into whole pages of *room*, past the page cache.

        Returns:
            A part of *room* with at most *nbytes* bytes from *offset* on, or None if that failed.
        """
        return None

    def end(self, stop: int) -> None:  # noqa: B027
        """Note that a range that is read ends at byte *stop*: nothing is read ahead of that."""

    def close(self) -> None:  # noqa: B027
        """Let go of descriptors; nothing is read afterwards."""


class ByteSink(ABC):
    """A file that one thread writes.

    Attributes:
        descriptor: Descriptor that the kernel can copy to, or None.
        checksummed: Whether a checksum is taken of what is written.
    """

    descriptor: int | None = None
    checksummed = True

    @abstractmethod
    def write(self, offset: int, view: memoryview) -> None:
        """Write all of *view* from *offset* on.

        Raises:
            StorageError: The write failed.
        """

    def view(self, offset: int, nbytes: int) -> memoryview | None:  # noqa: ARG002
        """Return memory that can be filled in place of a write, or None if there is none."""
        return None

    def close(self) -> None:  # noqa: B027
        """Let go of descriptors; nothing is written afterwards."""


class HostMemory(ByteSource, ByteSink):
    """Memory of this process; it is read, or filled."""

    checksummed = False

    def __init__(self, content: memoryview) -> None:
        self._content = content

    def read_into(self, offset: int, views: Sequence[memoryview], nbytes: int) -> None:  # noqa: ARG002
        """See :meth:`ByteSource.read_into`."""
        for view in views:
            view[:] = self._content[offset : offset + len(view)]
            offset += len(view)

    def best_step(self, offset: int, nbytes: int) -> int:  # noqa: ARG002
        """Return :data:`MEMORY_STEP`: no buffer is needed."""
        return MEMORY_STEP

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a part of the memory."""
        return self._content[offset : offset + nbytes]

    def write(self, offset: int, view: memoryview) -> None:
        """See :meth:`ByteSink.write`."""
        self._content[offset : offset + len(view)] = view

    def close(self) -> None:
        """Do nothing: others hold the memory."""


Memory = memoryview | ByteSource | ByteSink
"""Memory that a plan reads or fills: of the host, or an object that knows better."""


def memory_files(memory: Mapping[str, Memory]) -> dict[str, ByteSource | ByteSink]:
    """Return *memory* as files."""
    return {
        name: HostMemory(held) if isinstance(held, memoryview) else held
        for name, held in memory.items()
    }
