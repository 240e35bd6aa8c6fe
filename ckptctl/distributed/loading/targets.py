"""The boxes of a state's tensors as targets of a plan, and what all ranks want together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ckptctl.catalog import Box, memory_name
from ckptctl.catalog import Path as Keys
from ckptctl.distributed.loading.tensor_memory import steps_of, target
from ckptctl.distributed.state import State
from ckptctl.errors import MappingError
from ckptctl.ops.loading.state_mapping import Leaf
from ckptctl.ops.loading.wanted import Target, Wanted
from ckptctl.ops.ranks.coordinator import Coordinator
from ckptctl.ops.saving.holdings import digest


class Place(NamedTuple):
    """A box of a tensor, and the memory that gets it.

    Attributes:
        name: The tensor.
        box: The part of the global tensor.
        tensor: Exactly that part, on any device.
    """

    name: str
    box: Box
    tensor: torch.Tensor

    def part(self, box: Box) -> Place:
        """Return what is in *box*, which lies inside."""
        tensor = self.tensor
        for dim, (start, first, size) in enumerate(
            zip(box.offsets, self.box.offsets, box.sizes, strict=True)
        ):
            tensor = tensor.narrow(dim, start - first, size)
        return Place(self.name, box, tensor)


@dataclass(frozen=True, slots=True)
class Everything:
    """What all ranks want.

    Attributes:
        tensors: Every tensor that any rank has, by name.
        values: Path of every other leaf likewise.
    """

    tensors: Mapping[str, Leaf]
    values: Mapping[str, Keys]

    @property
    def digest(self) -> bytes:
        """Return what tells two of them apart."""
        leaves = [(n, one.dtype, one.shape, one.path) for n, one in self.tensors.items()]
        return digest((leaves, list(self.values.items())))


def places_of(state: State) -> list[Place]:
    """Return every box that this rank holds."""
    return [
        Place(name, piece.box, piece.tensor)
        for name, held in state.tensors.items()
        for piece in held.pieces
    ]


def views_of(places: Iterable[Place]) -> dict[str, memoryview]:
    """Return the memory that a plan's names of *places* stand for."""
    return {memory_name(str(number)): target(one.tensor) for number, one in enumerate(places)}


def wanted_of(state: State, places: Iterable[Place]) -> dict[str, Wanted]:
    """Return *places* as targets of a plan."""
    targets: dict[str, list[Target]] = {name: [] for name in state.tensors}
    for number, place in enumerate(places):
        targets[place.name].append(Target(place.box, str(number), steps_of(place.tensor)))
    return {
        name: Wanted(held.described.dtype, held.described.shape, tuple(targets[name]))
        for name, held in state.tensors.items()
    }


def structure_of(state: State, places: Sequence[Place]) -> bytes:
    """Return a digest of all that a plan of a load depends on in what this rank holds.

    Args:
        state: What it holds.
        places: Its boxes.
    """
    tensors = [(name, held.described) for name, held in state.tensors.items()]
    boxes = [
        (one.name, one.box.offsets, one.box.sizes, steps_of(one.tensor), one.tensor.device.type)
        for one in places
    ]
    values = [(name, leaf.path) for name, leaf in state.values.items()]
    return digest((tensors, boxes, values))


def own_part(state: State) -> Everything:
    """Return what this rank wants."""
    described = {name: held.described for name, held in state.tensors.items()}
    return Everything(
        {name: Leaf(one.dtype, one.shape, one.path) for name, one in described.items()},
        {name: leaf.path for name, leaf in state.values.items()},
    )


def everything(own: Everything, ranks: Coordinator) -> Everything:
    """Return what all *ranks* want, where they do not want the same.

    Args:
        own: What this rank wants.
        ranks: The group.

    Raises:
        MappingError: Two ranks disagree on what a tensor is.
    """
    tensors: dict[str, Leaf] = {}
    values: dict[str, Keys] = {}
    for rank, one in enumerate(ranks.all_gather(own)):
        for name, leaf in one.tensors.items():
            known = tensors.setdefault(name, leaf)
            if (known.dtype, known.shape) != (leaf.dtype, leaf.shape):
                raise MappingError(
                    f"ranks disagree on `{name}`",
                    where=f"rank {rank}",
                    why=f"{leaf.dtype} {list(leaf.shape)} there, "
                    f"{known.dtype} {list(known.shape)} on an earlier one",
                )
        values |= one.values
    return Everything(tensors, values)
