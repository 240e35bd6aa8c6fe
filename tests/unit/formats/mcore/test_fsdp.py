"""What Megatron-FSDP saves beside the model that is put together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl.errors import CoverageError, RefusedError
from tests.checkpoints.mcore import write

MLP = "decoder.layers.0.mlp"
PARTS = (
    "linear_fc1.weight_w",
    "linear_fc1.weight_v",
    "experts.linear_fc2.weight0",
    "experts.linear_fc2.weight1",
)


def write_run(folder: Path, states: dict[str, torch.Tensor]) -> Path:
    """Write the parts of a model, and *states* by the part and the name of the state."""
    model = {f"model.module.{MLP}.{part}": torch.randn(2, 2) for part in PARTS}
    moments = {f"optimizer.state.module.{MLP}.{name}": value for name, value in states.items()}
    source = write(folder, {**model, **moments})
    for file in ("common.pt", "metadata.json"):
        (source / file).unlink()
    return source


def test_moments_of_parts_are_joined_like_parameters(tmp_path: Path) -> None:
    states = {f"{part}.{kind}": torch.randn(2, 2) for part in PARTS for kind in ("exp_avg", "m2")}
    source = write_run(tmp_path / "one", states)
    done = ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    for kind in ("exp_avg", "m2"):
        fused = found[f"optimizer.state.module.{MLP}.linear_fc1.weight.{kind}"]
        assert torch.equal(fused, torch.cat([states[f"{part}.{kind}"] for part in PARTS[:2]]))
        experts = found[f"optimizer.state.module.{MLP}.experts.experts.linear_fc2.weight.{kind}"]
        assert torch.equal(experts, torch.stack([states[f"{part}.{kind}"] for part in PARTS[2:]]))
    assert any("are joined and renamed" in note for note in done.plan.notes)


def test_missing_moment_of_a_part_is_an_error(tmp_path: Path) -> None:
    source = write_run(tmp_path / "one", {f"{PARTS[0]}.exp_avg": torch.ones(2, 2)})
    with pytest.raises(CoverageError, match=r"linear_fc1\.weight\.exp_avg` is missing"):
        ckptctl.convert(source, tmp_path / "never", to="dcp", only="all")


@pytest.mark.parametrize("part", PARTS[1:3])
def test_counters_of_parts_are_refused(part: str, tmp_path: Path) -> None:
    """It is unknown whether all parts have counted as many steps."""
    source = write_run(tmp_path / "one", {f"{part}.step": torch.tensor(3.0)})
    with pytest.raises(RefusedError, match="cannot map optimizer state to its parameter") as caught:
        ckptctl.convert(source, tmp_path / "never", to="dcp", only="all")
    assert f"{part}.step" in (caught.value.where or "")
    assert "Megatron-FSDP" in (caught.value.why or "")
    ckptctl.convert(source, tmp_path / "out", to="dcp")
