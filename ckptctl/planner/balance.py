"""Deterministic distribution of work among ranks, processes and files, balanced by bytes.

Chunks in the memory of ranks are assigned as units. The copies of a plan from file to file form one
line of bytes, file after file in the order of the output, which is divided into stretches of equal
length. Bytes of files can be divided anywhere and read by any process. Shares therefore differ by
less than a tile, each cut gives at most one file two writers, and every process reads and writes
sequentially.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING

from ckptctl.catalog import Box
from ckptctl.planner.boxes import split_rows

if TYPE_CHECKING:
    from ckptctl.planner.copying.tile import Tile
    from ckptctl.planner.plan import Plan

SMALL = 64 << 10
LEAST_PIECE = 16 << 20
PIECES_PER_RANK = 32
FINE_PIECE = 16 << 10
FINE_PIECES, FINE_PIECES_PER_RANK = 4096, 64
EVEN = 1.01
"""Multiple of a rank's fair share above which replicated chunks are split into smaller pieces."""
LEAST_FILE = 128 << 20
"""Bytes below which a file is not worth a dedicated thread."""
SHARDS = 16
LEAST_SHARD, LARGEST_SHARD = 256_000_000, 5_000_000_000
FINER = 64
"""Fraction (1 / FINER) by which a shard limit grows until there are enough large files."""


