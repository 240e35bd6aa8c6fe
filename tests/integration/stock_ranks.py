"""What ranks do in tests of torch's own functions with our planners and storage."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    SerializationFormat,
)

import ckptctl
from ckptctl.distributed import LoadPlanner, Reader, SavePlanner, Writer
from tests.checkpoints import compression
from tests.checkpoints.dcp import distribute, in_three_shards
from tests.integration.dcp_ranks import SHARDINGS
from tests.integration.loading_ranks import require_equal, wiped
from tests.integration.training_ranks import state


def save_all(rank: int, world: int, root: Path) -> None:
    """Save in every sharding with each pair of a planner and a writer of which one is ours."""
    warnings.simplefilter("ignore")
    own = {"model": state(), "step": 5}
    for number, (mesh, words) in enumerate(SHARDINGS[world]):
        placed = {"model": distribute(state(), mesh, words), "step": own["step"], "rank": rank}
        for name, planner, writer in (
            ("ours", SavePlanner(), Writer),
            ("planner", SavePlanner(), FileSystemWriter),
            ("writer", DefaultSavePlanner(), Writer),
        ):
            path = root / f"{name}-w{world}-{number}"
            state_dict_saver.save(placed, storage_writer=writer(path), planner=planner)


def load_all(rank: int, world: int, root: Path) -> None:
    """Load all that was saved with each pair of a planner and a reader of which one is ours."""
    full = state()
    for folder in sorted(root.iterdir()):
        for mesh, words in SHARDINGS[world]:
            for planner, reader in (
                (LoadPlanner(), Reader),
                (LoadPlanner(), FileSystemReader),
                (DefaultLoadPlanner(), Reader),
            ):
                placed = distribute(wiped(full), mesh, words)
                found = {"model": placed, "step": 0, "rank": -1}
                state_dict_loader.load(found, storage_reader=reader(folder), planner=planner)
                require_equal(found["model"], full, (folder.name, words, planner, reader))
                assert found["step"] == 5 and found["rank"] >= 0, found


def load_model(
    rank: int, world: int, folder: str, truth: str, options: Mapping[str, Any], prefix: str
) -> None:
    """Load a checkpoint of any format in every sharding, with both planners."""
    full = torch.load(truth)
    for mesh, words in SHARDINGS[world]:
        placed = distribute(wiped(full), mesh, words)
        whole: dict[str, Any] = {prefix: placed} if prefix else dict(placed)
        planner = LoadPlanner()
        state_dict_loader.load(whole, storage_reader=Reader(folder, **options), planner=planner)
        require_equal(placed, full, (words, "ours"))
        assert planner.report.missing == planner.report.unexpected == ()
        placed = distribute(wiped(full), mesh, words)
        whole = {prefix: placed} if prefix else dict(placed)
        state_dict_loader.load(whole, storage_reader=Reader(folder, state_dict=whole, **options))
        require_equal(placed, full, (words, "stock"))


def load_fsdp(rank: int, world: int, folder: str, truth: str, options: Mapping[str, Any]) -> None:
    """Load into a module that FSDP2 has sharded."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    full = torch.load(truth)
    module = torch.nn.Module()
    for name, tensor in wiped(full).items():
        *path, last = name.split(".")
        place = module
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, torch.nn.Module())
            place = getattr(place, part)
        place.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    found = get_model_state_dict(module)
    state_dict_loader.load(found, storage_reader=Reader(folder, **options), planner=LoadPlanner())
    require_equal(get_model_state_dict(module), full, "fsdp")


def failing(work: Any) -> str:
    """Return what *work* fails with on this rank, as text."""
    try:
        work()
    except CheckpointException as error:
        return str(error) + repr(error.failures)
    raise AssertionError("nothing failed")


