"""What one rank holds and writes, whoever decided what that is."""

from __future__ import annotations

import hashlib
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ckptctl.distributed.group import threads
from ckptctl.distributed.leaves.pickled import pickled
from ckptctl.distributed.saving.host_memory import host_views
from ckptctl.distributed.saving.options import SaveOptions
from ckptctl.distributed.saving.small_tensors import SmallTensors
from ckptctl.distributed.state import State, StateDict, state_of
from ckptctl.errors import RefusedError
from ckptctl.ops.saving.holdings import DIGEST, Chunk, Holding
from ckptctl.planner.plan import Plan
from ckptctl.storage import paths
from ckptctl.storage.execution.options import ExecutionOptions


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds.

    Attributes:
        holding: What it says of it.
        pieces: Memory of each chunk.
        steps: Elements between neighbours in it along each dimension.
        values: Content of each leaf that is no tensor, and of each small tensor that ranks may
            hold different ones of, as ``torch.save`` writes it.
    """

    holding: Holding
    pieces: Sequence[torch.Tensor]
    steps: Sequence[tuple[int, ...]]
    values: Mapping[str, bytes]


def held(state: StateDict | State | Held, *, trusted: bool = False) -> Held:
    """Return what this rank holds of a state dict; tensors are not copied.

    Args:
        state: The state dict.
        trusted: See :class:`SaveOptions`.

    Raises:
        RefusedError: Leaves cannot be saved, or not be loaded again.
    """
    if isinstance(state, Held):
        return state
    if not isinstance(state, State):
        state = state_of(state)
    leaves = {name: leaf.value for name, leaf in state.values.items()}
    values = pickled(leaves, trusted=trusted)
    small = SmallTensors(state.tensors)
    chunks = [
        Chunk(name, piece.box.offsets, piece.box.sizes)
        for name, one in state.tensors.items()
        for piece in one.pieces
    ]
    holding = Holding(
        {name: one.described for name, one in state.tensors.items()},
        chunks,
        {**{name: _digest(content) for name, content in values.items()}, **small.digests},
        {
            **{name: leaf.path for name, leaf in state.values.items()},
            **{name: state.tensors[name].described.path for name in small},
        },
    )
    found = (piece.tensor for one in state.tensors.values() for piece in one.pieces)
    pieces = [tensor.resolve_conj().resolve_neg() for tensor in found]
    steps = [tuple(tensor.stride()) for tensor in pieces]
    return Held(holding, pieces, steps, ChainMap(dict(values), small))  # type: ignore[arg-type]


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST).digest()


def fill(plan: Plan, pieces: Sequence[torch.Tensor], data: Path, options: SaveOptions) -> None:
    """Write a rank's files below *data*.

    Args:
        plan: Of :func:`ckptctl.ops.saving.files.rank_files`.
        pieces: Memory of each chunk.
        data: An existing directory.
        options: How.

    Raises:
        StorageError: A file cannot be written.
    """
    if not plan.files:
        return
    how = ExecutionOptions(
        jobs=threads(options.jobs),
        memory=options.memory,
        checksum=options.checksum,
        sync=options.sync,
        shared=True,
    )
    options.execute(plan, data, how, lambda _: None, memory=host_views(plan, pieces))


def require_local(path: str | Path) -> None:
    """Refuse a URL, which would become a directory of that name here.

    Raises:
        RefusedError: It is one.
    """
    paths.require_local(
        path,
        "a save without collectives cannot go to a URL",
        hint="save with collectives, or to a file system",
        error=RefusedError,
    )
