"""What ranks do in tests of runs that save to local disks first; imported by every rank."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import signal
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckptctl.distributed.run import local_tier
from ckptctl.distributed.run.local_folder import LocalFolder
from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.distributed.run.root_copy import RateLimiter
from ckptctl.distributed.saving.destination import FolderTarget, RankFolderTarget
from ckptctl.errors import CkptError, RefusedError, SourceNotFoundError, StorageError
from tests.integration.branch_ranks import logged
from tests.integration.manager_ranks import full, names, state_at

TURNS = 19


def node(folder: Path, rank: int, per_node: int = 1) -> Path:
    """Return the local disk of the machine that *rank* is on."""
    return folder / f"node-{rank // per_node}"


def manager(folder: Path, rank: int, per_node: int = 1, **options: Any) -> CheckpointManager:
    return CheckpointManager(
        folder / "run", fast=node(folder, rank, per_node), **{"sync": False, **options}
    )


def steps(disk: Path) -> list[str]:
    return sorted(item.name for item in disk.glob("*-*-*/step-*"))


def equal(state: dict[str, Any], step: int, world: int) -> None:
    """Make sure that *state* is that of *step* on this rank, down to its random numbers."""
    expected = state_at(step, world)
    assert (state["loader"].position, state["step"]) == (step, step)
    for part in ("model", "optimizer"):
        for name, tensor in state[part].items():
            assert torch.equal(full(tensor), full(expected[part][name])), (part, name)
    for name in ("own", "numbers"):
        if name in state:
            assert torch.equal(state[name], own(step)), name


def own(step: int) -> torch.Tensor:
    return torch.tensor([float(dist.get_rank()), float(step)])


def mine(step: int, world: int) -> dict[str, Any]:
    """Return a state in which each rank has something of its own, a tensor among it."""
    return state_at(step, world) | {"own": own(step)}


def through(rank: int, world: int, folder: Path, per_node: int, async_: bool) -> None:
    """Saves, copies, what is kept, and where the run goes on."""
    disk, run = node(folder, rank, per_node), folder / "run"
    with manager(folder, rank, per_node, async_=async_, copy_every=2, keep_last=2) as saving:
        assert saving.load_latest(mine(0, world)) is None
        for step in (10, 20, 30, 40):
            saving.save(step, mine(step, world), {"loss": step / 2}).result()
            saving.wait()
            saving.rate(step, {"late": float(step)})
        dist.barrier()
        assert steps(disk) == ["step-30", "step-40"]
        if rank == 0:
            assert [name for name in names(run) if name[0] != "."] == ["step-10", "step-30"]
        dist.barrier()
    if rank == 0:
        assert [name for name in names(run) if name[0] != "."] == ["step-30", "step-40"]
        assert not list(run.glob(".*staging*"))
    with manager(folder, rank, per_node, async_=async_) as going_on:
        found = going_on.load_latest(state := mine(0, world))
        assert found is not None and found.step == 40
        assert found.path.is_relative_to(disk), "what is on the local disk is read there"
        equal(state, 40, world)
        going_on.save(50, mine(50, world)).result()
    with CheckpointManager(run) as plain:  # the root alone
        found = plain.load_latest(state := mine(0, world))
        assert found is not None and found.path == run / "step-50"
        equal(state, 50, world)
        assert not found.doubts


def lose(rank: int, world: int, folder: Path, per_node: int) -> None:
    """A machine is replaced: what the root has is read there, what only disks had is lost."""
    run, disk = folder / "run", node(folder, rank, per_node)
    lost = rank // per_node == 1
    with manager(folder, rank, per_node, copy_every=2) as saving:
        for step in (10, 20):  # the last is copied by close
            saving.save(step, mine(step, world)).result()
    dist.barrier()
    if rank == per_node:
        shutil.rmtree(disk)
    dist.barrier()
    with manager(folder, rank, per_node) as going_on:
        found = going_on.load_latest(state := mine(0, world))
        assert found is not None and found.step == 20
        assert found.path == run / "step-20" if lost else found.path.is_relative_to(disk)
        equal(state, 20, world)
        going_on._local_tier._copy_newest = lambda: None  # type: ignore[union-attr, method-assign]
        going_on._local_tier._copy_to_root = lambda _: None  # type: ignore[union-attr, method-assign]
        going_on.save(30, mine(30, world)).result()
    dist.barrier()
    if rank == per_node:
        shutil.rmtree(disk)
    dist.barrier()
    with logged() as lines, manager(folder, rank, per_node) as going_on:
        found = going_on.load_latest(state := mine(0, world))
        assert found is not None and found.step == 20
        equal(state, 20, world)
        ((name, problem),) = found.skipped.items()
        assert name.endswith("/step-30") and "no data of this save" in problem, found.skipped
        assert any("skipped" in line for line in lines) == (rank == 0)
        going_on.save(30, mine(30, world)).result()
        going_on.wait()
        dist.barrier()
        assert steps(disk).count("step-30") == 1, "what is not whole is gone with the next one"


def damage(rank: int, world: int, folder: Path) -> None:
    """A part whose bytes are not what was saved is passed over on all ranks alike."""
    disk = node(folder, rank)
    with manager(folder, rank, copy_every=5) as saving:
        for step in (10, 20, 30):
            saving.save(step, mine(step, world)).result()
        saving.wait()
        saving._local_tier.has_final_model = True  # type: ignore[union-attr]
    if rank == world - 1:
        (part,) = disk.glob(f"*/step-30/__{rank}_0.distcp")
        content = bytearray(part.read_bytes())
        content[1000:1400] = bytes(400)
        part.write_bytes(content)
    dist.barrier()
    with manager(folder, rank) as going_on:
        found = going_on.load_latest(state := mine(0, world))
        assert found is not None and found.step == 20, found
        assert [name[-7:] for name in found.skipped] == ["step-30"], found.skipped
        equal(state, 20, world)
        # The same step again goes to a place of its own, and what is copied is this one.
        going_on.save(30, mine(30, world)).result()
    with manager(folder, rank) as going_on:
        found = going_on.load_latest(state := mine(0, world))
        assert found is not None and found.step == 30
        equal(state, 30, world)


def flip(rank: int, world: int, folder: Path, copied: bool, turns: range) -> None:
    """One flipped byte of a part: its copy is loaded, or the save before, on all ranks alike."""
    with manager(folder, rank, copy_every=1 if copied else 5) as saving:
        for step in (10, 20, 30):
            saving.save(step, mine(step, world)).result()
        saving.wait()
        if not copied:
            saving._local_tier.has_final_model = True  # type: ignore[union-attr]
    last = world - 1
    with logged() as lines:
        for name in (f"__{last}.metadata", f"__{last}_0.distcp"):
            for turn in turns:
                _flipped(rank, world, folder, name, turn, lines, copied=copied)
        for turn in turns:
            name, values = f"__{last}_0.distcp", True
            _flipped(rank, world, folder, name, turn, lines, copied=copied, values=values)


def _flipped(
    rank: int,
    world: int,
    folder: Path,
    name: str,
    turn: int,
    lines: list[str],
    *,
    copied: bool,
    values: bool = False,
) -> None:
    """Load with a flipped byte in a file of the last rank, one of a tensor's if *values*.

    A flip in a tensor is passed over. One elsewhere need not be: nothing reads the padding.
    """
    disk, last = node(folder, rank), world - 1
    if rank == last:
        (part,) = disk.glob(f"*/step-30/{name}")
        content = part.read_bytes()
        tensors = _bytes_of_tensors(part) if part.suffix == ".distcp" else []
        places = tensors if values else range(len(content))
        place = places[len(places) * (2 * turn + 1) // (2 * TURNS)]
        part.write_bytes(content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :])
    dist.barrier()
    lines.clear()
    with manager(folder, rank) as going_on:
        found = going_on.load_latest(state := mine(0, world))
        assert going_on._local_tier is not None
        going_on._local_tier.has_final_model = True
    assert found is not None and found.step in ((30,) if copied else (20, 30))
    equal(state, found.step, world)
    over = [line for line in lines if "skipped" in line]
    passed_over = found.step == 20 or found.path.is_relative_to(folder / "run")
    if rank == 0 and passed_over:
        assert over and f"rank {last}: " in over[0], (name, turn, lines)
        assert copied or [one[-7:] for one in found.skipped] == ["step-30"]
    dist.barrier()
    if rank == last:
        part.write_bytes(content)
        assert passed_over or place not in tensors, (name, turn, place)


def _bytes_of_tensors(part: Path) -> list[int]:
    """Return the offsets in a data file of the bytes that are values of tensors."""
    metadata = pickle.loads(
        part.with_name(part.name.replace("_0.distcp", ".metadata")).read_bytes()
    )
    content = part.read_bytes()
    found: list[int] = []
    for index, place in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            item = content[place.offset : place.offset + place.length]
            with zipfile.ZipFile(io.BytesIO(item)) as archive:
                (member,) = (one for one in archive.infolist() if one.filename.endswith("data/0"))
            name, extra = struct.unpack_from("<HH", item, member.header_offset + 26)
            begin = place.offset + member.header_offset + 30 + name + extra
            found += range(begin, begin + member.file_size)
    return found


def back(rank: int, world: int, folder: Path) -> None:
    """Who goes back to an earlier step leaves what is on disks behind, too."""
    with manager(folder, rank) as saving:
        for step in (10, 20):
            saving.save(step, mine(step, world)).result()
    with manager(folder, rank) as going_back:
        gone_back = going_back.load(state := mine(0, world), 10)
        assert gone_back.path.is_relative_to(node(folder, rank))
        equal(state, 10, world)
        going_back.save(15, mine(15, world)).result()
        going_back.wait()
        with pytest.raises(SourceNotFoundError):
            going_back.load(mine(0, world), 12)
    for fast in (True, False):
        kept = manager(folder, rank) if fast else CheckpointManager(folder / "run")
        with kept as going_on:
            found = going_on.load_latest(state := mine(0, world))
            assert found is not None and found.step == 15, (fast, found)
            equal(state, 15, world)


def write_run(rank: int, world: int, folder: Path, per_node: int) -> None:
    with manager(folder, rank, per_node, copy_every=9) as saving:
        for step in (10, 20):
            saving.save(step, state_at(step, world)).result()
        saving.wait()
        saving._local_tier.has_final_model = True  # type: ignore[union-attr]


def other_world(rank: int, world: int, folder: Path, per_node: int, expected: int) -> None:
    """Other numbers of ranks go on from local disks if each of them reaches all parts."""
    with logged() as lines, manager(folder, rank, per_node) as going_on:
        going_on._local_tier.has_final_model = True  # type: ignore[union-attr]
        found = going_on.load_latest(state := state_at(0, world))
        assert found is not None and found.step == expected, found
        equal(state, expected, world)
        if expected == 10 and rank == 0:
            assert any("it was saved by" in line for line in lines), lines


def nowhere(rank: int, world: int, folder: Path, per_node: int) -> None:
    """All parts are on some disk, none is in the root: that is said, and nothing begins anew."""
    going_on = manager(folder, rank, per_node)
    with pytest.raises(SourceNotFoundError, match="cannot resume from them"):
        going_on.load_latest(state_at(0, world))


def another_run(rank: int, world: int, folder: Path) -> None:
    """What the disk has of a run whose folder was removed is not taken for this one's."""
    with manager(folder, rank) as saving:
        saving.save(10, mine(10, world)).result()
    if rank == 0:
        shutil.rmtree(folder / "run")
    dist.barrier()
    with logged() as lines, manager(folder, rank) as anew:
        assert anew.load_latest(mine(0, world)) is None
        anew.save(1, mine(1, world)).result()
    with logged() as lines, manager(folder, rank) as anew:
        found = anew.load_latest(mine(0, world))
        assert found is not None and found.step == 1
    assert any("belongs to another run" in line for line in lines)
    assert steps(node(folder, rank)) == ["step-1", "step-10"]


