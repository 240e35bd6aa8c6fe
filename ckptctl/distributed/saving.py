"""Saving a state dict of one rank or many as a DCP directory that appears when it is whole."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ckptctl.catalog import memory_name
from ckptctl.distributed.group import coordinator
from ckptctl.distributed.state import State, StateDict, memory, state_of
from ckptctl.errors import StorageError
from ckptctl.formats.dcp_metadata import METADATA
from ckptctl.ops.coordinator import Coordinator, on_first, together
from ckptctl.ops.overwrite import replaceable
from ckptctl.ops.saving import Chunk, Holding, Share, decide, metadata, rank_files
from ckptctl.planner.plan import Plan
from ckptctl.storage.executor import ExecutionOptions, execute
from ckptctl.storage.publish import Staging, destination, staging, staging_directory
from ckptctl.storage.sync import sync_directory


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a checkpoint is written.

    Attributes:
        overwrite: Whether to replace a checkpoint of that name.
        files: Files per rank; more of them are written in parallel.
        jobs: Threads per rank; 0: one per core, at most four.
        sync: Whether it has to be on disk before it gets its name.
        checksum: Whether records carry CRC-32.
    """

    overwrite: bool = False
    files: int = 1
    jobs: int = 0
    sync: bool = True
    checksum: bool = True


def save(
    state_dict: StateDict,
    path: str | Path,
    *,
    process_group: dist.ProcessGroup | None = None,
    options: SaveOptions | None = None,
) -> Path:
    """Save *state_dict* as a DCP directory, whole or not at all; all ranks call it.

    Args:
        state_dict: Nested dictionaries of tensors, DTensors, ShardedTensors and other leaves;
            objects with ``state_dict()`` are asked for theirs. It stays as it is.
        path: Where the checkpoint will appear.
        process_group: The ranks; None: the default group, or this process alone.
        options: How.

    Returns:
        The absolute path.

    Raises:
        CkptError: Nothing was published; on every rank, whichever failed.
    """
    ranks = coordinator(process_group)
    return write(state_of(state_dict), Path(path), ranks, options or SaveOptions())


def write(state: State, path: Path, ranks: Coordinator, options: SaveOptions) -> Path:
    """Plan, write and publish what all ranks hold; see :func:`save`."""
    target = destination(path.expanduser().absolute())
    values = {name: pickled(leaf.value) for name, leaf in state.values.items()}
    held = holding(state, values)
    holdings = ranks.gather(held)
    decision = on_first(ranks, lambda: decide(holdings or []))
    share = ranks.scatter(decision.shares if decision else None)
    with shared_staging(target, ranks, options) as stage:
        pieces = [piece.tensor for one in state.tensors.values() for piece in one.pieces]
        steps = [tuple(tensor.stride()) for tensor in pieces]
        files = rank_files(ranks.rank, held, share, steps, values, options.files)
        data = staging_directory(target) / "data"
        together(ranks, lambda: _fill(files.plan, pieces, share, data, options))
        items = ranks.gather(files.items)

        def finish() -> None:
            assert stage and decision and holdings and items
            content = metadata(decision, holdings, items)
            add_file(stage.data / METADATA, content, sync=options.sync)
            stage.publish()

        on_first(ranks, finish)
    return target


def holding(state: State, values: Mapping[str, bytes]) -> Holding:
    """Return what this rank says that it holds."""
    chunks = [
        Chunk(name, piece.box.offsets, piece.box.sizes)
        for name, held in state.tensors.items()
        for piece in held.pieces
    ]
    return Holding(
        {name: held.described for name, held in state.tensors.items()},
        chunks,
        {name: hashlib.sha256(content).digest() for name, content in values.items()},
        {name: leaf.path for name, leaf in state.values.items()},
    )


def _fill(
    plan: Plan, pieces: Sequence[torch.Tensor], share: Share, data: Path, options: SaveOptions
) -> None:
    """Write this rank's files below *data*, from the memory of its tensors."""
    if not plan.files:
        return
    chosen = {memory_name(str(index)): pieces[index].cpu() for index in share.chunks}
    views = {name: memory(tensor) for name, tensor in chosen.items()}
    how = ExecutionOptions(
        jobs=options.jobs, checksum=options.checksum, sync=options.sync, shared=True
    )
    execute(plan, data, how, lambda _: None, memory=views)


def pickled(value: object) -> bytes:
    """Return a leaf that is no tensor as ``torch.save`` writes it, as DCP keeps it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@contextmanager
def shared_staging(
    target: Path, ranks: Coordinator, options: SaveOptions
) -> Iterator[Staging | None]:
    """Make room beside *target*, on rank 0; the others may write into it, too.

    Raises:
        RefusedError: *target* exists, or another run is writing it; on every rank.
    """
    with ExitStack() as stack:
        room = staging(target, overwrite=options.overwrite, is_checkpoint=replaceable)
        yield on_first(ranks, lambda: stack.enter_context(room))


def add_file(path: Path, content: bytes, *, sync: bool) -> None:
    """Write a new file.

    Raises:
        StorageError: It cannot be written.
    """
    try:
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        if sync:
            sync_directory(path.parent)
    except OSError as error:
        raise StorageError.from_os_error(error, "write", str(path)) from error
