"""What a plan of a conversion says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptctl.conversion import plan as plans
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.convert import plan_conversion
from ckptctl.planner.copying.copies import needs_permutation
from ckptctl.planner.plan import Transfer
from tests.checkpoints.dcp import save_dcp


def test_permutation_check_runs_once_per_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_dcp(tmp_path / "source", {"a": torch.ones(4, 6), "b": torch.ones(3)})
    looked_at: list[str] = []

    def noted(transfer: Transfer) -> bool:
        looked_at.append(transfer.name)
        return needs_permutation(transfer)

    monkeypatch.setattr(plans, "needs_permutation", noted)
    plan = plan_conversion(source, tmp_path / "out", ConversionOptions(to="torch"))
    assert plan.to_json()["arithmetic"] is plan.arithmetic is False
    assert plan.memory_bytes < 200 << 20
    assert looked_at == ["a", "b"]