def full_disk(rank: int, world: int, folder: Path) -> None:
    """A rank whose disk is full: that step is not whole, the others know, the run goes on."""
    real = RankFolderTarget.write_files

    def fill(self: RankFolderTarget, *arguments: Any) -> None:
        if rank == 1 and self.target.name == "step-20":
            raise CkptError("no space left")
        real(self, *arguments)

    with manager(folder, rank, async_=False, copy_every=9) as saving:
        saving.save(10, mine(10, world))
        RankFolderTarget.write_files = fill  # type: ignore[assignment, method-assign]
        if rank == 1:
            with pytest.raises(CkptError, match="no space left"):
                saving.save(20, mine(20, world))
        else:
            saving.save(20, mine(20, world))
        with pytest.raises(CkptError, match="not complete") as caught:
            saving.wait()
        assert "rank 1: no space left" in str(caught.value.why)
        assert "step-10" in steps(node(folder, rank))
        saving.save(30, mine(30, world))
        saving.wait()
        dist.barrier()
        assert steps(node(folder, rank)) == ["step-10", "step-30"]
    if rank == 0:
        assert names(folder / "run") == [".ckptctl-local.json", "step-10", "step-30"]


def urgent(rank: int, world: int, folder: Path) -> None:
    """An urgent save returns when it is whole on all ranks, or raises on all."""
    real = RankFolderTarget.write_files

    def fill(self: RankFolderTarget, *arguments: Any) -> None:
        if rank == 1 and self.target.name == "step-20":
            raise CkptError("no space left")
        real(self, *arguments)

    RankFolderTarget.write_files = fill  # type: ignore[assignment, method-assign]
    with manager(folder, rank, deadline=60.0) as saving:
        saving.save(10, mine(10, world))
        saving.save(10, mine(10, world), urgent=True)
        for other in range(world):
            assert list(node(folder, other).glob(f"*/step-10/__{other}.metadata"))
        with pytest.raises(CkptError, match=r"not complete|no space left"):
            saving.save(20, mine(20, world), urgent=True)
        saving.save(30, mine(30, world), urgent=True)
        assert saving.latest_step() == 30
        saving._local_tier._failure = None  # type: ignore[union-attr]


