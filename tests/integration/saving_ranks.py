"""What ranks do in tests of saving; imported by every rank."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptctl.distributed.group import TorchGroup
from ckptctl.distributed.plan_cache import PlanCache
from ckptctl.distributed.saving import destination as save_place
from ckptctl.distributed.saving import device_memory
from ckptctl.distributed.saving import save as collective_save
from ckptctl.distributed.saving.device_memory import DeviceMemory
from ckptctl.distributed.saving.save import CachedSavePlan, save, write_collectively
from ckptctl.distributed.saving.save_options import SaveOptions
from ckptctl.errors import CkptError
from ckptctl.save_load.saving.save_files import append_values
from ckptctl.storage.execution.run_files import LocalSink
from ckptctl.tree import TreePath
from tests.checkpoints.dcp import distribute
from tests.checkpoints.readers import differences

OPTIONS = SaveOptions(sync=False)


class Counting(TorchGroup):
    """A group that counts what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def all_gather(self, value: Any) -> Any:
        self.calls["all_gather"] += 1
        return super().all_gather(value)

    def gather(self, value: Any) -> Any:
        self.calls["gather"] += 1
        return super().gather(value)

    def scatter(self, values: Any) -> Any:
        self.calls["scatter"] += 1
        return super().scatter(values)


CACHED = {"all_gather": 1, "gather": 1, "scatter": 1}
PLANNED = {"all_gather": 1, "gather": 2, "scatter": 2}


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"w": torch.randn(9, 6).to(dtype), "b": torch.randn(5), "step": torch.tensor(1.0)}


def stock_load(folder: TreePath, state: dict[str, Any]) -> dict[str, Any]:
    """Return what stock dcp.load makes of *folder* for a state like *state*, on one rank."""
    from torch.distributed.checkpoint.state_dict_loader import load

    wiped = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in state.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(wiped, checkpoint_id=folder, no_dist=True)
    return wiped


def plans_are_used_again_and_never_stale(rank: int, world: int, root: Path) -> None:
    """Save states that change in every way, alternately with one that does not."""
    mesh = (world,)
    plans = PlanCache[CachedSavePlan]()
    steady = tensors(1)
    first = True
    full = tensors(2)
    variants: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
        ("plain", full, "S0", {"lr": 1}),
        ("dtype", full | {"w": full["w"].bfloat16()}, "S0", {"lr": 1}),
        ("shape", full | {"w": full["w"][:8].clone()}, "S0", {"lr": 1}),
        ("placement", full, "S1", {"lr": 1}),
        ("replicated", full, "R", {"lr": 1}),
        ("name", {"v": full["w"], "b": full["b"]}, "S0", {"lr": 1}),
        ("grad", full | {"b": full["b"].clone().requires_grad_()}, "R", {"lr": 1}),
        ("value names", full, "S0", {"rate": 1}),
        ("values", full, "S0", {"lr": 2, "own": 1}),
    ]
    for name, state, word, values in variants:
        for again in (False, True):
            folder = root / f"{name}-{again}"
            counted = Counting()
            placed = distribute(state, mesh, word) | values
            write_collectively(placed, folder, counted, OPTIONS, plans)
            assert counted.calls == (CACHED if again else PLANNED), (name, again, counted.calls)
            check(folder, state | values, rank)
            counted = Counting()
            own = distribute(steady, mesh, "S0")
            write_collectively(
                {"optim": own}, root / f"{name}-{again}-steady", counted, OPTIONS, plans
            )
            assert counted.calls == (PLANNED if first else CACHED), name
            check(
                root / f"{name}-{again}-steady", {f"optim.{k}": v for k, v in steady.items()}, rank
            )
            first = False


def check(folder: Path, expected: dict[str, Any], rank: int) -> None:
    if rank == 0:
        found = stock_load(folder, expected)
        problems = differences(found, expected)
        assert not problems, (folder, problems)
    import torch.distributed as dist

    dist.barrier()


