"""transformers: training that is resumed ends as training that was not interrupted."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.gloo import run_on_ranks

JOBS = "tests.oracle.integrations.transformers_jobs:"
LIBRARY = "transformers.trainer"

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
    ),
]


@pytest.mark.parametrize("world", [1, 2])
def test_resumed_training_is_bit_exact(tmp_path: Path, world: int) -> None:
    run_on_ranks(JOBS + "resume", (world,), str(tmp_path), library=LIBRARY)


def test_saved_checkpoint_records_eval_loss(tmp_path: Path) -> None:
    run_on_ranks(JOBS + "rated", (1,), str(tmp_path), library=LIBRARY)


def test_save_after_evaluation_resumes_with_same_history(tmp_path: Path) -> None:
    run_on_ranks(JOBS + "evaluated", (1,), str(tmp_path), library=LIBRARY)


@pytest.mark.parametrize("world", [1, 2])
def test_resumed_adapter_training_is_bit_exact(tmp_path: Path, world: int) -> None:
    pytest.importorskip("peft")
    run_on_ranks(JOBS + "adapters", (world,), str(tmp_path), library=LIBRARY)


@pytest.mark.parametrize("world", [1, 2])
def test_preempted_training_saves_last_step_and_resumes(tmp_path: Path, world: int) -> None:
    run_on_ranks(JOBS + "preempted", (world,), str(tmp_path), library=LIBRARY)