def full_root(rank: int, world: int, folder: Path) -> None:
    """A copy that fails is said, nothing of it stays, and the next save is copied."""
    real = FolderTarget.write_files
    failing = [True]

    def fill(self: FolderTarget, *arguments: Any) -> None:
        if failing and rank == 1 and not isinstance(self, RankFolderTarget):
            failing.clear()
            raise CkptError("no space left")
        real(self, *arguments)

    FolderTarget.write_files = fill  # type: ignore[assignment, method-assign]
    with manager(folder, rank, copy_every=9) as saving:
        saving.save(10, mine(10, world)).result()
        with pytest.raises(CkptError, match="no space left"):
            saving.wait()
        if rank == 0:
            assert names(folder / "run") == [".ckptctl-local.json"]
        dist.barrier()
        saving.save(20, mine(20, world)).result()
        saving.wait()
        if rank == 0:
            assert names(folder / "run") == [".ckptctl-local.json", "step-20"]


def die(rank: int, world: int, folder: Path, phase: str) -> None:
    """Save 10 and 20; a rank is killed while it saves, or copies, 20."""
    if phase == "part":
        at(RankFolderTarget, RankFolderTarget.write_files, rank == world - 1)
    elif phase == "metadata":
        at(RankFolderTarget, RankFolderTarget.publish, rank == world - 1)
    elif phase == "copy":
        at(FolderTarget, FolderTarget.write_files, rank == world - 1, but=RankFolderTarget)
    elif phase == "publish":
        at(FolderTarget, FolderTarget.publish, rank == 0, but=RankFolderTarget)
    elif phase == "agree":
        at(local_tier.LocalTier, local_tier.LocalTier._apply_reports, rank == world - 1)
    elif phase == "retire":
        at(LocalFolder, LocalFolder.remove_old_saves, rank == 0)
    with manager(folder, rank, copy_every=1) as saving:
        saving.save(10, mine(10, world)).result()
        saving.wait()
        saving.save(20, mine(20, world)).result()
        saving.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def at(owner: Any, real: Callable[..., Any], dies: bool, but: type | None = None) -> None:
    """Let this process be killed at the second call of method *real* of *owner*."""
    calls: list[int] = []

    def method(self: Any, *arguments: Any) -> Any:
        if but is None or not isinstance(self, but):
            calls.append(1)
            if dies and len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *arguments)

    setattr(owner, real.__name__, method)


