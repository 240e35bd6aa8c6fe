"""The final save is planned before training: what would stop it then stops it before."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl.errors import (
    MappingError,
    RefusedError,
    SourceNotFoundError,
    UnmappedTensorError,
    UsageError,
)
from tests.checkpoints import save_hf
from tests.integration.manager_ranks import CONFIG, MODEL
from tests.integration.test_manager import log as log

ASSETS = "there is no config.json, which transformers requires; pass `assets=DIR` to copy it"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"final_format": "nope"}, "unknown format `nope`"),
        ({"final_format": "megatron"}, "format `megatron` can only be read"),
        ({"model_type": "llama9"}, "unknown model type `llama9`"),
        ({"keep": 3}, "3 is neither a glob nor a list of globs"),
        ({"keep_lats": 3}, "unknown option `keep_lats`"),
    ],
)
def test_invalid_manager_options_are_usage_errors(
    tmp_path: Path, option: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        ckptctl.CheckpointManager(tmp_path, **option)  # type: ignore[arg-type]


def test_plan_final_matches_save_final_and_writes_nothing(tmp_path: Path, log: io.StringIO) -> None:
    out, before = tmp_path / "out", os.listdir(tmp_path)
    with ckptctl.CheckpointManager(tmp_path / "run", sync=False) as manager:
        plan = manager.plan_final({"model": MODEL, "step": 3}, out)
        assert plan is not None and plan.tensors == len(MODEL)
        assert os.listdir(tmp_path) == before
        assert log.getvalue().startswith(f"{out}: {ASSETS}")
        assert manager.save_final({"model": MODEL, "step": 3}, out) == out
        assert log.getvalue().count(ASSETS) == 2
    found = {path.name: path.stat().st_size for path in out.iterdir()}
    assert found.items() >= {n: size for n, size in plan.files if n.endswith("s")}.items()
    assert not (out / "config.json").exists()


def test_plan_final_raises_errors_of_save_final(tmp_path: Path) -> None:
    assets = save_hf(tmp_path / "assets", {}, CONFIG)
    state = {"model": {**MODEL, "model.rotations": torch.zeros(3)}}
    with ckptctl.CheckpointManager(tmp_path / "run", final_format="meta") as manager:
        for arguments, error, said in (
            ({"assets": assets}, UnmappedTensorError, r"`exclude='model.rotations'`"),
            ({"assets": tmp_path / "elsewhere"}, SourceNotFoundError, ""),
            (
                {"assets": assets, "exclude": "*.rotations", "mp": 3},
                MappingError,
                "`mp` that divides",
            ),
            ({"resume": True}, UsageError, ""),
        ):
            with pytest.raises(error) as stopped:
                manager.plan_final(state, tmp_path / "out", **arguments)
            assert said in (stopped.value.hint or ""), stopped.value.hint
        assert manager.plan_final(state, tmp_path / "out", assets=assets, exclude="*.rotations")
        (tmp_path / "out" / "mine").mkdir(parents=True)
        with pytest.raises(RefusedError, match="exists"):
            manager.plan_final(state, tmp_path / "out", assets=assets, exclude="*.rotations")
