"""Metadata of many ranks is consolidated in seconds, whatever else the machine does."""

from __future__ import annotations

import time
from pathlib import Path

from ckptctl.ops.consolidate_metadata import plan_metadata, run_metadata
from ckptctl.ops.verification.options import VerifyOptions
from ckptctl.ops.verification.verify import verify
from tests.benchmarks.build_ranks import ranks


def test_a_thousand_tensors_of_sixteen_ranks(tmp_path: Path) -> None:
    """16,000 chunks, every item checked: half a second of work on an idle machine."""
    folder = tmp_path / "ckpt"
    ranks(folder, 16, 1000, 64)
    start = time.process_time()
    plan = plan_metadata(folder)
    spent = time.process_time() - start
    assert (plan.ranks, plan.tensors, plan.chunks) == (16, 1000, 16_000)
    assert spent < 4
    run_metadata(plan)
    start = time.process_time()
    assert verify(folder, VerifyOptions(level="fast")).whole
    assert time.process_time() - start < 4