def save_apart(rank: int, world: int, root: Path) -> None:
    """Values that differ are all kept, as in a save of ours, or an error."""
    mine = {"rng": rank, "same": 1, "w": distribute(state(), (world,), "S0")["emb.weight"]}
    mine["small"] = torch.full((3,), rank)
    state_dict_saver.save(mine, storage_writer=Writer(root / "kept"), planner=SavePlanner())
    ckptctl.save(mine, root / "saved")
    for file in (root / "saved").glob("*.distcp"):
        assert file.read_bytes() == (root / "kept" / file.name).read_bytes(), file
    found = {"rng": -1, "same": 0}
    state_dict_loader.load(
        found, storage_reader=Reader(root / "kept"), planner=LoadPlanner(strict=False)
    )
    assert found == {"rng": rank, "same": 1}, found
    strict = SavePlanner(per_rank="error")
    said = failing(
        lambda: state_dict_saver.save(mine, storage_writer=Writer(root / "no"), planner=strict)
    )
    assert "rng" in said
    dist.barrier()
    assert sorted(one.name for one in root.iterdir()) == ["kept", "saved"], list(root.iterdir())


def save_again(rank: int, world: int, root: Path) -> None:
    """Plans are used again, and never for what has changed."""
    planner = SavePlanner(plans=3)
    mesh, words = SHARDINGS[world][0]
    numbers = range(8)
    for number in numbers:
        full = changed(number % 4, number)
        known = planner.plan if number else None
        own = {"model": distribute(full, mesh, words), "step": number, "rng": rank * (number > 2)}
        state_dict_saver.save(own, storage_writer=Writer(root / f"{number}"), planner=planner)
        assert known is not planner.plan
        assert len(planner._plans) <= 3
    for number in numbers:
        full = changed(number % 4, number)
        placed = distribute(wiped(full), mesh, words)
        own = {"model": placed, "step": -1, "rng": -1}
        state_dict_loader.load(
            own, storage_reader=Reader(root / f"{number}"), planner=LoadPlanner()
        )
        require_equal(placed, full, number)
        assert (own["step"], own["rng"]) == (number, rank * (number > 2)), own


def changed(kind: int, number: int) -> dict[str, torch.Tensor]:
    """Return a state whose structure depends on *kind* and whose elements depend on *number*."""
    generator = torch.Generator().manual_seed(number)
    tensor = torch.randn(6, 5, generator=generator)
    return {
        0: {"a": tensor, "b": tensor + 1},
        1: {"a": tensor.bfloat16(), "b": tensor + 1},
        2: {"a": tensor, "c": tensor + 1},
        3: {"a": tensor, "b": tensor + 1},
    }[kind]


def cached(rank: int, world: int, root: Path) -> None:
    """A plan that holds is not sent again; one rank's change makes all plan anew."""
    planner = SavePlanner()
    sent: list[bool] = []
    original = SavePlanner.create_local_plan

    def listening(self: SavePlanner) -> Any:
        plan = original(self)
        sent.append(plan.usable)
        return plan

    planner.create_local_plan = listening.__get__(planner)  # type: ignore[method-assign]
    extra = [0, 0, 0, 1, 1, 0]
    for number, more in enumerate(extra):
        mine = {"w": distribute(changed(0, number), (world,), "S0"), "step": number}
        if more and rank == world - 1:
            mine["own"] = number
        state_dict_saver.save(mine, storage_writer=Writer(root / f"{number}"), planner=planner)
        found: dict[str, Any] = {"w": distribute(wiped(changed(0, 0)), (world,), "S0"), "step": -1}
        if more:
            found["own"] = -1
        state_dict_loader.load(
            found, storage_reader=Reader(root / f"{number}"), planner=LoadPlanner()
        )
        require_equal(found["w"], changed(0, number), number)
        assert found["step"] == number and found.get("own", number) == number
    last = rank == world - 1
    assert sent == ([True, False, False, last, False, False]), (rank, sent)