def values_that_differ_change(rank: int, world: int, root: Path) -> None:
    """Values that differ between ranks are kept, whichever they are from save to save."""
    from ckptctl.formats import open_checkpoint

    plans = PlanCache[CachedSavePlan]()
    states = [
        {"rng": rank, "step": 1},
        {"rng": rank + 10, "step": 1000000},
        {"rng": 5, "step": 3},
        {"rng": rank, "step": rank},
        {"rng": rank, "step": rank + 70000},
        {"rng": rank, "step": 4},
    ]
    for number, values in enumerate(states):
        folder = root / str(number)
        counted = Counting()
        write_collectively({"w": torch.ones(3), "own": values}, folder, counted, OPTIONS, plans)
        assert counted.calls == (PLANNED if number in (0, 3) else CACHED), (number, counted.calls)
        if rank:
            continue
        expected = {f"own.{name}" for name in values}
        for other in range(1, world):
            expected |= {f"rank_{other}.own.{name}" for name in differing(number)}
        assert set(open_checkpoint(folder).blobs) == expected, number
        found = stock_load(folder, dict.fromkeys(expected))
        for other in range(1, world):
            for name in differing(number):
                added = (
                    {1: 10, 4: 70000}.get(number, 0) if name == ("rng", "step")[number == 4] else 0
                )
                assert found[f"rank_{other}.own.{name}"] == other + added
        if number < 3:
            assert found["own.step"] == values["step"]


def differing(number: int) -> tuple[str, ...]:
    return (("rng",), ("rng",), (), ("rng", "step"), ("rng", "step"), ("rng",))[number]


def all_write_a_large_replica(rank: int, world: int, root: Path) -> None:
    """A replicated tensor is cut, and in memory it may be strided."""
    torch.manual_seed(0)
    large = torch.randn(1024, 33 * 1024).t()
    save({"w": large, "flat": large.contiguous()}, root / "x", sync=False)
    assert (root / "x" / f"__{rank}_0.distcp").stat().st_size > 64 << 20
    check(root / "x", {"w": large, "flat": large.contiguous()}, rank)


def from_a_device(rank: int, world: int, root: Path) -> None:
    """Tensors are read as if they lay on a device."""
    most: list[int] = []
    real = DeviceMemory.copy_to

    def counted(self: DeviceMemory, target: torch.Tensor, start: int) -> None:
        most.append(len(target))
        real(self, target, start)

    state = {"w": torch.randn(3000, 1000), "t": torch.randn(40, 30).t(), "c": torch.ones(2, 3) + 1j}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceMemory, "copy_to", counted)
        patch.setattr(device_memory, "HOST", "another")
        memory = 4 << 20
        save(distribute(state, (world,), "S0"), root / "x", sync=False, memory=memory, jobs=4)
    assert 0 < max(most) <= memory // 2 // 4
    import torch.distributed as dist

    gathered = [None] * world
    dist.all_gather_object(gathered, dict(state))
    check(root / "x", gathered[0], rank)  # type: ignore[arg-type]


