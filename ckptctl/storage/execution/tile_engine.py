"""Doing a tile: what is read into a buffer, permuted and cast, and where it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache

from ckptctl import dtypes
from ckptctl.planner.copying.tile import Move, Pattern, Read, Tile
from ckptctl.storage.arithmetic import cast, keep_to_thread, permute
from ckptctl.storage.buffers import CAST, STAGING, TILE, BufferParts, TileBuffers
from ckptctl.storage.byte_files import ByteSink, ByteSource, Piece
from ckptctl.storage.computed import OpenFiles
from ckptctl.storage.crc import crc32
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.outcome import NOTHING, Outcome

Dtypes = tuple[str, str]
"""torch's names of the dtypes of what is read and what is written."""
Places = Callable[[Pattern, memoryview], Iterable[BufferParts]]
"""Returns the places of a pattern in a buffer."""


class TileEngine:
    """Does tiles, one after the other, in the buffers of one thread.

    Args:
        opened: Opens what is read.
        sink: Opens what is written.
        buffers: Of this thread.
        checksum: Whether to compute checksums of what is written.
    """

    def __init__(
        self,
        opened: OpenFiles,
        sink: Callable[[str], ByteSink],
        buffers: TileBuffers,
        *,
        checksum: bool,
    ) -> None:
        self._opened = opened
        self._sink = sink
        self._buffers = buffers
        self._checksum = checksum
        self._ready_torch = cache(keep_to_thread)

    def copy(
        self,
        files: SourceFiles,
        tile: Tile,
        step: int,
        kinds: Dtypes | None,
        read: list[int],
        written: list[int],
    ) -> Outcome:
        """Do a step of a tile; return what became of elements that were computed or cast.

        Args:
            files: Where its source files are.
            tile: What is to be done.
            step: Which one of its steps.
            kinds: The dtypes of its elements; None: they are bytes.
            read: Checksums of its reads so far.
            written: Checksums of its writes so far.
        """
        buffer = self._buffers.get(TILE, tile.nbytes)
        outcome = self.fill(files, tile, step, buffer, read, self._buffers.places)
        if kinds is not None:
            for move in tile.moves:
                outcome += self._move(files, move, buffer[: tile.nbytes], dtypes.itemsize(kinds[0]))
            if kinds[0] != kinds[1] and tile.writes:
                buffer, lost = self._cast(buffer[: tile.nbytes], *kinds)
                outcome += lost
        name, sink = "", None
        for index, write in enumerate(tile.writes):
            if sink is None or write.file != name:
                name, sink = write.file, self._sink(write.file)
            view = buffer[write.start : write.start + write.nbytes]
            if self._checksum and sink.checksummed:
                written[index] = crc32(view, written[index])
            sink.write(write.offset + step * write.nbytes, view)
        return outcome

    def fill(
        self,
        files: SourceFiles,
        tile: Tile,
        step: int,
        buffer: memoryview,
        crcs: list[int],
        places: Places,
    ) -> Outcome:
        """Read what a step of a tile reads into *buffer*; see :meth:`copy`."""
        outcome, together = NOTHING, dict[ByteSource, list[Piece]]()
        name, source = "", None
        for index, read in enumerate(tile.reads):
            if source is None or read.file != name:
                name, source = read.file, self._opened.source(files, read.file)
            offset = read.offset + step * read.step
            if source.together:
                together.setdefault(source, []).extend(_pieces(read, offset))
            elif read.pattern is None or len(read.pattern.runs) == 1:
                start = read.pattern.runs[0][0] if read.pattern else 0
                view = buffer[start : start + read.nbytes]
                source.read_into(offset, (view,), read.nbytes)
                if read.check is not None:
                    crcs[index] = crc32(view, crcs[index])
            else:
                for nbytes, views in places(read.pattern, buffer):
                    source.read_into(offset, views, nbytes)
                    offset += nbytes
                    for view in views if read.check is not None else ():
                        crcs[index] = crc32(view, crcs[index])
        for made, pieces in together.items():
            outcome += made.gather(pieces, buffer)
        return outcome

    def _move(self, files: SourceFiles, move: Move, buffer: memoryview, item: int) -> Outcome:
        staged = self._buffers.get(STAGING, move.staging)[: move.staging]
        outcome = self._opened.source(files, move.file).gather(move.reads, staged)
        self._ready_torch()
        permute(staged, buffer, move.buffer, move.axes, item)
        return outcome

    def _cast(self, buffer: memoryview, before: str, after: str) -> tuple[memoryview, Outcome]:
        size = len(buffer) // dtypes.itemsize(before) * dtypes.itemsize(after)
        target = self._buffers.get(CAST, size)[:size]
        self._ready_torch()
        return target, Outcome(cast(buffer, before, target, after))


def _pieces(read: Read, offset: int) -> Iterator[Piece]:
    for start, nbytes in read.pattern.runs if read.pattern else ((0, read.nbytes),):
        yield offset, nbytes, start
        offset += nbytes