def after_death(rank: int, world: int, folder: Path, expected: int) -> None:
    """The newest save that is whole on all ranks is gone on from, and the next ones are whole."""
    with manager(folder, rank, copy_every=1) as going_on:
        found = going_on.load_latest(state := mine(0, world))
        assert found is not None and found.step == expected, found
        equal(state, expected, world)
        for step in (20, 30) if expected == 10 else (30,):
            going_on.save(step, mine(step, world)).result()
            going_on.wait()
    if rank == 0:
        there = [name for name in names(folder / "run") if name[0] != "."]
        assert there[-1] == "step-30", there
        assert not list((folder / "run").glob(".step-30*"))
    assert steps(node(folder, rank))[-1] == "step-30"
    dist.barrier()
    with CheckpointManager(folder / "run") as plain:
        found = plain.load_latest(state := mine(0, world))
        assert found is not None and found.step == 30
        equal(state, 30, world)


def same_bytes(rank: int, world: int, folder: Path) -> None:
    """A copy has the files that a save into the root would have."""
    shared = {"shared": torch.arange(60_000.0), "0-d": torch.tensor(3), "none": torch.empty(0, 3)}
    with manager(folder, rank, mode="process") as saving:
        saving.save(10, mine(10, world) | shared).result()
    with CheckpointManager(folder / "direct", sync=False) as direct:
        direct.save(10, mine(10, world) | shared)
    dist.barrier()
    if rank == 0:
        ours, theirs = folder / "run" / "step-10", folder / "direct" / "step-10"
        assert names(ours) == names(theirs)
        for name in names(ours):
            if name.endswith(".distcp"):
                assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


