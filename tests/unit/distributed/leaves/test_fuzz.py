"""No change of a pickle makes the process that reads it end, hang, or raise something else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[4]


@pytest.mark.parametrize("seconds", [1, pytest.param(120, marks=pytest.mark.slow)])
def test_mutated_leaves_are_read_or_refused(tmp_path: Path, seconds: int) -> None:
    seed = int(time.time()) if seconds > 60 else 1
    module = "tests.unit.distributed.leaves.fuzzing"
    told = [str(seconds), str(seed), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", module, *told],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    case = (tmp_path / "case").read_bytes()
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-4000:]}\n{case!r}"
    found = json.loads(done.stdout)
    assert not found["wrong"], f"seed {seed}: {found['wrong'][0]}"
    assert found["counts"]["read"] > 10
    assert found["counts"]["refused"] > 100
