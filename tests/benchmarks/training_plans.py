"""What it costs to plan a save: ``python -m tests.benchmarks.training_plans``.

The shapes of Llama-3.1-405B with AdamW (three tensors and a step for each parameter), sharded on
dimension 0 over simulated ranks, whole (FSDP) or in replicated groups of 256 (HSDP), or replicated
(DDP). Metadata only.
What runs on every rank in parallel is measured on one of them; what rank 0 does alone, as it is,
with what it gets from the others made before.
"""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ckptctl.catalog import compute_row_major_strides
from ckptctl.planner.placements import ShardPlacement, compute_local_shard
from ckptctl.save_load.rank_agreement import (
    RankStatement,
    are_cached_plans_valid,
    compute_generation,
)
from ckptctl.save_load.saving.global_plan import GlobalPlan, make_global_plan
from ckptctl.save_load.saving.local_shards import (
    LocalChunk,
    LocalShards,
    PackedShards,
    TensorMeta,
    compute_digest,
    pack_shards,
)
from ckptctl.save_load.saving.save_files import RankItems, lay_out_tensors, make_tensor_metadata
from tests.benchmarks.options import names_of, numbers
from tests.checkpoints.llama import LlamaSpec

Shapes = dict[str, tuple[int, ...]]
VALUES = 20
GROUP = 256


MODELS = {
    "405B": LlamaSpec(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256),
    "70B": LlamaSpec(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256),
    "8B": LlamaSpec(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256),
}


def training_state(shapes: Shapes) -> Shapes:
    """Return the shapes of parameters and of AdamW's state."""
    found = {f"model.{name}": shape for name, shape in shapes.items()}
    for name, shape in shapes.items():
        found |= {f"optim.state.{name}.{key}": shape for key in ("exp_avg", "exp_avg_sq")}
        found[f"optim.state.{name}.step"] = ()
    return found


def shards(shapes: Shapes, mesh: tuple[int, int], rank: int) -> LocalShards:
    """Return what a rank holds: replicated over the first dimension of *mesh*, cut on the other."""
    coordinate = divmod(rank, mesh[1])
    cache: dict[tuple[int, ...], list[Any]] = {}
    chunks: list[LocalChunk] = []
    tensors: dict[str, TensorMeta] = {}
    for name, shape in shapes.items():
        if shape not in cache:
            cuts = [None, ShardPlacement(0) if shape else None]
            cache[shape] = [
                part.box for part in compute_local_shard(shape, mesh, coordinate, cuts).boxes
            ]
        chunks += [LocalChunk(name, box.offsets, box.sizes) for box in cache[shape]]
        tensors[name] = TensorMeta("float32", shape, tuple(name.split(".")), False)
    values = {f"value.{number}": bytes(16) for number in range(VALUES)}
    return LocalShards(tensors, chunks, values, {name: tuple(name.split(".")) for name in values})


@dataclass
class Cost:
    """Seconds of the parts of a plan, and what rank 0 receives and writes, in bytes."""

    pack: float = 0.0
    decide: float = 0.0
    files: float = 0.0
    metadata: float = 0.0
    cached: float = 0.0
    received: int = 0
    written: int = 0

    @property
    def first(self) -> float:
        """Return the seconds of a first plan."""
        return self.pack + self.decide + self.files + self.metadata


def measure(shapes: Shapes, mesh: tuple[int, int]) -> tuple[Cost, GlobalPlan]:
    """Plan for all ranks of *mesh*."""
    ranks, cost = mesh[0] * mesh[1], Cost()
    own = shards(shapes, mesh, 0)
    first, cost.pack = timed(lambda: pack_shards(own))
    sent = [pickle.dumps(first)]
    sent += [
        pickle.dumps(pack_shards(shards(shapes, mesh, r)).without_structure())
        for r in range(1, ranks)
    ]
    cost.received = sum(map(len, sent))
    decision, cost.decide = timed(lambda: make_global_plan(list(map(pickle.loads, sent))))
    steps = [compute_row_major_strides(chunk.sizes) for chunk in own.chunks]
    share = decision.shares[0]
    _, cost.files = timed(lambda: lay_out_tensors(0, own, share, steps))
    items = list(all_items(shapes, mesh, decision))
    made, cost.metadata = timed(lambda: make_tensor_metadata(decision, items))
    cost.written = made.nbytes
    cost.cached = cached(own, first, ranks, steps)
    return cost, decision


def cached(own: LocalShards, first: PackedShards, ranks: int, steps: Any) -> float:
    """Return what a plan costs that is there already, on rank 0."""
    said: list[RankStatement] = []

    def again() -> bool:
        packed = pack_shards(own)
        boxes = [[(box.offsets, box.sizes) for box in boxes] for boxes in packed.box_sets]
        key = compute_digest((0, packed.identity, boxes, packed.box_set_indices, steps))
        statement = RankStatement("/x", {}, key, packed.identity, b"", {1: bytes(16)})
        said[:] = [statement] * ranks
        said[:] = [replace_generation(said)] * ranks
        received = pickle.dumps(said[0])
        return are_cached_plans_valid([pickle.loads(received) for _ in range(ranks)])

    held, seconds = timed(again)
    assert held and first
    return seconds


