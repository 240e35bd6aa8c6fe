"""What ranks do in tests of plans of loads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ckptctl.distributed.loading import load as collective_load
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.loading.load_plan import RankLoad
from ckptctl.distributed.saving.save import save
from ckptctl.save_load.loading.identity import compute_identity


def settled(folder: Path) -> Path:
    """Wait until the clock of the file system has ticked."""
    until = time.monotonic() + 5
    while compute_identity([folder]) is None and time.monotonic() < until:
        time.sleep(0.02)
    return folder


def again_on_ranks(rank: int, world: int, folder: str, truth: str) -> None:
    """Load twice, once more after one rank alone has changed, and twice with broadcast."""
    full: dict[str, Any] = torch.load(truth)
    planned: list[int] = []
    own = RankLoad.make_plan

    def noted(*given: Any) -> Any:
        planned.append(1)
        return own(*given)

    setattr(RankLoad, "make_plan", noted)  # noqa: B010
    for _ in range(2):
        once(full, folder)
    assert len(planned) == 1
    once(full, folder, less=rank == 1)
    assert len(planned) == 2, "one rank has changed, so all of them plan"
    for _ in range(2):
        once(full, folder)
    assert len(planned) == 3, "a plan is one of all ranks: the other one has that of two loads ago"
    for _ in range(2):
        report = once(full, folder, broadcast=True)
        read = torch.tensor(report.bytes_read)
        dist.all_reduce(read)
        assert int(read) == full["w"].nbytes + full["r"].nbytes, "each byte is read once"
    assert len(planned) == 4
    with torch.inference_mode():
        kept: dict[str, Any] = {"w": torch.zeros(24, 4), "r": torch.zeros(10000)[::2], "at": 0}
    load(kept, folder, broadcast=True)
    assert torch.equal(kept["w"], full["w"]) and torch.equal(kept["r"], full["r"])


def once(full: dict[str, Any], folder: str, *, less: bool = False, **options: Any) -> Any:
    """Load into zeros and compare; *less*: this rank does not want all of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    w: Any = distribute_tensor(torch.zeros(24, 4), mesh, [Shard(0)])
    r: Any = distribute_tensor(torch.zeros(5000), mesh, [Replicate()])
    state: dict[str, Any] = {"w": w, "at": 0} if less else {"w": w, "r": r, "at": 0}
    report = load(state, folder, **options)
    assert torch.equal(w.full_tensor(), full["w"])
    assert torch.equal(r.to_local(), full["r"] * (not less))
    assert state["at"] == full["at"]
    return report


def two_groups(rank: int, world: int, folder: str) -> None:
    """Plans of two groups that share one rank, which hold the same and decide differently."""
    groups = {members: dist.new_group(list(members)) for members in ((0, 1), (0, 2))}
    full = torch.arange(2000.0)
    decided: list[bool] = []
    setattr(collective_load, "should_broadcast", lambda hosts, speeds: decided[-1])  # noqa: B010
    save({"w": full}, f"{folder}/first")
    settled(Path(f"{folder}/first"))
    for members, broadcast in (((0, 1), True), ((0, 2), False), ((0, 1), True)):
        if rank in members:
            decided.append(broadcast)
            state = {"w": torch.zeros(2000)}
            load(state, f"{folder}/first", process_group=groups[members])
            assert torch.equal(state["w"], full)
    for members, name in (((0, 1), "same"), ((0, 2), "apart"), ((0, 1), "again")):
        if rank in members:
            own = b"all" if name == "same" else bytes([rank])
            save({"w": full, "own": own}, f"{folder}/{name}", process_group=groups[members])
    dist.barrier()
    if rank < 2:
        kept: dict[str, Any] = {"w": torch.zeros(2000), "own": None}
        load(kept, f"{folder}/again", process_group=groups[0, 1])
        assert kept["own"] == bytes([rank])
