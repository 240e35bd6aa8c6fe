"""The numbers that end every conversion: no tensor is uncounted, on either side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.conversion.plan import ConversionPlan
from ckptctl.conversion.summary import Amount, TensorCounts
from tests.checkpoints.golden import Golden, family_of, names
from tests.sweeps import one_in

QUICK = ("phi3", "qwen3_moe", "qwen3.tied")
GOLDEN = {name: Golden.read(name) for name in names()}
SWEPT = [
    pytest.param(name, layout, marks=() if name in QUICK else pytest.mark.slow)
    for name, golden in GOLDEN.items()
    for layout in golden.digests
]


def balanced(plan: ConversionPlan) -> None:
    """Hold that every tensor is counted once on each side."""
    found = plan.summary
    groups = (found.fused, found.divided, found.regrouped, found.repeated)
    before = found.read.tensors + found.taken
    gone = found.dropped + found.left_out + found.missing
    alone = before - gone - sum(one.tensors for one in groups)
    assert alone >= 0
    assert alone + sum(one.into for one in groups) + found.made == found.written.tensors
    assert found.dropped == len(plan.dropped)


@pytest.mark.parametrize(("name", "layout"), one_in(4, SWEPT))
def test_summary_is_balanced_in_both_directions(tmp_path: Path, name: str, layout: str) -> None:
    golden = GOLDEN[name]
    source = golden.save(tmp_path / "source")
    kind: Any = {"model_type": family_of(name)}
    there = ckptctl.convert(source, tmp_path / "t.pt", to="torch", to_layout=layout, **kind).plan
    balanced(there)
    written = torch.load(tmp_path / "t.pt", weights_only=True)
    storages = {v.untyped_storage().data_ptr(): v.nbytes for v in written.values()}
    assert there.summary.written == Amount(len(written), sum(storages.values()))
    assert there.summary.read.tensors == len(golden.tensors)
    options: Any = kind | {"from_layout": layout, "assets": source}
    options["to_layout"] = there.from_layout
    back = ckptctl.plan_conversion(tmp_path / "t.pt", tmp_path / "b.pt", to="torch", **options)
    balanced(back)
    assert back.summary.read == there.summary.written
    # What was fused on the way there is divided on the way back.
    flipped = TensorCounts(back.summary.divided.into, back.summary.divided.tensors)
    assert there.summary.fused == flipped or there.summary.made or back.summary.dropped


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return GOLDEN["llama3"].save(tmp_path / "llama")


def test_summary_counts_stacked_experts_as_fused(tmp_path: Path) -> None:
    source = GOLDEN["qwen3_moe"].save(tmp_path / "source")
    options: Any = {"to": "torch", "to_layout": "hf-v5"}
    plan = ckptctl.plan_conversion(source, tmp_path / "out.pt", **options)
    experts = [name for name in GOLDEN["qwen3_moe"].tensors if ".experts." in name]
    assert plan.summary.fused == TensorCounts(len(experts), 4)
    assert f"({len(experts)} fused into 4)" in plan.summary.sentence


def test_summary_counts_tied_bytes_once(tmp_path: Path) -> None:
    """Two that share memory are two by name, and their bytes are counted once."""
    weight = torch.ones(16, 8)
    torch.save({"a": weight, "b": weight, "c": torch.ones(3)}, tmp_path / "tied.pt")
    nbytes = weight.nbytes + 12
    plan = ckptctl.plan_conversion(tmp_path / "tied.pt", tmp_path / "out.pt", to="torch")
    assert plan.summary.read == plan.summary.written == Amount(3, nbytes)
    options: Any = {"to": "hf", "tied": "drop"}
    plan = ckptctl.plan_conversion(tmp_path / "tied.pt", tmp_path / "out", **options)
    balanced(plan)
    assert plan.summary.written == Amount(2, nbytes)
    assert plan.summary.dropped == 1
    plan = ckptctl.plan_conversion(tmp_path / "tied.pt", tmp_path / "out", to="hf", tied="copy")
    assert plan.summary.written == Amount(3, nbytes + weight.nbytes)


def test_summary_counts_untied_embedding_as_repeated(tmp_path: Path) -> None:
    source = GOLDEN["qwen3.tied"].save(tmp_path / "source")
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="hf", untie=True)
    balanced(plan)
    assert plan.summary.repeated == TensorCounts(1, 2)


def test_summary_counts_excluded_tensors_as_skipped(tmp_path: Path, llama: Path) -> None:
    options: Any = {"to": "hf", "exclude": ["*.mlp.*"]}
    plan = ckptctl.plan_conversion(llama, tmp_path / "out", **options)
    balanced(plan)
    assert plan.summary.left_out == 6
    assert plan.summary.sentence.endswith("(6 skipped)")


def test_summary_counts_optimizer_state_as_skipped(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: {"m": torch.ones(2)}}}}
    torch.save(state, tmp_path / "run.pt")
    plan = ckptctl.plan_conversion(tmp_path / "run.pt", tmp_path / "out", to="hf")
    balanced(plan)
    assert (plan.summary.read.tensors, plan.summary.left_out) == (2, 1)


def test_summary_counts_dequantized_tensors_as_fused(tmp_path: Path) -> None:
    state = {
        "layers.0.w.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "layers.0.w.weight_scale_inv": torch.ones(1, 1),
        "norm": torch.ones(4),
    }
    torch.save(state, tmp_path / "fp8.pt")
    options: Any = {"to": "hf", "dequantize": "bf16"}
    plan = ckptctl.plan_conversion(tmp_path / "fp8.pt", tmp_path / "out", **options)
    balanced(plan)
    assert plan.summary.read == Amount(3, 16 + 4 + 16)
    assert plan.summary.fused == TensorCounts(2, 1)
    assert plan.summary.written == Amount(2, 32 + 16)