def replace_generation(said: list[RankStatement]) -> RankStatement:
    """Return a statement of a rank that has the plan."""
    return said[0]._replace(generation=compute_generation(said))


def all_items(shapes: Shapes, mesh: tuple[int, int], decision: GlobalPlan) -> Iterator[RankItems]:
    """Yield where each rank writes; shares of equal sizes are laid out once."""
    known: dict[Any, RankItems] = {}
    for rank, share in enumerate(decision.shares):
        own = shards(shapes, mesh, rank)
        key = tuple(
            (share.parts[at].sizes if at in share.parts else own.chunks[index].sizes)
            for at, index in enumerate(share.chunks)
        )
        if key not in known:
            steps = [compute_row_major_strides(chunk.sizes) for chunk in own.chunks]
            known[key] = lay_out_tensors(rank, own, share, steps).items
        yield replace(known[key], files=(f"__{rank}_0.distcp",))


def balance(shapes: Shapes, decision: GlobalPlan, ranks: int) -> float:
    """Return max/mean of the bytes that ranks write."""
    load = [0] * ranks
    for boxes, writers in zip(decision.boxes, decision.writers, strict=True):
        for box, rank in zip(boxes, writers, strict=True):
            load[rank] += 4 * box.numel
    return max(load) * ranks / sum(load)


def torch_plan(shapes: Shapes, mesh: tuple[int, int], limit: float) -> tuple[float, float] | None:
    """Return the seconds of torch's local plan and global plan; None: beyond the limit."""
    import torch
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    plans: list[Any] = []
    spent = 0.0
    start = time.perf_counter()
    for rank in range(mesh[0] * mesh[1]):
        own = shards(shapes, mesh, rank)
        local = time.perf_counter()
        plans.append(
            SavePlan(
                [
                    WriteItem(
                        MetadataIndex(chunk.name, torch.Size(chunk.offsets)),
                        WriteItemType.SHARD,
                        tensor_data=TensorWriteData(
                            ChunkStorageMetadata(
                                torch.Size(chunk.offsets), torch.Size(chunk.sizes)
                            ),
                            TensorProperties(torch.float32),
                            torch.Size(own.tensors[chunk.name].shape),
                        ),
                    )
                    for chunk in own.chunks
                ]
            )
        )
        spent = time.perf_counter() - local
        if time.perf_counter() - start > limit:
            return None
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return _result(child, reader, spent, limit)
    start = time.perf_counter()
    _, found = create_default_global_save_plan(dedup_save_plans(plans))
    assert found
    os.write(writer, str(time.perf_counter() - start).encode())
    os._exit(0)


def _result(child: int, reader: int, spent: float, limit: float) -> tuple[float, float] | None:
    import select
    import signal

    ready, _, _ = select.select([reader], [], [], limit)
    said = os.read(reader, 100) if ready else b""
    if not said:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    return (spent, float(said)) if said else None


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what *work* returns and the seconds that it takes."""
    start = time.perf_counter()
    found = work()
    return found, time.perf_counter() - start


def in_child(work: Callable[[], str]) -> None:
    """Print what *work* returns and the peak of memory that it takes."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            print(f"failed with status {status}")
        return
    text = work()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{text} {peak:8.0f}", flush=True)
    os._exit(0)


def row(name: str, shapes: Shapes, mesh: tuple[int, int]) -> str:
    """Return a line of the table."""
    cost, decision = measure(shapes, mesh)
    even = balance(shapes, decision, mesh[0] * mesh[1])
    return (
        f"{name:>10} {mesh[0]:>5}x{mesh[1]:<5} {cost.pack:6.2f} {cost.decide:7.2f} "
        f"{cost.files:6.2f} {cost.metadata:9.2f} {cost.first:7.2f} {cost.cached:7.3f} "
        f"{100 * cost.cached / cost.first:6.1f}% {cost.received / 1e6:9.1f} "
        f"{cost.written / 1e6:9.1f} {even:9.4f}"
    )


def meshes(ranks: int) -> list[tuple[int, int]]:
    """Return FSDP, HSDP in groups of 256, and DDP."""
    return [(1, ranks)] + ([(ranks // GROUP, GROUP)] if ranks > GROUP else []) + [(ranks, 1)]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=names_of(MODELS), default=["405B"], help="(default 405B)")
    parser.add_argument("--ranks", type=numbers, default="256,1024,2048", help="how many")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for torch's planner")
    given = parser.parse_args(argv)
    print(
        f"{'model':>10} {'mesh':>11} {'pack':>6} {'decide':>7} {'files':>6} {'metadata':>9} "
        f"{'first':>7} {'cached':>7} {'':>7} {'recv MB':>9} {'meta MB':>9} {'max/mean':>9} "
        f"{'peak MB':>8}"
    )
    for name in given.models:
        shapes = training_state(MODELS[name].shapes())
        for ranks in given.ranks:
            for mesh in meshes(ranks):
                in_child(partial(row, name, shapes, mesh))
            found = torch_plan(shapes, (1, ranks), given.limit)
            said = f"local {found[0]:.2f} s, global {found[1]:.1f} s" if found else "no end"
            print(f"torch, {name}, {ranks} ranks: {said} (limit {given.limit:.0f} s)")


if __name__ == "__main__":
    main()
