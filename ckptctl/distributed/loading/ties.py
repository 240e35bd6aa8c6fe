"""Tensors that a state has under several names: one memory, which one of them fills.

What the checkpoint has under the other names has to be the same. It is compared with the memory
once that is filled, part by part, by the transfers that would otherwise have filled it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from ckptctl.catalog import memory_name
from ckptctl.distributed.loading.targets import Place
from ckptctl.distributed.loading.tensor_memory import Compared
from ckptctl.errors import MappingError
from ckptctl.ops.loading.state_mapping import StateMapping
from ckptctl.ops.loading.wanted import Target, Wanted
from ckptctl.storage.compare import row_major


class Tied(NamedTuple):
    """A box whose memory another one fills.

    Attributes:
        place: The box.
        filled: Number of the place that fills its memory.
    """

    place: Place
    filled: int


def sharing(places: Sequence[Place]) -> list[int]:
    """Return of each place the number of the first one with the same memory."""
    known: dict[object, int] = {}
    found: list[int] = []
    for number, place in enumerate(places):
        own = place.tensor
        memory = (own.device, own.data_ptr(), own.dtype, own.shape, own.stride())
        found.append(known.setdefault(memory, number) if own.numel() else number)
    return found


def untied(
    places: Sequence[Place], same: Sequence[int], mapping: StateMapping
) -> tuple[list[Place], list[Tied]]:
    """Return what of *places* is filled, each memory once, and what is to be found in there then.

    Args:
        places: The boxes of a state.
        same: What :func:`sharing` says of them.
        mapping: What the checkpoint has of them; the same for several names needs no comparison.
    """
    if len(set(same)) == len(places):
        return list(places), []
    offered, sources = mapping.offered, _sources(mapping)
    filled: dict[int, int] = {}
    fill: list[Place] = []
    again: list[Tied] = []
    for place, memory in zip(places, same, strict=True):
        if place.name not in offered:
            continue
        number = filled.setdefault(memory, len(fill))
        if number == len(fill):
            fill.append(place)
        elif sources.get(place.name) != sources.get(fill[number].name) or (
            place.box != fill[number].box
        ):
            again.append(Tied(place, number))
    return fill, again


def _sources(mapping: StateMapping) -> dict[str, object]:
    """Return what tells of names whether they get the same; those that get parts are all apart."""
    entries = mapping.catalog.tensors
    found: dict[str, object] = {}
    for one in mapping.tensors:
        for view in one.targets:
            where = [(entries[source.key].extents, source) for source in one.sources]
            plain = [(extents, source.dims, source.origin) for extents, source in where]
            found[view.key] = (plain, view.dims) if len(one.targets) == 1 else view.key
    return found


def wanted_again(tied: Sequence[Tied], wanted: dict[str, Wanted]) -> dict[str, Wanted]:
    """Return what is to be read once more.

    Args:
        tied: Where it has to be already.
        wanted: What the state wants, for dtypes and shapes.
    """
    targets: dict[str, list[Target]] = {}
    for number, (place, _) in enumerate(tied):
        steps = row_major(tuple(place.tensor.shape))
        targets.setdefault(place.name, []).append(Target(place.box, str(number), steps))
    return {
        name: Wanted(wanted[name].dtype, wanted[name].shape, tuple(some))
        for name, some in targets.items()
    }


def comparing(tied: Sequence[Tied], fill: Sequence[Place], where: str) -> dict[str, memoryview]:
    """Return memory that takes nothing but what it has.

    Args:
        tied: Of which places.
        fill: What filled them.
        where: The checkpoint.
    """
    return {
        memory_name(str(number)): cast(
            memoryview, Compared(place.tensor, _differing(place.name, fill[filled].name, where))
        )
        for number, (place, filled) in enumerate(tied)
    }


def _differing(name: str, filled: str, where: str) -> Callable[[], None]:
    def fail() -> None:
        raise MappingError(
            f"`{filled}` and `{name}` hold different values",
            where=where,
            why="in the state one tensor stands for both",
            hint="give the state a tensor for each, or leave one of the names out of it",
        )

    return fail
