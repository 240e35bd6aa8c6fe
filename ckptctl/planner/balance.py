"""Deterministic distribution of work among ranks, processes and files, balanced by bytes.

A chunk in the memory of ranks is assigned to one rank. The file-to-file copies of a plan are
concatenated in the order of the output files, and the resulting byte sequence is divided into
ranges of equal length, one per process. This is possible because any process can read any byte of a
file. The shares differ by less than a tile, each boundary between two ranges adds a second writer
to at most one file, and every process reads and writes sequentially.
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

SMALL_CHUNK_BYTES = 64 << 10
MIN_PIECE_BYTES = 16 << 20
PIECES_PER_RANK = 32
MIN_FINE_PIECE_BYTES = 16 << 10
MAX_FINE_PIECES, FINE_PIECES_PER_RANK = 4096, 64
EVEN_LOAD_RATIO = 1.01
"""Multiple of a rank's fair share above which replicated chunks are split into smaller pieces."""
MIN_FILE_BYTES = 128 << 20
"""Bytes below which a file is not worth a dedicated thread."""
DEFAULT_SHARD_COUNT = 16
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 256_000_000, 5_000_000_000
LIMIT_STEP_DIVISOR = 64
"""Divisor of a shard limit that gives the step by which the limit is increased."""


def assign_chunks(
    chunks: Sequence[tuple[int, Sequence[int]]],
    ranks: int,
    small_bytes: int = SMALL_CHUNK_BYTES,
    initial_loads: Sequence[int] = (),
) -> list[int]:
    """Assign each chunk to one of the ranks that have it, and return the assigned ranks.

    Args:
        chunks: Size of each chunk in bytes, and the ranks that have it in memory.
        ranks: Number of ranks.
        small_bytes: Size in bytes below which chunks are collected on as few ranks as possible.
        initial_loads: Bytes that each rank must write in addition, or empty if there are none.
    """
    loads = list(initial_loads) or [0] * ranks
    chosen_ranks = [-1] * len(chunks)
    shared: list[int] = []
    for index, (nbytes, holders) in enumerate(chunks):
        if len(holders) == 1:
            chosen_ranks[index] = holders[0]
            loads[holders[0]] += nbytes
        else:
            shared.append(index)
    fair_share = -(-(sum(loads) + sum(chunks[index][0] for index in shared)) // max(ranks, 1))
    shared.sort(key=lambda index: (-chunks[index][0], index))
    candidates: dict[tuple[int, ...], _CandidateRanks] = {}
    for index in shared:
        nbytes, holders = chunks[index]
        key = tuple(holders)
        ranks_by_load = candidates.get(key)
        if ranks_by_load is None:
            ranks_by_load = candidates[key] = _CandidateRanks(key, loads)
        rank = (
            ranks_by_load.find_first_below_share(nbytes, fair_share)
            if nbytes < small_bytes
            else ranks_by_load.find_least_loaded()
        )
        chosen_ranks[index] = rank
        loads[rank] += nbytes
    return chosen_ranks


class _CandidateRanks:
    """Ranks that have the same chunks in memory, ordered by the bytes assigned to them.

    Instances share *loads*, the bytes assigned to each rank. These values never decrease.
    """

    def __init__(self, ranks: tuple[int, ...], loads: list[int]) -> None:
        self._ranks = sorted(ranks)
        self._loads = loads
        self._heap = [(loads[rank], rank) for rank in ranks]
        self._full_count = 0
        heapify(self._heap)

    def find_least_loaded(self) -> int:
        """Return the rank with the fewest assigned bytes, or the lowest such rank."""
        heap, loads = self._heap, self._loads
        while heap[0][0] != loads[heap[0][1]]:
            rank = heap[0][1]
            heapreplace(heap, (loads[rank], rank))
        return heap[0][1]

    def find_first_below_share(self, nbytes: int, fair_share: int) -> int:
        """Return the first rank that can take *nbytes* more bytes within its fair share.

        If no rank can, return the least loaded rank.
        """
        while self._full_count < len(self._ranks):
            rank = self._ranks[self._full_count]
            if self._loads[rank] + nbytes <= fair_share:
                return rank
            self._full_count += 1
        return self.find_least_loaded()


def compute_piece_limit(nbytes: int, ranks: int) -> int:
    """Return the size in bytes above which a replicated chunk is split among ranks."""
    return max(MIN_PIECE_BYTES, nbytes // max(ranks, 1) // PIECES_PER_RANK)


def compute_fine_piece_limit(nbytes: int, ranks: int) -> int:
    """Return a smaller limit, for loads that are uneven with :func:`compute_piece_limit`."""
    min_bytes = max(MIN_FINE_PIECE_BYTES, nbytes // MAX_FINE_PIECES)
    fine = max(min_bytes, nbytes // max(ranks, 1) // FINE_PIECES_PER_RANK)
    return min(compute_piece_limit(nbytes, ranks), fine)


def split_box(box: Box, nbytes: int, limit: int) -> list[Box]:
    """Split *box* into contiguous boxes of about *limit* bytes, along the outermost dimensions."""
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
    count = -(-nbytes // limit)
    if dim is None or count < 2:
        return [box]
    leading_sizes, size = box.sizes[:dim], box.sizes[dim]
    pieces = [
        Box(
            (
                *box.offsets[:dim],
                box.offsets[dim] + rows.offsets[0],
                *box.offsets[dim + 1 :],
            ),
            (*leading_sizes, rows.sizes[0], *box.sizes[dim + 1 :]),
        )
        for rows in split_rows((size,), min(count, size))
    ]
    if count <= size:
        return pieces
    return [part for row in pieces for part in split_box(row, nbytes // size, limit)]


def count_output_files(nbytes: int, threads: int) -> int:
    """Return the number of output files for *nbytes*, at most one per thread.

    Several files have at least :data:`MIN_FILE_BYTES` on average.
    """
    return max(1, min(threads, nbytes // MIN_FILE_BYTES))


def choose_shard_limit(sizes: Sequence[tuple[str, int]], single_file_limit: int) -> int:
    """Return the default shard size of a conversion, in bytes.

    The limit depends only on sizes, not on cores, so that equal inputs give equal bytes on every
    machine. It avoids a seventeenth file, which sixteen threads could only write after the others.

    Args:
        sizes: Name and bytes of each tensor.
        single_file_limit: Total size in bytes up to which one file is expected.
    """
    nbytes = sum(size for _, size in sizes)
    if 0 < nbytes <= single_file_limit:
        return single_file_limit
    limit = max(MIN_SHARD_BYTES, -(-nbytes // DEFAULT_SHARD_COUNT))
    files = max(1, -(-nbytes // limit))
    while limit < MAX_SHARD_BYTES and len(group_into_shards(sizes, limit)) > files:
        limit += -(-limit // LIMIT_STEP_DIVISOR)
    return min(MAX_SHARD_BYTES, limit)


def group_into_shards(sizes: Iterable[tuple[str, int]], limit: int) -> list[list[str]]:
    """Group tensor names into shards of at most *limit* bytes, in the order of *sizes*.

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


def group_names_by_file(
    names: Iterable[str], file_by_name: Mapping[str, int], file_count: int
) -> list[list[str]]:
    """Group *names* by their file index in *file_by_name*, keeping their order."""
    shards: list[list[str]] = [[] for _ in range(file_count)]
    for name in names:
        shards[file_by_name[name]].append(name)
    return shards


@dataclass(frozen=True, slots=True)
class WorkRange:
    """A range of the bytes that one transfer, raw copy or check copies or reads.

    Attributes:
        first: Offset of the first byte.
        end: Offset of the end, exclusive.
        total: Bytes of the complete transfer, raw copy or check.
    """

    first: int
    end: int
    total: int

    def covers_position(self, position: int) -> bool:
        """Return whether the tile that starts at byte *position* is in the range.

        Tiles that read sources a second time for checksums follow all other tiles. Their positions
        start at :attr:`total` and are compared modulo :attr:`total`.
        """
        return self.first <= position % self.total < self.end


@dataclass(frozen=True, slots=True)
class WorkShare:
    """The share of a plan that one process executes.

    Attributes:
        ranges: Byte range of each transfer, raw copy or check, by its number in :class:`Plan`.
    """

    ranges: Mapping[int, WorkRange]

    @property
    def nbytes(self) -> int:
        """Total bytes of all ranges."""
        return sum(work_range.end - work_range.first for work_range in self.ranges.values())

    def iterate_tiles(self, number: int, tiles: Iterable[Tile]) -> Iterator[tuple[int, Tile]]:
        """Yield the index and tile of each of *tiles* that this process executes.

        *number* is the number of their transfer, raw copy or check in :class:`Plan`.
        """
        work_range = self.ranges.get(number)
        if work_range is None:
            return
        position = 0
        for index, tile in enumerate(tiles):
            if work_range.covers_position(position):
                yield index, tile
            position += tile.copied_nbytes


def group_work_by_file(plan: Plan, checks: bool) -> list[list[int]]:
    """Group the numbers of transfers, raw copies and checks by the file that they write or check.

    Args:
        plan: The plan.
        checks: Whether to include the ranges that are read only for checksums.

    Returns:
        The numbers for each file, as in :class:`Plan`.
    """
    numbers_by_file: dict[str, list[int]] = {}
    for index, transfer in enumerate(plan.transfers):
        if transfer.targets:
            numbers_by_file.setdefault(transfer.targets[0].file, []).append(index)
    for index, raw_copy in enumerate(plan.raw_copies, len(plan.transfers)):
        numbers_by_file.setdefault(raw_copy.target, []).append(index)
    for index, check in enumerate(plan.checks if checks else (), plan.first_check_number):
        numbers_by_file.setdefault(f"{check.root}/{check.recorded.file}", []).append(index)
    return list(numbers_by_file.values())


def compute_work_share(plan: Plan, checks: bool, rank: int, ranks: int) -> WorkShare:
    """Compute the share of *plan* that *rank* executes. All shares add up to the plan."""
    numbers = [number for lane in group_work_by_file(plan, checks) for number in lane]
    sizes = [count_work_bytes(plan, number) for number in numbers]
    total = sum(sizes)
    first, end = total * rank // ranks, total * (rank + 1) // ranks
    work_ranges: dict[int, WorkRange] = {}
    position = 0
    for number, size in zip(numbers, sizes, strict=True):
        low, high = max(first - position, 0), min(end - position, size)
        if low < high:
            work_ranges[number] = WorkRange(low, high, size)
        position += size
    return WorkShare(work_ranges)


def count_work_bytes(plan: Plan, number: int) -> int:
    """Count the bytes of a transfer, raw copy or check, without repeated reads for checksums."""
    if number < len(plan.transfers):
        return plan.transfers[number].nbytes
    if number < plan.first_check_number:
        return plan.raw_copies[number - len(plan.transfers)].nbytes
    return sum(nbytes for _, nbytes in plan.checks[number - plan.first_check_number].gaps)
