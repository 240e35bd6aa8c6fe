"""Lightning: training that is resumed ends as training that was not interrupted, bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.gloo import run_on_ranks

JOBS = "tests.oracle.integrations.lightning_jobs:"

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="lightning is not installed"
    ),
]


def test_single_process_resume_is_bit_exact(tmp_path: Path) -> None:
    run_on_ranks(JOBS + "without_ranks", (1,), tmp_path, library="lightning")


def test_fsdp2_resume_is_bit_exact(tmp_path: Path) -> None:
    run_on_ranks(JOBS + "sharded", (2,), str(tmp_path), library="lightning")


def test_last_checkpoint_hard_links_equal_data(tmp_path: Path) -> None:
    run_on_ranks(JOBS + "last_is_linked", (2,), str(tmp_path), library="lightning")
