"""Lightning, accelerate, transformers, Megatron-Core and others: the live weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from tests.checkpoints.readers import differences
from tests.gloo import run_on_ranks
from tests.oracle.trainers.outcome import CHECKPOINT, check, converted, error, kept

pytestmark = pytest.mark.oracle
JOBS = "tests.oracle.trainers.jobs."


@dataclass(frozen=True)
class Job:
    """What one trainer saves.

    Attributes:
        package: It is skipped without this one.
        call: Module and function of ``jobs``.
        formats: For each case how it is recognised.
        inside: Folder in the checkpoint that is meant.
        options: For the conversion.
        more: A further package that it needs.
    """

    package: str
    call: str
    formats: Mapping[str, str]
    inside: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    more: str = "torch"


LIGHTNING = Job(
    "lightning",
    "lightning_saves:save_all",
    {"fabric": "dcp", "trainer": "dcp", "ddp": "torch", "ddp_tied": "torch"},
)
ACCELERATE = Job(
    "accelerate",
    "accelerate_saves:save_all",
    {"dcp": "dcp", "files": "rank-files", "replicated": "hf"},
)
MEGATRON = Job("megatron", "megatron_saves:save_all", {"torch_dist": "dcp"})
TITAN = Job(
    "torchtitan", "torchtitan_saves:save_all", {"disabled": "dcp", "async": "dcp"}, "step-2"
)
SNAPSHOT = Job(
    "torchsnapshot",
    "torchsnapshot_saves:save_all",
    {"sharded": "torchsnapshot", "replicated": "torchsnapshot"},
)
CHECKPOINTING = Job(
    "torch_checkpointing",
    "torch_checkpointing_saves:save_all",
    {
        f"{kind}/{how}": "torch-checkpointing"
        for kind in ("fsdp2", "fsdp2_bf16", "tp", "fsdp1_mesh")
        for how in ("metadata", "none")
    },
)
HYBRID = Job(
    CHECKPOINTING.package,
    CHECKPOINTING.call,
    {
        f"{kind}/{how}": "torch-checkpointing"
        for kind in ("hsdp", "fsdp2_tp")
        for how in ("metadata", "none")
    },
)
JOBS_OF_ALL = {
    "lightning": LIGHTNING,
    "lightning_deepspeed": Job(
        "lightning",
        "lightning_deepspeed:save_all",
        {f"z{stage}": "deepspeed" for stage in (1, 2, 3)},
        more="deepspeed",
    ),
    "accelerate": ACCELERATE,
    "transformers": Job(
        "transformers", "transformers_saves:save_ddp", {"ddp": "hf"}, "checkpoint-2"
    ),
    "transformers_deepspeed": Job(
        "transformers",
        "transformers_saves:save_deepspeed",
        {"z2": "deepspeed", "z3": "deepspeed"},
        "checkpoint-2",
        {"from_format": "deepspeed"},
        "deepspeed",
    ),
    "megatron": MEGATRON,
    "torchtitan": TITAN,
    "torchsnapshot": SNAPSHOT,
    "torch_checkpointing": CHECKPOINTING,
}
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
            run_on_ranks(JOBS + job.call, [world], str(done[key]))
        return done[key] / str(world)

    return run


def trainer(job: Job) -> pytest.MarkDecorator:
    return pytest.mark.trainer(job.package)


EVERY = [
    pytest.param(job, world, id=f"{name}-{world}", marks=trainer(job))
    for name, job in JOBS_OF_ALL.items()
    for world in (2, 3)
]
WIDE = [
    pytest.param(job, 4, id=f"{name}-4", marks=trainer(job))
    for name, job in (("torch_checkpointing", HYBRID), ("megatron", MEGATRON))
]


@pytest.mark.parametrize(("job", "world"), EVERY + WIDE)
def test_the_live_weights(saved: Saved, tmp_path: Path, job: Job, world: int) -> None:
    folder = saved(job, world)
    for name, found in job.formats.items():
        source = folder / name / CHECKPOINT / job.inside
        if "from_format" not in job.options:
            assert ckptctl.inspect(source).format == found
        check(folder / name, tmp_path, "live", job.inside, **job.options)


# --------------------------------------------------------------------------- optimizers, last saves


def moments(found: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of an optimizer's state, whatever stands before ``state.``."""
    return {
        "state." + name.partition("state.")[2]: value
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and "state." in name
    }


@trainer(ACCELERATE)
@pytest.mark.parametrize("name", ["dcp", "files"])
def test_the_live_optimizer_of_accelerate(saved: Saved, tmp_path: Path, name: str) -> None:
    case = saved(ACCELERATE, 2) / name
    source = case / CHECKPOINT / ("optimizer_0" if name == "dcp" else "")
    found = moments(converted(source, tmp_path, only="all"))
    assert not differences(found, kept(case, "optimizer"))


@trainer(SNAPSHOT)
def test_the_live_optimizer_of_torchsnapshot(saved: Saved, tmp_path: Path) -> None:
    case = saved(SNAPSHOT, 2) / "sharded"
    found = moments(converted(case / CHECKPOINT, tmp_path, only="all"))
    assert not differences(found, kept(case, "optimizer"))


@trainer(CHECKPOINTING)
@pytest.mark.parametrize("name", CHECKPOINTING.formats)
def test_the_live_optimizer_of_torch_checkpointing(saved: Saved, tmp_path: Path, name: str) -> None:
    case = saved(CHECKPOINTING, 2) / name
    found = converted(case / CHECKPOINT, tmp_path, only="all")
    tensors = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    assert not differences(tensors, kept(case, "all"))


@trainer(TITAN)
@pytest.mark.parametrize("name", TITAN.formats)
def test_the_last_save_of_torchtitan(saved: Saved, tmp_path: Path, name: str) -> None:
    check(saved(TITAN, 3) / name, tmp_path, "last", "step-3")


@trainer(MEGATRON)
def test_what_is_no_tensor_in_megatron(saved: Saved, tmp_path: Path) -> None:
    found = converted(saved(MEGATRON, 2) / "torch_dist" / CHECKPOINT, tmp_path, only="all")
    leaves = {key: value for key, value in found.items() if not isinstance(value, torch.Tensor)}
    assert (leaves["step"], leaves["args.lr"]) == (2, 0.01)
    assert [value for key, value in leaves.items() if key.endswith("seed")] == [0, 1]


# ------------------------------------------------------------------------- the trainers' own tools


@trainer(ACCELERATE)
def test_merge_weights_agrees_where_there_is_a_merger(saved: Saved) -> None:
    case = saved(ACCELERATE, 3) / "dcp"
    theirs, live = kept(case, "peer"), kept(case, "live")
    assert not differences(theirs, {name: live[name] for name in theirs})
    assert live.keys() >= theirs.keys()


@trainer(MEGATRON)
def test_stock_torch_agrees_on_megatron(saved: Saved) -> None:
    case = saved(MEGATRON, 3) / "torch_dist"
    assert not differences(kept(case, "peer"), kept(case, "live"))


@trainer(LIGHTNING)
def test_lightning_consolidates_fabric_and_fails_on_its_own_fsdp2(saved: Saved) -> None:
    folder = saved(LIGHTNING, 2)
    assert not differences(kept(folder / "fabric", "peer"), kept(folder / "fabric", "live"))
    assert "KeyError: 'model'" in error(folder / "trainer", "peer")