def swallowed(rank: int, world: int, root: Path) -> None:
    """A rank whose files cannot be written fails on all ranks, and nothing is published."""
    import resource

    mine = {"w": distribute({"a": torch.randn(4096, 64)}, (world,), "S0")}
    if rank == world - 1:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    said = failing(
        lambda: state_dict_saver.save(
            mine, storage_writer=Writer(root / "x"), planner=SavePlanner()
        )
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert "File too large" in said or "EFBIG" in said, said
    dist.barrier()
    assert not (root / "x").exists()
    dist.barrier()
    state_dict_saver.save(mine, storage_writer=Writer(root / "x"), planner=SavePlanner())
    assert (root / "x/.metadata").exists()


def places(rank: int, world: int, root: Path) -> None:
    """Ranks that name different destinations, checkpoints that exist, dtypes that differ."""
    mine = {"w": distribute(state(), (world,), "S0")}
    said = failing(lambda: state_dict_saver.save(mine, storage_writer=Writer(root / f"{rank}")))
    assert "different destinations" in said
    said = failing(
        lambda: state_dict_saver.save(
            mine, storage_writer=Writer(root / f"{rank}"), planner=SavePlanner()
        )
    )
    assert "different destinations" in said
    state_dict_saver.save(mine, storage_writer=Writer(root / "x"))
    dist.barrier()
    said = failing(lambda: state_dict_saver.save(mine, storage_writer=Writer(root / "x")))
    assert "exists" in said
    state_dict_saver.save({"v": torch.ones(2)}, storage_writer=Writer(root / "x", overwrite=True))
    found = {"v": torch.zeros(2)}
    state_dict_loader.load(found, storage_reader=Reader(root / "x"), planner=LoadPlanner())
    assert torch.equal(found["v"], torch.ones(2))
    odd = {"w": torch.ones(3, dtype=torch.float32 if rank else torch.float64)}
    said = failing(
        lambda: state_dict_saver.save(
            odd, storage_writer=Writer(root / "odd"), planner=SavePlanner()
        )
    )
    assert "disagree on `w`" in said, said
    hole = failing(
        lambda: state_dict_loader.load({"v": torch.zeros(2)}, storage_reader=Reader(root / "none"))
    )
    assert "SourceNotFoundError" in hole or "no such" in hole.lower(), hole


def rank_local(rank: int, world: int, root: Path) -> None:
    """Without collectives each rank writes metadata of its own, which stock ranks read."""
    full = state()
    for name, planner in (("stock", DefaultSavePlanner()), ("ours", SavePlanner())):
        placed = {"model": distribute(state(), (world,), "S0"), "rank": rank}
        state_dict_saver.save(
            placed, storage_writer=Writer(root / name), planner=planner, use_collectives=False
        )
        dist.barrier()
        names = {one.name for one in (root / name).iterdir()}
        assert {f"__{one}.metadata" for one in range(world)} <= names, names
        for reader in (FileSystemReader, Reader):
            found = {"model": distribute(wiped(full), (world,), "S0"), "rank": -1}
            state_dict_loader.load(found, storage_reader=reader(root / name))
            require_equal(found["model"], full, (name, reader))
            assert found["rank"] == rank


def asynchronous(rank: int, world: int, root: Path) -> None:
    """``dcp.async_save`` with both of ours, in a thread."""
    placed = {"model": distribute(state(), (world,), "S0"), "step": 5}
    future = state_dict_saver.async_save(
        placed, storage_writer=Writer(root / "x"), planner=SavePlanner()
    )
    assert isinstance(future, Future)
    future.result()
    found = {"model": distribute(wiped(state()), (world,), "S0"), "step": 0}
    state_dict_loader.load(found, storage_reader=Reader(root / "x"), planner=LoadPlanner())
    require_equal(found["model"], state(), "async")
    assert found["step"] == 5


def balanced(rank: int, world: int, root: Path) -> None:
    """Replicated tensors are divided by their bytes; torch goes by their order, and cuts none."""
    growing = {f"{n:02}": torch.full(((n + 1) << 14,), float(n)) for n in range(24)}
    large = torch.arange(1_500_000.0)
    for mix in (growing, {"large": large.view(2, -1), "small": large[:99_999]}):
        mine = {"w": distribute(mix, (world,), "R")}
        for planner, least, most in ((SavePlanner(), 1.0, 1.02), (DefaultSavePlanner(), 1.02, 4.0)):
            path = root / f"{len(mix)}-{type(planner).__name__}"
            state_dict_saver.save(mine, storage_writer=Writer(path, sync=False), planner=planner)
            dist.barrier()
            files = [file.stat().st_size for file in path.glob("*.distcp")]
            assert least <= max(files) / (sum(files) / world) <= most, (path, files)
        found = {"w": distribute(wiped(mix), (world,), "R")}
        state_dict_loader.load(
            found, storage_reader=FileSystemReader(root / f"{len(mix)}-SavePlanner")
        )
        require_equal(found["w"], mix, "stock")


def unevenly_sharded(rank: int, world: int, root: Path) -> None:
    """ShardedTensors of which one rank has several shards and all others none."""
    full = {"w": torch.arange(48.0).reshape(8, 6)}
    warnings.simplefilter("ignore")
    mine: dict[str, Any] = {"m": {"w": in_three_shards(full["w"], rank)}, "step": 5}
    paths = [root / name for name in ("ours", "planner", "stock", "save", "async_save")]
    for path, planner, storage in zip(
        paths,
        (SavePlanner(), SavePlanner(), DefaultSavePlanner()),
        (Writer, FileSystemWriter, FileSystemWriter),
        strict=False,
    ):
        state_dict_saver.save(mine, storage_writer=storage(path), planner=planner)
    ckptctl.save(mine, paths[3])
    ckptctl.async_save(mine, paths[4]).result()
    for path in paths:
        for taking, reader in (
            (LoadPlanner(), Reader),
            (LoadPlanner(), FileSystemReader),
            (DefaultLoadPlanner(), Reader),
            (DefaultLoadPlanner(), FileSystemReader),
            (None, None),
        ):
            found: dict[str, Any] = {"m": {"w": in_three_shards(torch.zeros(8, 6), rank)}}
            found["step"] = 0
            if reader:
                state_dict_loader.load(found, storage_reader=reader(path), planner=taking)
            else:
                ckptctl.load(found, path)
            assert found["step"] == 5, (path, taking, reader)
            pairs = zip(found["m"]["w"].local_shards(), mine["m"]["w"].local_shards(), strict=True)
            assert all(torch.equal(one.tensor, truth.tensor) for one, truth in pairs), path


def stored_otherwise(rank: int, world: int, root: Path) -> None:
    """What torch's writer compressed, or wrote as safetensors, in another sharding than asked."""
    compression.stand_in()
    warnings.simplefilter("ignore")
    full = state()
    registry = ExtensionRegistry()
    registry.register(compression.Extension)
    options: dict[str, dict[str, Any]] = {
        "compressed": {"_extensions": [compression.Extension()]},
        "safetensors": {"serialization_format": SerializationFormat.SAFETENSORS},
    }
    for name, writer in options.items():
        saved = {"model": distribute(full, (world,), "S0"), "step": 5}
        storage = FileSystemWriter(root / name, **writer)
        state_dict_saver.save(saved, storage_writer=storage)
        for way in ("ours", "reader", "stock"):
            found: dict[str, Any] = {"model": distribute(wiped(full), (world,), "R"), "step": 0}
            if way == "ours":
                ckptctl.load(found, root / name)
            elif way == "reader":
                reader = Reader(root / name)
                state_dict_loader.load(found, storage_reader=reader, planner=LoadPlanner())
            elif name == "compressed":
                stock = FileSystemReader(root / name, _extension_registry=registry)
                state_dict_loader.load(found, storage_reader=stock, planner=LoadPlanner())
            else:
                continue
            require_equal(found["model"], full, (name, way))
            assert found["step"] == 5, (name, way)
