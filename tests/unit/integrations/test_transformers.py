"""The callback of transformers' Trainer, without a Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ckptctl.distributed.run.manager import CheckpointManager

pytest.importorskip("transformers")


def test_evaluation_after_step_is_deleted_does_not_fail(tmp_path: Path) -> None:
    from ckptctl.integrations.transformers import CheckpointCallback

    with CheckpointManager(tmp_path / "run", sync=False) as manager:
        manager.save(5, {"w": torch.ones(3)})
        callback = CheckpointCallback(manager)
        callback._saved |= {4, 5}
        for step in (4, 5):
            state = SimpleNamespace(global_step=step)
            callback.on_evaluate(None, state, None, {"eval_loss": 0.5, "note": "x"})
    rated = json.loads((tmp_path / "run/step-5/ckptctl.run.json").read_text())
    assert rated["metrics"] == {"eval_loss": 0.5}
