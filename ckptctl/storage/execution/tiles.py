"""The units of work of a plan, or of one process's share of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptctl.planner.copying.copies import lower
from ckptctl.planner.copying.shares import Share
from ckptctl.planner.copying.tile import UNCHECKED, Limits, Read, Tile, Write
from ckptctl.planner.plan import Check, Plan, RawCopy
from ckptctl.storage.execution.lanes import Unit
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.sources import Sources


class Tiles:
    """What has to be done, tile by tile, in an order that depends on nothing but the arguments.

    Args:
        plan: The plan.
        sources: Its source files.
        limits: Sizes of tiles.
        share: What of it is done here; None: all.
    """

    def __init__(self, plan: Plan, sources: Sources, limits: Limits, share: Share | None) -> None:
        self._plan = plan
        self._sources = sources
        self._limits = limits
        self._share = share

    def units(self, number: int) -> Iterator[Unit]:
        """Yield the units of a transfer, raw copy or check, by its number."""
        files, tiles = self._tiles(number)
        chosen: Iterable[tuple[int, Tile]]
        chosen = self._share.own(number, tiles) if self._share else enumerate(tiles)
        for index, tile in chosen:
            yield Unit(number, index, tile, files)

    def _tiles(self, number: int) -> tuple[SourceFiles, Iterator[Tile]]:
        plan, transfers = self._plan, self._plan.transfers
        if number < len(transfers):
            tiles = lower(transfers[number], plan.records, self._limits)
            return self._sources.files(plan.source_root), tiles
        if number >= plan.first_check:
            check = plan.checks[number - plan.first_check]
            return self._sources.files(check.root), _check(check, self._limits.tile)
        raw = plan.raw_copies[number - len(transfers)]
        return self._sources.files(raw.root or plan.source_root), _raw(raw, self._limits.flat)


def _raw(raw: RawCopy, limit: int) -> Iterator[Tile]:
    for done in range(0, raw.nbytes, limit):
        size = min(limit, raw.nbytes - done)
        read = Read(raw.source, raw.offset + done, size, None, UNCHECKED, 0)
        write = Write(raw.target, raw.target_offset + done, size, 0, -1, 0)
        yield Tile(size, (read,), (), (write,), True)


def _check(check: Check, limit: int) -> Iterator[Tile]:
    for begin, nbytes in check.gaps:
        for done in range(begin, begin + nbytes, limit):
            size = min(limit, begin + nbytes - done)
            read = Read(check.file, check.offset + done, size, None, 0, done)
            yield Tile(size, (read,), (), (), False)