def without_collectives(rank: int, world: int, root: Path) -> None:
    """Every rank for itself; stock loads it with the same sharding."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_loader import load

    full = tensors(3)
    for word in ("S0", "S1"):
        folder = root / f"w{world}-{word}"
        placed = distribute(full, (world,), word)
        calls = ("all_gather_object", "gather_object", "scatter_object_list")
        with pytest.MonkeyPatch.context() as patch:
            for name in calls:
                patch.setattr(dist, name, None)
            save({"model": placed, "rank": rank}, folder, collectives=False, sync=False)
        dist.barrier()
        wiped = distribute({n: torch.zeros_like(t) for n, t in full.items()}, (world,), word)
        state: dict[str, Any] = {"model": wiped, "rank": None}
        load(state, checkpoint_id=folder)
        assert state["rank"] == rank
        for name, tensor in wiped.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            assert torch.equal(whole, full[name]), (word, name)
        with pytest.raises(CkptError, match="exists"):
            save({"model": placed}, folder, collectives=False)
        dist.barrier()


def one_rank_fails(rank: int, world: int, root: Path) -> None:
    """Whatever fails on one rank is raised on all; nothing is left; the old one is untouched."""
    state = distribute(tensors(4), (world,), "S0")
    root = root / f"w{world}"
    old = root / "old"
    save(state, old, sync=False)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in old.iterdir())
    last = world - 1

    def fails(said: str, **changed: Any) -> None:
        with pytest.raises(CkptError, match=said):
            told: dict[str, Any] = {"path": old, "overwrite": True} | changed
            save(told.pop("state", state), told.pop("path"), **told)
        TorchGroup().all_gather(0)  # rank 0 has removed what was staged
        assert sorted((p.name, p.stat().st_mtime_ns) for p in old.iterdir()) == before
        assert {path.name for path in root.iterdir()} == {"old"}, said
        TorchGroup().all_gather(0)

    fails("exists", overwrite=False)
    fails("destinations", path=old if rank else root / "other")
    fails("options", overwrite=rank == 0)
    fails("`w` cannot be saved", state={"w": (lambda: 0) if rank == last else 0})
    fails("`w` cannot be saved", state={"w": signal.SIGINT if rank == last else 0})
    with pytest.MonkeyPatch.context() as patch:
        if rank == last:
            patch.setattr(save_place.FolderTarget, "write_files", _disk_full)
        fails("No space left|ENOSPC")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(collective_save, "make_global_plan", _bug)
        with pytest.raises(CkptError if rank else ZeroDivisionError):
            save({"new": torch.ones(2)}, old, overwrite=True)
    TorchGroup().all_gather(0)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == last:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    big = distribute({"w": torch.randn(1 << 20)}, (world,), "S0")
    fails("EFBIG|File too large|write", state=big)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    with pytest.MonkeyPatch.context() as patch:
        if rank == last:
            patch.setattr(save_place, "get_data_directory", lambda _: root.parent / "away" / "data")
        fails("is missing")
    save(state, old, overwrite=True, sync=False)
    check(old, tensors(4), rank)


def _bug(*_: Any) -> None:
    raise ZeroDivisionError


def _disk_full(*_: Any) -> None:
    from ckptctl.errors import StorageError

    raise StorageError.from_os_error(OSError(28, "No space left on device"), "write", "x")


def killed_at(rank: int, world: int, root: Path, phase: str, victim: int) -> None:
    """Kill one rank in the middle of a save."""
    if rank == victim:
        collective = collective_save.CollectiveSave
        killing: dict[str, tuple[Any, Any]] = {
            "before the plan": (collective, collective.prepare),
            "after the plan": (collective_save, append_values),
            "while writing": (LocalSink, LocalSink.write),
            "when written": (collective, collective._publish_metadata),
        }
        owner, function = killing[phase]
        setattr(owner, function.__name__, _die)
    state = distribute(tensors(5), (world,), "S0")
    try:
        save(state, root / "step", overwrite=True)
    except CkptError as error:
        (root.parent / f"raised-{rank}").write_text(error.what)
        raise
    (root.parent / f"returned-{rank}").touch()


def killed_among_threads(rank: int, world: int, root: Path, count: int) -> None:
    """Kill one of the ranks that write with many threads, at its write number *count*."""
    real, counting = LocalSink.write, itertools.count(1)

    def write(*arguments: Any) -> None:
        real(*arguments)
        if rank == world - 1 and next(counting) == count:
            _die()

    setattr(LocalSink, "write", write)  # noqa: B010
    save(distribute(many(1), (world,), "S0"), root / "step", files=7, jobs=16, sync=False)
    (root.parent / f"returned-{rank}").touch()


def many(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"w{number}": torch.randn(2 * 16 + number, 1000) for number in range(24)}


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_again(rank: int, world: int, root: Path) -> None:
    save(distribute(tensors(6), (world,), "S0"), root / "step", overwrite=True, sync=False)
    check(root / "step", tensors(6), rank)
    assert {path.name for path in root.iterdir()} == {"step"}
