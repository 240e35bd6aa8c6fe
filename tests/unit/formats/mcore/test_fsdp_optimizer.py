"""Optimizer state of Megatron-FSDP in the form of Megatron-Core's distributed optimizer."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError, RefusedError, UnsupportedError
from tests.checkpoints import save_dcp
from tests.contract.tables import FAMILIES, tiny
from tests.sweeps import one_in

STATES = ("exp_avg", "exp_avg_sq")
EXPERTS, GATED = ".mlp.experts.experts.", re.compile(r"\.linear_fc1\.(?:weight|bias)\Z")
PART = re.compile(r"_[wv]$|\.(?:query|key|value|z|beta|alpha)$")
GROUP = {"lr": 0.1, "wd_mult": 1.0, "betas": (0.9, 0.95), "is_expert_parallel": False}
Tensors = dict[str, torch.Tensor]


def list_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what Megatron-FSDP saves of a tensor of Megatron-Core."""
    if EXPERTS in name:
        grouped = name.replace(EXPERTS, ".mlp.experts.")
        for number, expert in enumerate(tensor):
            yield from list_halves(f"{grouped}{number}", expert, GATED.search(name) is not None)
    else:
        yield from list_halves(name, tensor, GATED.search(name) is not None)


def list_halves(name: str, tensor: torch.Tensor, gated: bool) -> Iterator[tuple[str, torch.Tensor]]:
    halves = zip(("_w", "_v"), tensor.chunk(2), strict=True) if gated else [("", tensor)]
    yield from ((name + suffix, half.clone()) for suffix, half in halves)


def write_run(
    folder: Path,
    name: str,
    *,
    counts: str = "tensors",
    expert_ranks: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Tensors:
    """Write a save of a family; return the tensors that Megatron-Core would load.

    The numbers of steps are *counts*: tensors, settings, or none of them. One that differs is
    ``other``.
    """
    generator = torch.Generator().manual_seed(5)
    shapes = tiny(FAMILIES[name], "mcore")
    model: Tensors = {}
    state: dict[str, dict[str, torch.Tensor]] = {}
    settings: dict[str, dict[str, Any]] = {}
    expected: Tensors = {}
    for key, shape in shapes.items():
        weight = torch.randn(shape, generator=generator)
        expected[key] = expected[f"optimizer.state.param.{key}"] = weight
        model |= {f"module.{part}": value for part, value in list_parts(key, weight)}
        for kind in STATES:
            moment = torch.randn(shape, generator=generator).to(dtype)
            expected[f"optimizer.state.{kind}.{key}"] = moment
            for part, value in list_parts(key, moment):
                state.setdefault(f"module.module.{part}", {})[kind] = value
        for part, _ in list_parts(key, weight):
            group = {**GROUP, "wd_mult": float(len(shape) > 1)}
            own = settings.setdefault(f"module.module.{re.sub(PART, '', part)}", group)
            if counts in ("tensors", "other"):
                is_other = counts == "other" and part.endswith("_v")
                state[f"module.module.{part}"]["step"] = torch.tensor(8.0 if is_other else 7.0)
            elif counts == "settings":
                own["step"] = 7
    content = {
        "model": model,
        "optimizer": {"state": state, "param_to_group_meta": settings},
        "iteration": 10,
        "opt_param_scheduler": {"max_lr": 0.01},
        "args": Namespace(expert_model_parallel_size=expert_ranks),
    }
    save_dcp(folder, content)
    return expected


def load(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    (folder,) = run.glob("iter_*")
    dcp_to_torch_save(folder, folder / "all.pt")
    common = torch.load(folder / "common.pt", weights_only=False)
    return torch.load(folder / "all.pt", weights_only=False), common


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "counts"),
    one_in(3, [("qwen3", "tensors"), ("qwen3_moe", "settings"), ("qwen3_moe", "tensors")]),
)
@pytest.mark.parametrize("by_way_of_hf", [False, True])
def test_moments_and_settings_become_those_of_distributed_optimizer(
    name: str, counts: str, by_way_of_hf: bool, tmp_path: Path
) -> None:
    expected = write_run(tmp_path / "iter_0000010", name, counts=counts)
    source = tmp_path / "iter_0000010"
    asked: dict[str, Any] = {"only": "all", "model_type": name}
    if by_way_of_hf:
        ckptctl.convert(source, tmp_path / "hf", to="dcp", to_layout="hf", **asked)
        source = tmp_path / "hf"
    ckptctl.convert(source, tmp_path / "out", to="mcore", **asked)
    found, common = load(tmp_path / "out")
    for key, tensor in expected.items():
        rows = found[key][: len(tensor)]  # the others pad the vocabulary
        assert torch.equal(rows, tensor) and not found[key][len(tensor) :].any(), key
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert sorted(group["wd_mult"] for group in groups) == [0.0, 1.0]
    assert all({**group, "wd_mult": 1.0} == {**GROUP, "step": 7} for group in groups)
    assert common["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert common["iteration"] == 10


@pytest.mark.filterwarnings("ignore")
def test_parts_of_gated_delta_nets_keep_their_names(tmp_path: Path) -> None:
    """Megatron-FSDP splits the projections like Megatron-Core; settings are of the projection."""
    expected = write_run(tmp_path / "run", "qwen3_next")
    asked: dict[str, Any] = {"only": "all", "model_type": "qwen3_next"}
    ckptctl.convert(tmp_path / "run", tmp_path / "out", to="mcore", **asked)
    found, _ = load(tmp_path / "out")
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    assert any(
        key.endswith("exp_avg_sq.decoder.layers.0.self_attention.in_proj.weight.query")
        for key in expected
    )


def test_divided_experts_have_an_optimizer_of_their_own(tmp_path: Path) -> None:
    """Megatron-FSDP has one for all parameters; its arguments state that ranks divide them."""
    write_run(tmp_path / "run", "qwen3_moe", expert_ranks=2)
    asked: dict[str, Any] = {"only": "all", "model_type": "qwen3_moe"}
    ckptctl.convert(tmp_path / "run", tmp_path / "out", to="mcore", **asked)
    (file,) = (tmp_path / "out").glob("iter_*/common.pt")
    optimizers = torch.load(file, weights_only=False)["optimizer"]
    kinds = [
        {group["is_expert_parallel"] for group in optimizers[n]["optimizer"]["param_groups"]}
        for n in (0, 1)
    ]
    assert kinds == [{False}, {True}]


@pytest.mark.parametrize(
    ("counts", "error", "reason"),
    [
        ("", RefusedError, "the number of steps is missing"),
        ("other", UnsupportedError, "7 and 8|8 and 7"),
    ],
)
def test_missing_and_differing_counts_of_steps_are_errors(
    counts: str, error: type[CkptError], reason: str, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"to": "mcore", "only": "all", "model_type": "qwen3"}
    write_run(tmp_path / "run", "qwen3", counts=counts)
    with pytest.raises(error) as caught:
        ckptctl.convert(tmp_path / "run", tmp_path / "never", **asked)
    assert re.fullmatch(reason, caught.value.why or "")


def test_moments_that_may_have_scales_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "qwen3", dtype=torch.float16)
    catalog = formats.open_checkpoint(tmp_path / "run")
    assert any("without its scales" in note for note in catalog.notes)
    with pytest.raises(RefusedError, match="cannot map optimizer state"):
        ckptctl.convert(
            tmp_path / "run", tmp_path / "never", to="mcore", only="all", model_type="qwen3"
        )
