"""Who writes what: bytes are spread evenly, small chunks stay together, large ones are cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.catalog import Box
from ckptctl.planner.balance import (
    DEFAULT_SHARD_COUNT,
    MAX_FINE_PIECES,
    MIN_FILE_BYTES,
    MIN_FINE_PIECE_BYTES,
    MIN_PIECE_BYTES,
    PIECES_PER_RANK,
    SMALL_CHUNK_BYTES,
    assign_chunks,
    choose_shard_limit,
    compute_fine_piece_limit,
    compute_piece_limit,
    count_output_files,
    group_into_shards,
    split_box,
)
from ckptctl.planner.boxes import compute_coverage

MIB, GB = 1 << 20, 10**9


def evenness(
    chunks: Sequence[tuple[int, Sequence[int]]], chosen: Sequence[int], ranks: int
) -> float:
    load = [0] * ranks
    for (nbytes, _), rank in zip(chunks, chosen, strict=True):
        load[rank] += nbytes
    return max(load) * ranks / sum(load)


def test_ascending_sizes_are_balanced() -> None:
    """Torch 2.13 goes by plan order: max/mean 1.269."""
    chunks = [(size * MIB, range(4)) for size in range(1, 30)]
    assert evenness(chunks, assign_chunks(chunks, 4), 4) <= 1.02


def test_fixed_load_counts_regardless_of_order() -> None:
    chunks = [(MIB, (0, 1)), (MIB, (0,))]
    assert assign_chunks(chunks, 2) == [1, 0]
    assert assign_chunks(list(reversed(chunks)), 2) == [0, 1]
    assert assign_chunks([(MIB, (0, 1))], 2, initial_loads=[1, 0]) == [1]


def test_small_chunks_stay_together_until_balance_suffers() -> None:
    chunks = [(10 * MIB, (0, 1)), (10 * MIB, (0, 1)), *[(8, (0, 1))] * 50]
    chosen = assign_chunks(chunks, 2)
    assert set(chosen[2:27]) == {0}
    many = [(SMALL_CHUNK_BYTES - 1, range(4))] * 400
    assert evenness(many, assign_chunks(many, 4), 4) <= 1.02


def test_empty_chunks_are_assigned_to_holders() -> None:
    assert assign_chunks([(0, (1, 2)), (0, (2,))], 3) == [1, 2]
    assert assign_chunks([], 3) == []


def test_ties_go_to_lowest_rank() -> None:
    assert assign_chunks([(MIB, (2, 1, 0))], 3) == [0]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 20),
            st.sets(st.integers(0, 5), min_size=1).map(sorted),
        ),
        max_size=40,
    )
)
def test_assignment_matches_simple_rule(chunks: list[tuple[int, list[int]]]) -> None:
    assert assign_chunks(chunks, 6, small_bytes=0) == plain(chunks, 6)


def plain(chunks: Sequence[tuple[int, Sequence[int]]], ranks: int) -> list[int]:
    load, chosen = [0] * ranks, [-1] * len(chunks)
    alone = [i for i, (_, holders) in enumerate(chunks) if len(holders) == 1]
    shared = sorted(
        (i for i, (_, holders) in enumerate(chunks) if len(holders) > 1),
        key=lambda i: (-chunks[i][0], i),
    )
    for i in (*alone, *shared):
        nbytes, holders = chunks[i]
        chosen[i] = min(holders, key=lambda rank: (load[rank], rank))
        load[chosen[i]] += nbytes
    return chosen


@pytest.mark.parametrize(
    ("sizes", "count"),
    [((100, 7), 12), ((1, 100, 7), 12), ((1, 1), 1), ((), 1), ((3,), 3), ((2, 100), 12)],
)
def test_cut_pieces_tile_box(sizes: tuple[int, ...], count: int) -> None:
    box = Box(tuple(range(5, 5 + len(sizes))), sizes)
    pieces = split_box(box, 1000, 90)
    shifted = [
        Box(tuple(o - b for o, b in zip(piece.offsets, box.offsets, strict=True)), piece.sizes)
        for piece in pieces
    ]
    assert compute_coverage(sizes, shifted).is_exact
    assert len(pieces) == count


def test_piece_limits_follow_size_and_rank_count() -> None:
    assert compute_piece_limit(1 << 40, 4) == (1 << 40) // 4 // PIECES_PER_RANK
    assert compute_piece_limit(100, 4) == MIN_PIECE_BYTES
    assert compute_fine_piece_limit(1 << 40, 4) == compute_piece_limit(1 << 40, 4) // 2
    assert compute_fine_piece_limit(100, 4) == MIN_FINE_PIECE_BYTES
    assert compute_fine_piece_limit(10 * GB, 2048) == 10 * GB // MAX_FINE_PIECES
    assert compute_fine_piece_limit(10 * GB, 1 << 20) < MIN_PIECE_BYTES
    assert split_box(Box((0,), (10,)), 10, 10) == [Box((0,), (10,))]


def test_file_count_follows_bytes_and_threads() -> None:
    counts = [
        count_output_files(nbytes, 8)
        for nbytes in (0, 1, 2 * MIN_FILE_BYTES, 3 * MIN_FILE_BYTES - 1)
    ]
    assert counts == [1, 1, 2, 2]
    assert count_output_files(1 << 40, 8) == 8
    assert count_output_files(1 << 40, 1) == 1


@pytest.mark.parametrize(
    ("nbytes", "one_file", "expected"),
    [
        (10, 5 * GB, 5 * GB),
        (5 * GB, 5 * GB, 5 * GB),
        (16 * GB, 5 * GB, GB),
        (4 * GB, 0, 256_000_000),
        (8 * GB, 0, GB // 2),
        (140 * GB, 5 * GB, 5 * GB),
        (0, 0, 256_000_000),
    ],
)
def test_shard_limit_depends_only_on_sizes(nbytes: int, one_file: int, expected: int) -> None:
    sizes = [(f"{index}", max(nbytes // 1120, min(nbytes, 1))) for index in range(1120)]
    assert choose_shard_limit(sizes, one_file) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    "tensors",
    [
        [500_000_000] * 2 + [117_000_000] * 60,
        [33_000_000] * 300,
        [1_050_000_000, *[60_000_000] * 90],
    ],
)
def test_shards_fit_sixteen_threads_evenly(tensors: list[int]) -> None:
    sizes = [(f"{index}", nbytes) for index, nbytes in enumerate(tensors)]
    limit = choose_shard_limit(sizes, 0)
    held = [sum(tensors[int(name)] for name in shard) for shard in group_into_shards(sizes, limit)]
    assert len(held) <= DEFAULT_SHARD_COUNT
    assert max(held) <= max(*tensors, 1.25 * sum(tensors) / DEFAULT_SHARD_COUNT)
