"""Units of many steps: their bytes, their checksums, the journal, and how they are left."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

import pytest
import torch

from ckptctl.errors import DamagedError
from ckptctl.planner.copying import copies
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from tests.sweeps import one_in
from tests.unit.storage.execution.test_executor import Case, identity, interrupted

HEADS, PAIRS, WIDTH = 8, 16, 256
SMALL = {"memory": 1}
"""A buffer of 64 KiB: what is copied below takes 16 of them."""


@pytest.fixture
def case(tmp_path):
    found = Case(tmp_path)
    axes = (HEADS, 2, PAIRS, WIDTH)

    def rope(data):
        tensor = torch.frombuffer(bytearray(data), dtype=torch.int16).view(axes)
        return tensor.transpose(1, 2).contiguous().numpy().tobytes()

    def wide(data):
        tensor = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).float()
        return tensor.view(torch.uint8).numpy().tobytes()

    found.add(
        (64 * HEADS, 2, PAIRS, WIDTH), ((0, 1, 2), (3,)), ((0, 1, 2), (3,)), lambda data: data
    )
    axes = (8 * HEADS, 2, PAIRS, WIDTH)
    found.add(axes, ((0, 1, 2), (3,)), ((0, 2, 1), (3,)), rope)
    found.add((1000, 1024), ((0,), (1,)), ((0,), (1,)), wide, to="float32")
    return found


@pytest.mark.parametrize("jobs", one_in(3, [1, 2, 5, 16]))
@pytest.mark.parametrize("checksum", [True, False])
def test_output_is_same_for_any_thread_count(case, jobs, checksum):
    plan = case.plan()
    limits = ExecutionOptions(jobs=jobs, **SMALL).compute_tile_limits()
    units = [
        list(copies.tile_transfer(one, plan.records, limits, plan.get_checked_tensors(number)))
        for number, one in enumerate(plan.transfers)
    ]
    assert len(units[0]) == 1 and units[0][0].is_flat
    assert [max(tile.steps for tile in tiles) > 15 for tiles in units[1:]] == [True, True]
    case.check(plan, case.run(plan, jobs=jobs, checksum=checksum, **SMALL), checksum)


@pytest.mark.parametrize("number", range(3))
def test_source_checksum_mismatch_is_damaged(case, number):
    path = case.source / f"s{number}"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    plan = case.plan()
    plan = replace(plan, sources=plan.sources | {path.name: identity(path)})
    with pytest.raises(DamagedError, match=path.name):
        case.run(plan, **SMALL)


@pytest.mark.parametrize("spoilt", [False, True])
def test_multi_step_units_are_resumed_atomically(case, monkeypatch, spoilt):
    plan = case.plan()
    done = interrupted(case, plan, monkeypatch, 3)
    if spoilt:
        write = done[-1].tile.list_writes()[-1]
        with (case.out / write.file).open("r+b") as file:
            file.seek(write.offset + write.nbytes - 1)
            file.write(b"!")
    case.check(plan, case.run(plan, journal=case.journal, resume=True))


def test_interrupt_leaves_multi_step_unit_unfinished(case, monkeypatch):
    plan = case.plan()
    steps = len(case.expected[0]) >> 16
    written, pwrite = [], os.pwrite

    def slow(descriptor, data, offset):
        written.append(offset)
        time.sleep(0.02)
        return pwrite(descriptor, data, offset)

    def interrupt(nbytes):
        assert nbytes < len(case.expected[0]), "progress is that of steps"
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", slow)
    with pytest.raises(KeyboardInterrupt):
        execute_plan(plan, case.out, ExecutionOptions(jobs=1, **SMALL), interrupt)
    assert not any(thread.name == "ckptctl-worker" for thread in threading.enumerate())
    assert 0 < len(written) < steps
