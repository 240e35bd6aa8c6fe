"""torchtitan: training that is resumed ends as training that was not interrupted, bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.gloo import run_on_ranks

JOBS = "tests.oracle.integrations.torchtitan_jobs:"

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"
    ),
]


def test_resume_with_either_manager_is_bit_exact(tmp_path: Path) -> None:
    run_on_ranks(JOBS + "resume", (2,), str(tmp_path))


def test_model_only_save_starts_new_run_at_step_0(tmp_path: Path) -> None:
    run_on_ranks(JOBS + "model_only", (2,), str(tmp_path))


def test_run_restarted_from_older_step_keeps_every_save(tmp_path: Path) -> None:
    run_on_ranks(JOBS + "branches", (2,), str(tmp_path))
