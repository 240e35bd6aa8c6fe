"""The work of consolidating the metadata of many ranks grows with the tensors, and no faster."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from ckptctl.verbs.consolidate_metadata import plan_metadata, run_metadata
from ckptctl.verbs.verification.verify import verify_checkpoint
from ckptctl.verbs.verification.verify_options import VerifyOptions
from tests import effort
from tests.benchmarks.build_ranks import ranks


@pytest.mark.slow
def test_metadata_work_grows_linearly_with_tensors(tmp_path: Path) -> None:
    """Every item is checked."""

    def work(tensors: int) -> None:
        folder = tmp_path / str(next(numbers))
        ranks(folder, 16, tensors, 64)
        with effort.counted() as counted:
            plan = plan_metadata(folder)
            assert (plan.ranks, plan.tensors, plan.chunks) == (16, tensors, 16 * tensors)
            run_metadata(plan)
            assert verify_checkpoint(folder, VerifyOptions(level="fast")).verdict == "complete"
        spent.append(counted.lines)

    numbers, spent = count(), list[int]()
    for tensors in (10, 40, 80):
        work(tensors)
    assert spent[2] < 2.1 * spent[1]
