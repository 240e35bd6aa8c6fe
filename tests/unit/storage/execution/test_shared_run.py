"""One plan in the shares of several processes: the same files, checksums and refusals as in one."""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from ckptctl.errors import CkptError, DamagedError
from ckptctl.planner.balance import compute_work_share, group_work_by_file
from ckptctl.planner.copying import blocks
from ckptctl.planner.copying.copies import tile_transfer
from ckptctl.planner.plan import Plan
from ckptctl.planner.strided import StridedTensor
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.execution.executor import PlanExecution
from tests.unit.storage.execution.test_executor import Case

SMALL = {"memory": 1 << 10, "jobs": 1}


@pytest.fixture
def case(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "FEW_RUNS_LIMIT", 512)
    return Case(tmp_path)


def plan_of(case) -> Plan:
    """Return a plan some of whose records are many tiles, so that ranks share them."""
    rows = ((0,), (1,))
    case.add((4096, 64), rows, rows, lambda data: data)

    def rope(data):
        tensor = torch.frombuffer(bytearray(data), dtype=torch.int16)
        return tensor.view(32, 2, 64, 64).transpose(1, 2).contiguous().numpy().tobytes()

    case.add((32, 2, 64, 64), ((0, 1, 2), (3,)), ((0, 2, 1), (3,)), rope)
    plan: Plan = case.everything()
    return plan


def carry_out(case, plan, ranks, **options):
    """Do what the ranks do, one after the other, the last one first."""
    how = ExecutionOptions(**options)
    case.progress = 0

    def count(nbytes):
        case.progress += nbytes

    with ExitStack() as stack:
        runs = [
            PlanExecution(
                plan,
                case.out,
                how,
                stack,
                share=compute_work_share(plan, how.checksum, rank, ranks),
            )
            for rank in range(ranks)
        ]
        runs[0].output.create_files()
        for run in reversed(runs):
            assert run.output.have_full_size()
            run.fill_files(count)
        runs[0].finish_shared_plan([run.export_entries() for run in runs[1:]])
        return runs[0].build_result()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
def test_shared_run_matches_bytes_and_checksums(case, ranks):
    plan = plan_of(case)
    case.check(plan, carry_out(case, plan, ranks, **SMALL))


@pytest.mark.parametrize("ranks", [2, 5])
def test_shared_run_without_checksums_matches_bytes(case, ranks):
    plan = plan_of(case)
    done = carry_out(case, plan, ranks, checksum=False, **SMALL)
    case.check(plan, done, checksum=False)


def test_checksum_of_source_split_across_ranks_is_verified(case):
    """Each of them reads a part, neither can compare: the one that finishes does."""
    rows = ((0,), (1,))
    case.add((4096, 64), rows, rows, lambda data: data)
    plan: Plan = case.plan()
    (transfer,) = plan.transfers
    (entry,) = transfer.iterate_stored_tensors()
    (extent,) = entry.extents
    wrong = replace(entry, extents=(replace(extent, crc32=(extent.crc32 or 0) ^ 1),))
    damaged = replace(plan, transfers=(replace(transfer, tensor=StridedTensor.from_entry(wrong)),))
    with pytest.raises(DamagedError, match="checksum"):
        carry_out(case, damaged, 2, **SMALL)


def test_missing_share_fails_finish(case):
    plan = plan_of(case)
    how = ExecutionOptions(jobs=1)
    with ExitStack() as stack:
        run = PlanExecution(plan, case.out, how, stack, share=compute_work_share(plan, True, 0, 2))
        run.output.create_files()
        run.fill_files(lambda _: None)
        with pytest.raises(CkptError, match="not written completely"):
            run.finish_shared_plan([])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 64])
def test_every_tile_is_owned_by_one_rank(case, ranks):
    plan = plan_of(case)
    limits = ExecutionOptions(**SMALL).compute_tile_limits()
    shares = [compute_work_share(plan, True, rank, ranks) for rank in range(ranks)]
    for number, transfer in enumerate(plan.transfers):
        tiles = list(
            tile_transfer(transfer, plan.records, limits, plan.get_checked_tensors(number))
        )
        owned = sorted(
            index for share in shares for index, _ in share.iterate_tiles(number, iter(tiles))
        )
        assert owned == list(range(len(tiles)))
    total = sum(share.nbytes for share in shares)
    assert max(share.nbytes for share in shares) - total / ranks < 1
    # Neighbors: each cut goes through at most one file.
    held = {number for share in shares for number in share.ranges}
    order = [number for lane in group_work_by_file(plan, True) for number in lane if number in held]
    for share in shares:
        places = [order.index(number) for number in share.ranges]
        assert not places or places == list(range(places[0], places[-1] + 1))


def test_file_of_single_rank_is_finished_by_that_rank(case):
    plan = plan_of(case)
    how = ExecutionOptions(jobs=1)
    with ExitStack() as stack:
        shares = [compute_work_share(plan, True, rank, 2) for rank in range(2)]
        runs = [PlanExecution(plan, case.out, how, stack, share=share) for share in shares]
        runs[0].output.create_files()
        for run in runs:
            run.fill_files(lambda _: None)
        assert runs[0].export_entries().finished == []
        assert runs[1].export_entries().finished == ["sub/config.json"]
        assert zlib.crc32((case.out / "all.bin").read_bytes()[:4]) == zlib.crc32(bytes(4))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_cast_losses_are_summed_over_ranks(case, ranks):
    """Each of them casts a part of the tensor to fp16."""
    rows = ((0,), (1,))
    lost = []

    def cast(data):
        values = torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
        made = values.to(torch.float16)
        lost.append(int((made.isinf() & ~values.isinf()).sum()))
        return made.view(torch.uint8).numpy().tobytes()

    case.add((4096, 64), rows, rows, cast, to="float16")
    done = carry_out(case, case.plan(), ranks, **SMALL)
    assert [one.infinite for one in done.lost.values()] == lost
    assert lost[0] > 1000
