"""The boxes of a state's tensors as targets of a plan, and what all ranks want together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ckptctl.catalog import Box, memory_name
from ckptctl.catalog import Path as Keys
from ckptctl.distributed.state import State
from ckptctl.distributed.tensor_memory import steps_of, target
from ckptctl.errors import MappingError, UsageError
from ckptctl.ops.coordinator import Coordinator
from ckptctl.ops.state_mapping import Leaf
from ckptctl.ops.wanted import Target, Wanted


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
        found = hashlib.blake2b(digest_size=16)
        for name, leaf in (*self.tensors.items(), *self.values.items()):
            found.update(repr((name, leaf)).encode(errors="surrogatepass"))
        return found.digest()


def places_of(state: State) -> list[Place]:
    """Return every box that this rank holds."""
    return [
        Place(name, piece.box, piece.tensor)
        for name, held in state.tensors.items()
        for piece in held.pieces
    ]


def wanted_of(
    state: State, places: Iterable[Place]
) -> tuple[dict[str, Wanted], dict[str, memoryview]]:
    """Return *places* as targets of a plan, and the memory that the plan's names stand for."""
    targets: dict[str, list[Target]] = {name: [] for name in state.tensors}
    views: dict[str, memoryview] = {}
    for number, place in enumerate(places):
        views[memory_name(str(number))] = target(place.tensor)
        targets[place.name].append(Target(place.box, str(number), steps_of(place.tensor)))
    wanted = {
        name: Wanted(held.described.dtype, held.described.shape, tuple(targets[name]))
        for name, held in state.tensors.items()
    }
    return wanted, views


def everything(state: State, ranks: Coordinator, broadcast: object = None) -> Everything:
    """Return what all *ranks* want; they only tell each other where they differ.

    Args:
        state: What this rank has.
        ranks: The group.
        broadcast: The option, which has to be the same on all of them.

    Raises:
        MappingError: Two ranks disagree on what a tensor is.
        UsageError: Two ranks were given different options.
    """
    described = {name: held.described for name, held in state.tensors.items()}
    own = Everything(
        {name: Leaf(one.dtype, one.shape, one.path) for name, one in described.items()},
        {name: leaf.path for name, leaf in state.values.items()},
    )
    said = ranks.all_gather((own.digest, repr(broadcast)))
    told = list(dict.fromkeys(option for _, option in said))
    if len(told) > 1:
        raise UsageError("`broadcast` differs between ranks", why=" and ".join(told))
    if len(set(said)) == 1:
        return own
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
