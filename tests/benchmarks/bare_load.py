"""The bare loop of ``preadv`` that loads are compared with: it only knows where to read what.

Places come from torch's own metadata and archive reader, not from what is measured.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.benchmarks.bare_loop import side_by_side

BLOCK = 8 << 20
ROWS = 256


class Range(NamedTuple):
    """Rows of equal length in a file that lie one behind the other in memory.

    Attributes:
        file: Its descriptor.
        offset: Where the first one begins.
        step: Bytes from one to the next.
        rows: How many there are.
        memory: Gets them.
    """

    file: int
    offset: int
    step: int
    rows: int
    memory: memoryview


class BareFiles:
    """The files of a DCP directory, open.

    Args:
        folder: The directory.
    """

    def __init__(self, folder: str) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self._folder = Path(folder)
        self._metadata: Any = FileSystemReader(folder).read_metadata()
        self._open: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def ranges(self, state: Mapping[str, Any]) -> list[Range]:
        """Return what this rank needs of ``{"model": state}``, in the order of the files."""
        found = [one for name, tensor in state.items() for one in self._needed(name, tensor)]
        return sorted(found, key=lambda one: one[:2])

    def elsewhere(self, state: Mapping[str, Any]) -> list[Range]:
        """Return long reads of as many bytes as this rank needs, from anywhere."""
        from ckptctl.distributed.state import to_memoryview

        names = sorted(path.name for path in self._folder.glob("*.distcp"))
        file, offset, found = self._descriptor(names[0]), 0, list[Range]()
        size = os.fstat(file).st_size
        for tensor in state.values():
            view = to_memoryview(tensor.to_local())
            for start in range(0, len(view), BLOCK):
                part = view[start : start + BLOCK]
                offset = offset if offset + len(part) <= size else 0
                found.append(Range(file, offset, 0, 1, part))
                offset += len(part)
        return found

    def _needed(self, name: str, tensor: Any) -> Iterator[Range]:
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        from ckptctl.distributed.state import to_memoryview

        item, view = tensor.element_size(), to_memoryview(tensor.to_local())
        sizes, starts = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        for chunk in self._metadata.state_dict_metadata[f"model.{name}"].chunks:
            place = self._metadata.storage_data[MetadataIndex(f"model.{name}", chunk.offsets)]
            begin = place.offset + self._record(place)
            low = max(starts[0], chunk.offsets[0])
            rows = min(starts[0] + sizes[0], chunk.offsets[0] + chunk.sizes[0]) - low
            if rows <= 0:
                continue
            column = (starts[1] if len(starts) > 1 else 0) * item
            run = (sizes[1] if len(sizes) > 1 else 1) * item
            step = (chunk.sizes[1] if len(sizes) > 1 else 1) * item
            begin += (low - chunk.offsets[0]) * step + column
            held = view[(low - starts[0]) * run : (low - starts[0] + rows) * run]
            yield from self._cut(self._descriptor(place.relative_path), begin, step, rows, held)

    def _cut(
        self, file: int, begin: int, step: int, rows: int, held: memoryview
    ) -> Iterator[Range]:
        run = len(held) // rows
        if run == step:
            for start in range(0, len(held), BLOCK):
                yield Range(file, begin + start, 0, 1, held[start : start + BLOCK])
            return
        for row in range(0, rows, ROWS):
            count = min(ROWS, rows - row)
            some = held[row * run : (row + count) * run]
            yield Range(file, begin + row * step, step, count, some)

    def _record(self, place: Any) -> int:
        """Return where the elements begin in an item."""
        import torch

        with (self._folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            reader: Any = torch._C.PyTorchFileReader(io.BytesIO(file.read(place.length)))
            return int(reader.get_record_offset("data/0"))

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            self._open[name] = os.open(self._folder / name, os.O_RDONLY)
        return self._open[name]


def read_all(ranges: Sequence[Range], jobs: int) -> None:
    """Read *ranges* with so many threads; with one, in this one."""

    def work(_: int, ranges: Sequence[Range]) -> None:
        for file, offset, step, rows, memory in ranges:
            run = len(memory) // rows
            for row in range(rows):
                os.preadv(file, (memory[row * run : (row + 1) * run],), offset + row * step)

    side_by_side(work, ranges, jobs)