def damaged_before_copy(rank: int, world: int, folder: Path) -> None:
    """What a disk has lost since it was saved does not get into the root."""
    kept = manager(folder, rank, copy_every=5)
    for step in (10, 20):
        kept.save(step, mine(step, world)).result()
    kept.wait()
    if rank == 1:
        (part,) = node(folder, rank).glob("*/step-20/__1_0.distcp")
        content = bytearray(part.read_bytes())
        content[1000:1400] = bytes(400)
        part.write_bytes(content)
    dist.barrier()
    with pytest.raises(CkptError, match="checksum"):
        kept.close()
    dist.barrier()
    assert names(folder / "run") == [".ckptctl-local.json", "step-10"]


def paced(rank: int, world: int, folder: Path) -> None:
    """While a copy goes on slowly, saves go on, and the copy is of a whole save."""
    asked: list[int] = []

    class Slow(RateLimiter):
        def __call__(self, nbytes: int) -> None:
            asked.append(nbytes)
            self._lifted.wait(20)

    setattr(local_tier, "RateLimiter", Slow)  # noqa: B010
    with manager(folder, rank, copy_rate=1) as saving:
        for step in (10, 20, 30, 40):
            saving.save(step, mine(step, world)).result()
            assert saving._local_tier._last  # type: ignore[union-attr]
            saving._local_tier._last.join()  # type: ignore[union-attr]
        assert steps(node(folder, rank)) == ["step-10", "step-30", "step-40"], "10 is being copied"
        if rank == 0:
            assert "step-10" not in names(folder / "run")
        saving.wait()
        if rank == 0:
            assert "step-10" in names(folder / "run")
    assert asked
    if rank == 0:
        assert names(folder / "run") == [".ckptctl-local.json", "step-10", "step-40"]


def disagree(rank: int, world: int, folder: Path) -> None:
    """Parts of two steps are no save, and nothing that is whole is removed for them."""
    disk = node(folder, rank)
    saving = manager(folder, rank, fast_keep=1, copy_every=100)
    with pytest.raises(RefusedError, match="different steps"):
        saving.save(10, mine(10, world)).result()
        saving.wait()
        saving.save(20 + rank, mine(20 + rank, world)).result()
        saving.wait()
    assert steps(disk) == ["step-10", f"step-{20 + rank}"]
    saving.close()
    with manager(folder, rank) as going_on:
        found = going_on.load_latest(state := mine(0, world))
        assert found is not None and found.step == 10
        equal(state, 10, world)


def begun_after_failures(rank: int, world: int, folder: Path) -> None:
    """What a save raises about those before it says nothing of itself."""
    saving = manager(folder, rank, max_failures=0, copy_every=100)
    saving.save(10, mine(10, world)).result()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankFolderTarget, "publish", broken)
        failed = saving.save(20, mine(20, world))
        failed.exception()
    with pytest.raises(CkptError, match="no space"):
        saving.save(30, mine(30, world))
    with pytest.raises(CkptError, match="not complete on all ranks"):  # of step 20
        saving.wait()
    saving.close()
    with manager(folder, rank) as going_on:
        found = going_on.load_latest(mine(0, world))
        assert found is not None and found.step == 30


def broken(*_: Any) -> None:
    raise StorageError("no space")