def assign(
    chunks: Sequence[tuple[int, Sequence[int]]],
    ranks: int,
    small: int = SMALL,
    load: Sequence[int] = (),
) -> list[int]:
    """Assign each chunk to one of the ranks that hold it, and return the rank of each.

    Args:
        chunks: Size of each chunk in bytes, and the ranks that hold it, in order.
        ranks: Number of ranks.
        small: Size in bytes below which chunks of the same ranks stay together.
        load: Bytes that each rank has to write anyway, or empty for none.
    """
    loads = list(load) or [0] * ranks
    chosen = [-1] * len(chunks)
    shared: list[int] = []
    for index, (nbytes, holders) in enumerate(chunks):
        if len(holders) == 1:
            chosen[index] = holders[0]
            loads[holders[0]] += nbytes
        else:
            shared.append(index)
    fair = -(-(sum(loads) + sum(chunks[index][0] for index in shared)) // max(ranks, 1))
    shared.sort(key=lambda index: (-chunks[index][0], index))
    candidates: dict[tuple[int, ...], _Candidates] = {}
    for index in shared:
        nbytes, holders = chunks[index]
        key = tuple(holders)
        found = candidates.get(key)
        if found is None:
            found = candidates[key] = _Candidates(key, loads)
        rank = found.first(nbytes, fair) if nbytes < small else found.least()
        chosen[index] = rank
        loads[rank] += nbytes
    return chosen


class _Candidates:
    """Ranks that hold the same chunks, by load. Loads are shared with other sets and only grow."""

    def __init__(self, ranks: tuple[int, ...], loads: list[int]) -> None:
        self._ranks = sorted(ranks)
        self._loads = loads
        self._heap = [(loads[rank], rank) for rank in ranks]
        self._full = 0
        heapify(self._heap)

    def least(self) -> int:
        """Return the least loaded rank, the lowest number of several."""
        heap, loads = self._heap, self._loads
        while heap[0][0] != loads[heap[0][1]]:
            rank = heap[0][1]
            heapreplace(heap, (loads[rank], rank))
        return heap[0][1]

    def first(self, nbytes: int, fair: int) -> int:
        """Return the first rank that stays within *fair* bytes, or the least loaded rank."""
        while self._full < len(self._ranks):
            rank = self._ranks[self._full]
            if self._loads[rank] + nbytes <= fair:
                return rank
            self._full += 1
        return self.least()


def piece_limit(nbytes: int, ranks: int) -> int:
    """Return the size in bytes above which a replicated chunk is split among ranks."""
    return max(LEAST_PIECE, nbytes // max(ranks, 1) // PIECES_PER_RANK)


def fine_limit(nbytes: int, ranks: int) -> int:
    """Return a smaller :func:`piece_limit`, for plans that it leaves uneven."""
    least = max(FINE_PIECE, nbytes // FINE_PIECES)
    fine = max(least, nbytes // max(ranks, 1) // FINE_PIECES_PER_RANK)
    return min(piece_limit(nbytes, ranks), fine)


def cut(box: Box, nbytes: int, limit: int) -> list[Box]:
    """Split *box* into contiguous boxes of about *limit* bytes, along the outermost dimensions."""
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
    count = -(-nbytes // limit)
    if dim is None or count < 2:
        return [box]
    before, size = box.sizes[:dim], box.sizes[dim]
    pieces = [
        Box(
            (
                *box.offsets[:dim],
                box.offsets[dim] + rows.offsets[0],
                *box.offsets[dim + 1 :],
            ),
            (*before, rows.sizes[0], *box.sizes[dim + 1 :]),
        )
        for rows in split_rows((size,), min(count, size))
    ]
    if count <= size:
        return pieces
    return [part for row in pieces for part in cut(row, nbytes // size, limit)]


def file_count(nbytes: int, threads: int) -> int:
    """Return the number of output files for *nbytes*, one per thread and none of them small."""
    return max(1, min(threads, nbytes // LEAST_FILE))


def shard_limit(sizes: Sequence[tuple[str, int]], one_file: int) -> int:
    """Return the default shard size of a conversion, in bytes.

    It depends only on sizes, not on cores, so that equal inputs give equal bytes on every machine.
    Sixteen files keep sixteen threads busy. A seventeenth file would be written after them.

    Args:
        sizes: Name and bytes of each tensor.
        one_file: Total size in bytes up to which one file is expected.
    """
    nbytes = sum(size for _, size in sizes)
    if 0 < nbytes <= one_file:
        return one_file
    limit = max(LEAST_SHARD, -(-nbytes // SHARDS))
    files = max(1, -(-nbytes // limit))
    while limit < LARGEST_SHARD and len(fill(sizes, limit)) > files:
        limit += -(-limit // FINER)
    return min(LARGEST_SHARD, limit)


def fill(sizes: Iterable[tuple[str, int]], limit: int) -> list[list[str]]:
    """Group names into shards of at most *limit* bytes, in order.

    This follows ``huggingface_hub.split_torch_state_dict_into_shards``. The first tensor that does
    not fit closes a shard, and a tensor above the limit gets a separate shard.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    used = 0
    for name, nbytes in sizes:
        if nbytes > limit:
            shards.append([name])
            continue
        if current and used + nbytes > limit:
            shards.append(current)
            current, used = [], 0
        current.append(name)
        used += nbytes
    if current:
        shards.append(current)
    return shards or [[]]


def grouped(names: Iterable[str], file_of: Mapping[str, int], files: int) -> list[list[str]]:
    """Group *names* by their file index in *file_of*, keeping their order."""
    shards: list[list[str]] = [[] for _ in range(files)]
    for name in names:
        shards[file_of[name]].append(name)
    return shards


@dataclass(frozen=True, slots=True)
class Stretch:
    """A byte range of one transfer, raw copy or check, in buffer positions.

    Attributes:
        first: First byte.
        end: End, exclusive.
        whole: Size of the complete transfer, copy or check.
    """

    first: int
    end: int
    whole: int

    def covers(self, position: int) -> bool:
        """Return whether the tile that starts at byte *position* is in the stretch.

        Positions of tiles that read again, for checksums, start over after :attr:`whole`.
        """
        return self.first <= position % self.whole < self.end


@dataclass(frozen=True, slots=True)
class Share:
    """The work of one process.

    Attributes:
        stretches: Stretch by number of the transfer, raw copy or check, as in :class:`Plan`.
    """

    stretches: Mapping[int, Stretch]

    @property
    def nbytes(self) -> int:
        """Total bytes of all stretches."""
        return sum(one.end - one.first for one in self.stretches.values())

    def own(self, number: int, tiles: Iterable[Tile]) -> Iterator[tuple[int, Tile]]:
        """Yield the index and the tile of each of *tiles* that is in this share of *number*."""
        stretch = self.stretches.get(number)
        if stretch is None:
            return
        position = 0
        for index, tile in enumerate(tiles):
            if stretch.covers(position):
                yield index, tile
            position += tile.copied


def lanes(plan: Plan, checks: bool) -> list[list[int]]:
    """Group the transfers, copies and checks of a plan by file, in the order of files.

    Args:
        plan: The plan.
        checks: Whether to include the ranges that are read only for checksums.

    Returns:
        For each file the numbers of its transfers, copies and checks, as in :class:`Plan`.
    """
    found: dict[str, list[int]] = {}
    for index, transfer in enumerate(plan.transfers):
        if transfer.targets:
            found.setdefault(transfer.targets[0].file, []).append(index)
    for index, raw in enumerate(plan.raw_copies, len(plan.transfers)):
        found.setdefault(raw.target, []).append(index)
    for index, check in enumerate(plan.checks if checks else (), plan.first_check):
        found.setdefault(f"{check.root}/{check.recorded.file}", []).append(index)
    return list(found.values())


def share_of(plan: Plan, checks: bool, rank: int, ranks: int) -> Share:
    """Return the share of *rank* in *plan*. The shares of all ranks add up to the plan."""
    numbers = [number for lane in lanes(plan, checks) for number in lane]
    sizes = [nbytes_of(plan, number) for number in numbers]
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


def nbytes_of(plan: Plan, number: int) -> int:
    """Return the buffer bytes of transfer, copy or check *number*, without reads for checks."""
    if number < len(plan.transfers):
        return plan.transfers[number].nbytes
    if number < plan.first_check:
        return plan.raw_copies[number - len(plan.transfers)].nbytes
    return sum(nbytes for _, nbytes in plan.checks[number - plan.first_check].gaps)
