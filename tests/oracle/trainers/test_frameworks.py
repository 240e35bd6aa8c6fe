"""Lightning, accelerate, transformers, Megatron-Core and others: the live weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from tests.checkpoints.readers import differences
from tests.gloo import run_on_ranks
from tests.oracle.trainers.frameworks import (
    ACCELERATE,
    CHECKPOINTING,
    EVERY_JOB,
    HYBRID,
    LIGHTNING,
    MEGATRON,
    SNAPSHOT,
    TITAN,
    Job,
)
from tests.oracle.trainers.outcome import CHECKPOINT, State, check, error, kept, tensors
from tests.unit.formats.damage import converted

pytestmark = pytest.mark.oracle

JOBS = "tests.oracle.trainers.jobs."
Saved = Callable[[Job, int], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a function that runs a job on so many ranks, once, and returns its folder."""
    done: dict[tuple[str, int], Path] = {}

    def run(job: Job, world: int) -> Path:
        pytest.importorskip(job.more)
        key = (job.call, world)
        if key not in done:
            done[key] = tmp_path_factory.mktemp(job.package)
            run_on_ranks(JOBS + job.call, [world], str(done[key]), library=job.library)
        return done[key] / str(world)

    return run


def trained_by(job: Job) -> pytest.MarkDecorator:
    return pytest.mark.trainer(job.package)


EVERY = [
    pytest.param(job, world, id=f"{name}-{world}", marks=trained_by(job))
    for name, job in EVERY_JOB.items()
    for world in (2, 3)
]
WIDE = [
    pytest.param(job, 4, id=f"{name}-4", marks=trained_by(job))
    for name, job in (("torch_checkpointing", HYBRID), ("megatron", MEGATRON))
]


@pytest.mark.parametrize(("job", "world"), EVERY + WIDE)
def test_converted_weights_equal_live_model(
    saved: Saved, tmp_path: Path, job: Job, world: int
) -> None:
    folder = saved(job, world)
    for name, found in job.formats.items():
        source = folder / name / CHECKPOINT / job.inside
        if "from_format" not in job.options:
            assert ckptctl.inspect(source).format == found
        check(folder / name, tmp_path, "live", job.inside, **job.options)


# --------------------------------------------------------------------------- optimizers, last saves


def moments(found: Mapping[str, Any]) -> State:
    """Return the tensors of an optimizer's state, whatever stands before ``state.``."""
    return {
        "state." + name.partition("state.")[2]: value
        for name, value in tensors(found).items()
        if "state." in name
    }


@trained_by(ACCELERATE)
@pytest.mark.parametrize("name", ["dcp", "files"])
def test_accelerate_optimizer_converts_to_live_state(
    saved: Saved, tmp_path: Path, name: str
) -> None:
    case = saved(ACCELERATE, 2) / name
    source = case / CHECKPOINT / ("optimizer_0" if name == "dcp" else "")
    root = "optimizer" if name == "dcp" else None
    found = moments(converted(source, tmp_path, only="all", root=root))
    assert not differences(found, kept(case, "optimizer"))


@trained_by(SNAPSHOT)
def test_torchsnapshot_optimizer_converts_to_live_state(saved: Saved, tmp_path: Path) -> None:
    case = saved(SNAPSHOT, 2) / "sharded"
    found = moments(converted(case / CHECKPOINT, tmp_path, only="all"))
    assert not differences(found, kept(case, "optimizer"))


@trained_by(CHECKPOINTING)
@pytest.mark.parametrize("name", CHECKPOINTING.formats)
def test_torch_checkpointing_optimizer_converts_to_live_state(
    saved: Saved, tmp_path: Path, name: str
) -> None:
    case = saved(CHECKPOINTING, 2) / name
    found = tensors(converted(case / CHECKPOINT, tmp_path, only="all"))
    assert not differences(found, kept(case, "all"))


@trained_by(TITAN)
@pytest.mark.parametrize("name", TITAN.formats)
def test_last_torchtitan_save_converts_to_live_weights(
    saved: Saved, tmp_path: Path, name: str
) -> None:
    check(saved(TITAN, 3) / name, tmp_path, "last", "step-3")


@trained_by(MEGATRON)
def test_megatron_non_tensor_state_is_converted(saved: Saved, tmp_path: Path) -> None:
    found = converted(saved(MEGATRON, 2) / "torch_dist" / CHECKPOINT, tmp_path, only="all")
    leaves = {key: value for key, value in found.items() if not isinstance(value, torch.Tensor)}
    assert (leaves["step"], leaves["args.lr"]) == (2, 0.01)
    assert [value for key, value in leaves.items() if key.endswith("seed")] == [0, 1]


# ------------------------------------------------------------------------- the trainers' own tools


@trained_by(ACCELERATE)
def test_accelerate_merge_weights_agrees_with_live_model(saved: Saved) -> None:
    case = saved(ACCELERATE, 3) / "dcp"
    theirs, live = kept(case, "peer"), kept(case, "live")
    assert not differences(theirs, {name: live[name] for name in theirs})
    assert live.keys() >= theirs.keys()


@trained_by(MEGATRON)
def test_stock_torch_load_of_megatron_agrees_with_live_model(saved: Saved) -> None:
    case = saved(MEGATRON, 3) / "torch_dist"
    assert not differences(kept(case, "peer"), kept(case, "live"))


@trained_by(LIGHTNING)
def test_lightning_consolidates_fabric_but_fails_on_fsdp2(saved: Saved) -> None:
    folder = saved(LIGHTNING, 2)
    assert not differences(kept(folder / "fabric", "peer"), kept(folder / "fabric", "live"))
    assert "KeyError: 'model'" in error(folder / "trainer", "peer")
