"""What ranks do in tests of plans of loads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ckptctl.distributed.loading import load
from ckptctl.ops.load_options import LoadOptions


def again_on_ranks(rank: int, world: int, folder: str, truth: str) -> None:
    """Load twice, once more after one rank alone has changed, and twice with broadcast."""
    full: dict[str, Any] = torch.load(truth)
    opened: list[int] = []
    own = LoadOptions.open

    def noted(*given: Any) -> Any:
        opened.append(1)
        return own(*given)

    setattr(LoadOptions, "open", noted)  # noqa: B010
    for _ in range(2):
        once(full, folder)
    assert len(opened) == 1
    once(full, folder, less=rank == 1)
    assert len(opened) == 2, "one rank has changed, so all of them plan"
    for _ in range(2):
        once(full, folder)
    assert len(opened) == 3, "a plan is one of all ranks: the other one has that of two loads ago"
    for _ in range(2):
        report = once(full, folder, broadcast=True)
        read = torch.tensor(report.bytes_read)
        dist.all_reduce(read)
        assert int(read) == full["w"].nbytes + full["r"].nbytes, "each byte is read once"
    assert len(opened) == 4
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
