"""Which part of a plan each of several processes carries out.

Everything is one line of bytes, file after file in the order of the output, which is cut into
stretches of equal length. Unlike chunks in the memory of ranks (:mod:`ckptctl.planner.balance`),
bytes of files can be cut anywhere and be read by anybody: so shares differ by less than a tile, at
most one file for each cut has two writers, and every process reads and writes in sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckptctl import dtypes
from ckptctl.planner.copying.tile import Tile
from ckptctl.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of one transfer, raw copy or check, as its buffers hold them."""

    first: int
    end: int
    whole: int

    def covers(self, position: int) -> bool:
        """Return whether the tile that begins at *position* is in it.

        Tiles that read once more, for checksums, begin at 0 again.
        """
        return self.first <= position % self.whole < self.end


@dataclass(frozen=True, slots=True)
class Share:
    """What one process does.

    Attributes:
        stretches: By number of the transfer, raw copy or check, as :class:`Plan` counts them.
    """

    stretches: Mapping[int, Stretch]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all stretches."""
        return sum(one.end - one.first for one in self.stretches.values())

    def own(self, number: int, tiles: Iterable[Tile]) -> Iterator[tuple[int, Tile]]:
        """Yield the tiles of *number* that are in the share, each with its index."""
        stretch = self.stretches.get(number)
        if stretch is None:
            return
        position = 0
        for index, tile in enumerate(tiles):
            if stretch.covers(position):
                yield index, tile
            position += tile.nbytes


def lanes(plan: Plan, checks: bool) -> list[list[int]]:
    """Return the numbers of what is done to each file, in the order in which files are begun."""
    found: dict[str, list[int]] = {}
    for index, transfer in enumerate(plan.transfers):
        if transfer.target.operands:
            found.setdefault(transfer.target.operands[0].file, []).append(index)
    for index, raw in enumerate(plan.raw_copies, len(plan.transfers)):
        found.setdefault(raw.target, []).append(index)
    for index, check in enumerate(plan.checks if checks else (), plan.first_check):
        found.setdefault(f"{check.root}/{check.file}", []).append(index)
    return list(found.values())


def share_of(plan: Plan, checks: bool, rank: int, ranks: int) -> Share:
    """Return what *rank* does of *plan*; the shares of all ranks together are all of it."""
    numbers = [number for lane in lanes(plan, checks) for number in lane]
    sizes = [_nbytes(plan, number) for number in numbers]
    total = sum(sizes)
    first, end = total * rank // ranks, total * (rank + 1) // ranks
    found: dict[int, Stretch] = {}
    position = 0
    for number, size in zip(numbers, sizes, strict=True):
        low, high = max(first - position, 0), min(end - position, size)
        if low < high:
            found[number] = Stretch(low, high, size)
        position += size
    return Share(found)


def _nbytes(plan: Plan, number: int) -> int:
    """Return the bytes that the tiles of *number* hold, those that only check apart."""
    if number < len(plan.transfers):
        transfer = plan.transfers[number]
        return math.prod(transfer.axes) * dtypes.itemsize(transfer.source_dtype)
    if number < plan.first_check:
        return plan.raw_copies[number - len(plan.transfers)].nbytes
    return sum(nbytes for _, nbytes in plan.checks[number - plan.first_check].gaps)
