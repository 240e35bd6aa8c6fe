"""Who writes what, whether plans hold, and what the metadata says of it."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ckptctl.catalog import Blob, compute_row_major_strides
from ckptctl.errors import CkptError, CoverageError, MappingError, RefusedError
from ckptctl.formats.dcp.metadata import Item, decode_metadata
from ckptctl.planner.balance import MIN_PIECE_BYTES
from ckptctl.ranks.coordinator import RankError, SingleProcess, gather_and_scatter
from ckptctl.save_load.rank_agreement import (
    RankStatement,
    are_cached_plans_valid,
    compute_generation,
    require_agreement,
)
from ckptctl.save_load.saving.global_plan import make_global_plan
from ckptctl.save_load.saving.local_shards import (
    LocalChunk,
    LocalShards,
    PackedShards,
    TensorMeta,
    assign_values_to_ranks,
    choose_values_to_write,
    compute_group_digests,
    pack_shards,
    unpack_groups,
)
from ckptctl.save_load.saving.save_files import append_values, lay_out_tensors, make_tensor_metadata


def shards(
    boxes: Mapping[str, Sequence[tuple[tuple[int, ...], tuple[int, ...]]]],
    shapes: Mapping[str, tuple[int, ...]],
    values: Mapping[str, int] | None = None,
    dtype: str = "float32",
) -> LocalShards:
    values = values or {}
    return LocalShards(
        {n: TensorMeta(dtype, shapes[n], (n,), False) for n in boxes},
        [LocalChunk(n, *box) for n, found in boxes.items() for box in found],
        {name: bytes([value]) * 16 for name, value in values.items()},
        {name: ("values", name) for name in values},
    )


ROWS = [
    shards({"w": [((rank * 2, 0), (2, 3))], "b": [((0,), (6,))]}, {"w": (4, 3), "b": (6,)})
    for rank in range(2)
]


def packed(holdings: Sequence[LocalShards]) -> list[PackedShards]:
    """Return them as they arrive, the structure once."""
    found: list[PackedShards] = []
    for one in map(pack_shards, holdings):
        known = any(one.identity == other.identity for other in found)
        found.append(one.without_structure() if known else one)
    return found


def test_each_box_is_written_by_one_rank() -> None:
    global_plan = make_global_plan(packed(ROWS))
    assert [tensor.name for tensor in global_plan.tensors] == ["w", "b"]
    assert [list(share.chunks) for share in global_plan.shares] == [[0, 1], [0]]
    assert [list(ranks) for ranks in global_plan.writers] == [[0, 1], [0]]


def test_gaps_overlaps_and_out_of_bounds_are_coverage_errors() -> None:
    for second, said in (
        (((3, 0), (1, 3)), "[2:3, 0:3]` are not covered by any rank"),
        (((1, 0), (3, 3)), "[1:2, 0:3]` are covered more than once"),
        (((2, 0), (3, 3)), "[2:5, 0:3]` are out of bounds"),
    ):
        held = [shards({"w": [box]}, {"w": (4, 3)}) for box in (((0, 0), (2, 3)), second)]
        with pytest.raises(CoverageError) as failure:
            make_global_plan(packed(held))
        assert failure.value.why and said in failure.value.why


def test_dtype_mismatch_between_ranks_is_a_mapping_error() -> None:
    other = shards({"w": [((2, 0), (2, 3))]}, {"w": (4, 3)}, dtype="bfloat16")
    with pytest.raises(MappingError, match="ranks 0 and 1 disagree on `w`") as failure:
        make_global_plan(packed([ROWS[0], other]))
    assert failure.value.why == "dtype: float32 and bfloat16"


def test_large_replicas_are_split_evenly_among_ranks() -> None:
    shape = (64, MIN_PIECE_BYTES // 16)
    held = [shards({"w": [((0, 0), shape)]}, {"w": shape}) for _ in range(4)]
    global_plan = make_global_plan(packed(held))
    written = Counter(rank for ranks in global_plan.writers for rank in ranks)
    assert len(written) == 4 and max(written.values()) == min(written.values())
    for rank, share in enumerate(global_plan.shares):
        files = lay_out_tensors(rank, held[rank], share, [compute_row_major_strides(shape)])
        assert [copy.nbytes for copy in files.plan.transfers] == [
            box.numel * 4 for box in share.parts.values()
        ]


@pytest.mark.parametrize("large", [(1500, 1000), (2, 750_000), (1_500_000,)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_replica_above_fair_share_is_split(large: tuple[int, ...], ranks: int) -> None:
    shapes = {"large": large, **{f"{rows}": (rows, 64) for rows in range(100, 1100, 100)}}
    held = shards({name: [((0,) * len(one), one)] for name, one in shapes.items()}, shapes)
    global_plan = make_global_plan([pack_shards(held)] * ranks)
    load = Counter[int]()
    for boxes, writers in zip(global_plan.boxes, global_plan.writers, strict=True):
        for box, rank in zip(boxes, writers, strict=True):
            load[rank] += box.numel
    assert max(load.values()) * ranks / load.total() <= 1.02
    assert len(global_plan.boxes[0]) > ranks


def test_evenly_distributed_replicas_are_not_split() -> None:
    shapes = dict.fromkeys("abcd", (1000, 1000))
    held = shards({name: [((0, 0), one)] for name, one in shapes.items()}, shapes)
    assert all(len(boxes) == 1 for boxes in make_global_plan([pack_shards(held)] * 4).boxes)
    alone = {**shapes, "own": (9000, 1000)}
    first = shards({name: [((0, 0), one)] for name, one in alone.items()}, alone)
    assert all(len(boxes) == 1 for boxes in make_global_plan(packed([first, held])).boxes)


def test_tensors_of_only_some_ranks_are_planned() -> None:
    first = shards({"a": [((0,), (2,))], "b": [((0,), (2,))]}, {"a": (2,), "b": (2,)})
    second = shards({"c": [((0,), (2,))], "b": [((0,), (2,))]}, {"c": (2,), "b": (2,)})
    global_plan = make_global_plan(packed([first, second]))
    assert [tensor.name for tensor in global_plan.tensors] == ["a", "b", "c"]
    assert [list(share.chunks) for share in global_plan.shares] == [[0, 1], [0]]


def test_several_boxes_of_one_rank_are_planned() -> None:
    held = shards({"a": [((0,), (1,)), ((1,), (3,))], "b": [((0,), (1,))]}, {"a": (4,), "b": (1,)})
    global_plan = make_global_plan([pack_shards(held)])
    assert list(global_plan.shares[0].chunks) == [0, 1, 2]


def test_packing_unordered_chunks_is_an_error() -> None:
    mixed = LocalShards(ROWS[0].tensors, list(reversed(ROWS[0].chunks)))
    with pytest.raises(CkptError, match="order"):
        pack_shards(mixed)


def test_metadata_lists_file_positions_of_boxes_and_values() -> None:
    held = [
        shards({"w": [((r * 2, 0), (2, 3))]}, {"w": (4, 3)}, {"step": 1, "rng": r})
        for r in range(2)
    ]
    global_plan = make_global_plan(packed(held))
    contents = {"step": b"step", "rng": b"rng state"}
    written = []
    values = []
    for rank, (own, share) in enumerate(zip(held, global_plan.shares, strict=True)):
        files = lay_out_tensors(rank, own, share, [(3, 1)])
        whole = append_values(rank, files, share.values, contents)
        written.append(files.items)
        values += [
            (Blob(name, global_plan.paths[name]), item) for name, item in whole.items.items()
        ]
        assert whole.plan.files[0].size == files.plan.files[0].size + sum(
            len(contents[name]) for name in share.values
        )
    made = make_tensor_metadata(global_plan, written)
    leaves = decode_metadata(b"".join(made.add_values(values)), "x").leaves
    assert list(leaves) == ["w", "step", "rng", "rank_1.values.rng"]
    assert leaves["w"].extents.files == ["__0_0.distcp", "__1_0.distcp"]
    assert leaves["rank_1.values.rng"].path == ("rank_1", "values", "rng")
    rng = leaves["rank_1.values.rng"].item
    assert rng is not None and rng.file == "__1_0.distcp"
    other = decode_metadata(b"".join(made.add_values([])), "x").leaves
    assert list(other) == ["w"]
    assert other["w"] == leaves["w"]


def test_save_metadata_loads_as_torch_metadata(tmp_path: Any) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

    names = [f"value {number}" for number in range(2500)]
    values = [(Blob(name, (name,)), Item("__0_0.distcp", 5, 6)) for name in names]
    global_plan = make_global_plan(packed(ROWS))
    files = [
        lay_out_tensors(
            rank, own, share, [compute_row_major_strides(chunk.sizes) for chunk in own.chunks]
        ).items
        for rank, (own, share) in enumerate(zip(ROWS, global_plan.shares, strict=True))
    ]
    found = pickle.loads(b"".join(make_tensor_metadata(global_plan, files).add_values(values)))
    assert isinstance(found, Metadata)
    assert list(found.state_dict_metadata) == ["w", "b", *names]
    assert isinstance(found.state_dict_metadata["value 7"], BytesStorageMetadata)
    assert len(found.storage_data) == 3 + len(names)
    assert found.planner_data["value 7"] == ("value 7",)


# Values


def value_state(
    values: Sequence[Mapping[str, int]],
) -> tuple[list[PackedShards], list[LocalShards]]:
    held = [shards({}, {}, one) for one in values]
    return packed(held), held


def test_equal_values_are_written_once_differing_per_rank() -> None:
    found, _ = value_state([{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 1}])
    global_plan = make_global_plan(found)
    assert [share.values for share in global_plan.shares] == [
        {"a": "a", "b": "b"},
        {"b": "rank_1.values.b"},
        {"c": "c", "b": "rank_2.values.b"},
    ]


@pytest.mark.parametrize(
    "later",
    [
        [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 1, "c": 5}],
        [{"a": 9, "b": 7}, {"a": 9, "b": 7}, {"a": 9, "c": 1}],
        [{"a": 3, "b": 2}, {"a": 3, "b": 1}, {"a": 3, "c": 1}],
    ],
)
def test_value_groups_match_new_global_plan(later: list[dict[str, int]]) -> None:
    found, held = value_state([{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 1, "c": 1}])
    structures = {one.identity: one.structure for one in map(pack_shards, held) if one.structure}
    divided = assign_values_to_ranks(found, structures)
    now, holdings = value_state(later)
    groups = [
        unpack_groups(list(own.paths), packed_groups)
        for own, packed_groups in zip(held, divided.groups_by_rank, strict=True)
    ]
    said = [compute_group_digests(g, own.values) for g, own in zip(groups, holdings, strict=True)]
    written = [
        choose_values_to_write(rank, groups[rank], own, said) for rank, own in enumerate(holdings)
    ]
    assert written == [dict(share.values) for share in make_global_plan(now).shares]


# Agreement


def statement(**changed: Any) -> RankStatement:
    return RankStatement("/x", {"files": 1}, b"key", b"identity")._replace(**changed)


def test_cached_plan_is_valid_only_if_all_ranks_agree() -> None:
    said = [statement(), statement(nonce=b"other")]
    current = compute_generation(said)
    held = [one._replace(generation=current, groups={1: b"v"}) for one in said]
    assert are_cached_plans_valid(held)
    assert not are_cached_plans_valid([held[0], held[1]._replace(generation=b"")])
    again = compute_generation([held[0], held[1]._replace(nonce=b"another call")])
    assert not are_cached_plans_valid([held[0], held[1]._replace(generation=again)])
    assert not are_cached_plans_valid([held[0], held[1]._replace(groups={1: b"w"})])
    assert are_cached_plans_valid([held[0], held[1]._replace(groups={1: b"v", -1: b"w"})])
    assert not are_cached_plans_valid(said)


def test_different_destinations_and_options_are_refused() -> None:
    with pytest.raises(RefusedError, match="destinations"):
        require_agreement([statement(), statement(target="/y")], 0)
    with pytest.raises(RefusedError, match="options: files"):
        require_agreement([statement(), statement(options={"files": 2})], 0)
    with pytest.raises(RankError, match="rank 1: no"):
        require_agreement([statement(), statement(problem=CkptError("no"))], 0)


def test_through_first_returns_result_or_raises_cause() -> None:
    assert gather_and_scatter(SingleProcess(), lambda: 3, lambda found: [found[0] + 1]) == 4
    with pytest.raises(ZeroDivisionError):
        gather_and_scatter(SingleProcess(), lambda: 1 // 0, lambda found: found)
    with pytest.raises(ZeroDivisionError):
        gather_and_scatter(SingleProcess(), lambda: 1, lambda found: [1 // 0])
