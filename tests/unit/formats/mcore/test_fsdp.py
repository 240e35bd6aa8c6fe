"""What Megatron-FSDP saves beside the model that is put together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl.errors import RefusedError
from tests.checkpoints.mcore import write

MLP = "decoder.layers.0.mlp"
PARTS = ("linear_fc1.weight_w", "linear_fc1.weight_v", "experts.linear_fc2.weight0")


@pytest.mark.parametrize("part", PARTS[1:])
def test_unmappable_moments_of_fused_parts_are_refused(part: str, tmp_path: Path) -> None:
    """By the names that they have, they are of no tensor of the model."""
    moment = f"optimizer.state.module.{MLP}.{part}.exp_avg"
    names = (*(f"model.module.{MLP}.{one}" for one in PARTS), moment)
    source = write(tmp_path / "one", {name: torch.ones(2, 2) for name in names})
    for file in ("common.pt", "metadata.json"):
        (source / file).unlink()
    with pytest.raises(RefusedError, match="cannot map optimizer state to its parameter") as caught:
        ckptctl.convert(source, tmp_path / "never", to="dcp", only="all")
    assert moment in (caught.value.where or "") and "Megatron-FSDP" in (caught.value.why or "")
    done = ckptctl.convert(source, tmp_path / "out", to="dcp")
    assert any(f"are joined and renamed: `model.module.{MLP}" in n for n in done.plan.notes)
