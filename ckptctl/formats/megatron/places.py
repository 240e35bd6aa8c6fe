"""Places of ranks in the grid of pipeline, expert and tensor parallelism.

How many ranks there are along each stands in the arguments of every file, and the names of the
folders have to agree with it. Ranks count tensor parallelism first, then experts, then pipeline
stages (``megatron/core/parallel_state.py``, ``RankGenerator``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckptctl.errors import FormatError, UnsupportedError
from ckptctl.formats.megatron.files import MODEL, Numbers, mixed
from ckptctl.formats.megatron.state import RankState

MAX_RANKS = 1 << 17
_SIZES = (
    ("pipeline_model_parallel_size",),
    ("expert_model_parallel_size",),
    ("tensor_model_parallel_size", "model_parallel_size"),
)


class Place(NamedTuple):
    """A rank's place, or the size of the grid; places sort as ranks count.

    Attributes:
        pipeline: The pipeline stage.
        expert: The expert-parallel rank.
        tensor: The tensor-parallel rank.
    """

    pipeline: int
    expert: int
    tensor: int


def sizes_of(
    named: Mapping[Numbers, str], states: Mapping[Numbers, RankState], where: str
) -> Place:
    """Return the grid's sizes: as the arguments say, or, without them, the folders' names.

    Args:
        named: The files by the numbers in their folders' names.
        states: Those of them that could be read.
        where: The save, for errors.

    Raises:
        UnsupportedError: Files and names contradict each other.
        FormatError: What the names mean is not recorded.
    """
    said: dict[Place, str] = {}
    for state in states.values():
        known = _said(state)
        if known is not None:
            said.setdefault(known, state.file)
    if len(said) > 1:
        (one, first), (other, second) = list(said.items())[:2]
        raise mixed(where, f"`{first}` is of {shown(one)}, `{second}` of {shown(other)} ranks")
    lengths = {len(key) for key in named}
    if said:
        sizes = next(iter(said))
        expected = 1 + (sizes.pipeline > 1) + (sizes.expert > 1)
        if lengths != {expected}:
            raise mixed(
                where,
                f"{shown(sizes)} ranks have {expected} numbers in the names of their folders",
            )
        return sizes
    return _sizes_of_names(named, where)


def _said(state: RankState) -> Place | None:
    found = [
        next((value for name in names if (value := state.argument(name)) is not None), None)
        for names in _SIZES
    ]
    if found[2] is None:
        return None
    pipeline, expert, tensor = (1 if value is None else value for value in found)
    if min(pipeline, expert, tensor) < 1 or pipeline * expert * tensor > MAX_RANKS:
        raise UnsupportedError(
            "the arguments do not say how many ranks there are",
            where=state.file,
            why=f"{pipeline} pipeline stages, {expert} and {tensor} ranks in each",
        )
    return Place(pipeline, expert, tensor)


def _sizes_of_names(named: Mapping[Numbers, str], where: str) -> Place:
    length = len(next(iter(named)))
    if length == 2:
        raise FormatError(
            "what the second number in the folders' names means is not recorded",
            where=where,
            why="it is that of a pipeline stage or of an expert-parallel rank, which `args` in "
            "the files would say",
        )
    tops = [1 + max(key[position] for key in named) for position in range(length)]
    sizes = Place(tops[1], tops[2], tops[0]) if length == 3 else Place(1, 1, tops[0])
    if sizes.pipeline * sizes.expert * sizes.tensor > MAX_RANKS:
        raise mixed(where, f"folders are numbered up to {shown(sizes)}")
    return sizes


def place_of(key: Numbers, sizes: Place) -> Place:
    """Return the place that the numbers in a folder's name mean."""
    if len(key) == 3:
        return Place(key[1], key[2], key[0])
    second = key[1] if len(key) == 2 else 0
    return Place(second, 0, key[0]) if sizes.pipeline > 1 else Place(0, second, key[0])


def file_of(place: Place, sizes: Place) -> str:
    """Return the file of a rank, relative to the save's folder."""
    pipeline = f"_{place.pipeline:03d}" if sizes.pipeline > 1 else ""
    expert = f"_{place.expert:03d}" if sizes.expert > 1 else ""
    return f"mp_rank_{place.tensor:02d}{pipeline}{expert}/{MODEL}"


def all_places(sizes: Place) -> list[Place]:
    """Return the places of all ranks in their order."""
    return [
        Place(pipeline, expert, tensor)
        for pipeline in range(sizes.pipeline)
        for expert in range(sizes.expert)
        for tensor in range(sizes.tensor)
    ]


def shown(sizes: Place) -> str:
    """Return sizes as people write them: tensor x pipeline x expert."""
    return f"{sizes.tensor} x {sizes.pipeline} x {sizes.expert} (tensor x pipeline x expert)"
