"""What becomes of each tensor when a checkpoint changes its layout, and how its axes move."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckptctl.catalog import TensorEntry
from ckptctl.errors import MappingError, spell_option
from ckptctl.planner.families.tables import Tensor
from ckptctl.planner.layouts import Layout
from ckptctl.planner.mapping.logical import stand_in
from ckptctl.planner.strided import Strided
from ckptctl.units import counted


class Region(NamedTuple):
    """A part of a stored tensor."""

    key: str
    origin: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Omission:
    """Parts of source tensors that no target has.

    Attributes:
        equal: Pairs of parts, kept and left out, that have to be the same.
        empty: Parts that have to be zero.
    """

    equal: tuple[tuple[Region, Region], ...] = ()
    empty: tuple[Region, ...] = ()


@dataclass(frozen=True, slots=True)
class Padding(Omission):
    """Rows behind a vocabulary.

    Attributes:
        rows: Rows of the source, padding included.
        size: Rows that are not padding.
    """

    rows: int = 0
    size: int = 0


class SourceTensor(NamedTuple):
    """A stored tensor of the source."""

    key: str
    shape: tuple[int, ...]


class TargetTensor(NamedTuple):
    """A stored tensor of the target, as far as a logical tensor fills it.

    Attributes:
        tensor: It has the elements that the logical tensor has. Its parts are those of stand-ins
            for the sources (:mod:`ckptctl.planner.mapping.logical`).
    """

    key: str
    tensor: Strided

    @property
    def place(self) -> tuple[object, ...]:
        """Return what is the same for the same elements of any stored tensors."""
        parts = [(part.of.name, *part[1:]) for part in self.tensor.parts]
        return self.tensor.shape, tuple(parts)


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One logical tensor on both sides.

    Attributes:
        logical: Its name with indices filled in, as in ``q.3``.
        sources: The stored tensors that together hold it.
        targets: Those that are to hold it.
        plus: What is added to each of its elements, which are then computed, not copied.
    """

    logical: str
    sources: tuple[SourceTensor, ...]
    targets: tuple[TargetTensor, ...]
    plus: int = 0

    @classmethod
    def same(cls, source: str, target: str, shape: tuple[int, ...]) -> MappedTensor:
        """Return a stored tensor that keeps its axes, whatever they are."""
        written = TargetTensor(target, stand_in(0, shape))
        return cls(target, (SourceTensor(source, shape),), (written,))

    @property
    def renames(self) -> bool:
        """Return whether a stored tensor is kept, all its bytes in order."""
        if not len(self.sources) == len(self.targets) == 1 or self.plus:
            return False
        tensor = self.targets[0].tensor
        same = all(tensor == Strided.whole(part.of) for part in tensor.parts)
        return same and (bool(tensor.parts) or self.sources[0].shape == tensor.shape)


@dataclass(frozen=True, slots=True)
class Zeros:
    """A tensor of zeros that mapped tensors have among their sources and no checkpoint stores.

    Attributes:
        key: Name of a virtual file.
        dtype: torch's dtype name, or empty for that of *like*.
        like: The source's key of the tensor that the zeros fill up, or empty.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str = ""
    like: str = ""


def stored_shapes(tensors: Iterable[MappedTensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each stored tensor of the target."""
    return {target.key: target.tensor.shape for mapped in tensors for target in mapped.targets}


def covered(tensors: Iterable[MappedTensor]) -> dict[str, int]:
    """Return how many elements of each stored tensor of the target there are."""
    counts: dict[str, int] = {}
    for mapped in tensors:
        for target in mapped.targets:
            counts[target.key] = counts.get(target.key, 0) + target.tensor.covered
    return counts


def require_covered(tensors: Sequence[MappedTensor]) -> None:
    """Refuse a target tensor of which only some parts are there."""
    counts = covered(tensors)
    for key, shape in stored_shapes(tensors).items():
        if counts[key] != math.prod(shape):
            raise MappingError(
                "a target tensor would be only partly filled",
                where=f"tensor `{key}`",
                why="the tensors for the rest of it are missing",
                hint=f"convert all of them or none ({spell_option('--include')}, "
                f"{spell_option('--exclude')})",
            )


def as_strided(
    tensors: Sequence[MappedTensor],
    key: str,
    entries: Mapping[str, TensorEntry],
    dtype: str | None = None,
) -> Strided:
    """Return a stored tensor of the target as elements of the source's stored tensors.

    Args:
        tensors: All that it holds; nothing is added to their elements.
        key: The target's tensor.
        entries: The source's tensors.
        dtype: The dtype to which elements are cast, or None to keep theirs.

    Raises:
        MappingError: They have different dtypes.
    """
    stored_dtype = entries[tensors[0].sources[0].key].dtype
    for entry in (entries[source.key] for mapped in tensors for source in mapped.sources):
        if entry.dtype != stored_dtype:
            raise MappingError(
                f"parts of one tensor have different dtypes: {stored_dtype} and {entry.dtype}",
                where=f"tensor `{entry.name}`",
                why=f"they are merged into one tensor, `{key}`",
            )
    pieces = [
        (mapped.sources, target.tensor)
        for mapped in tensors
        for target in mapped.targets
        if target.key == key
    ]
    parts = (
        part._replace(of=entries[sources[int(part.of.name)].key])
        for sources, tensor in pieces
        for part in tensor.parts
    )
    return Strided(pieces[0][1].shape, stored_dtype, dtype or stored_dtype, tuple(parts))


def by_target(tensors: Iterable[MappedTensor]) -> dict[str, list[MappedTensor]]:
    """Return what each stored tensor of the target consists of, by its key.

    Of a logical tensor that several of them hold, each has its own part only.
    """
    by_key: dict[str, list[MappedTensor]] = {}
    for mapped in tensors:
        for target in mapped.targets:
            own = mapped if len(mapped.targets) == 1 else replace(mapped, targets=(target,))
            by_key.setdefault(target.key, []).append(own)
    return by_key


def notes_on_sums(tensors: Iterable[MappedTensor]) -> Iterator[str]:
    """Yield notes on tensors to whose elements a number is added."""
    sums = Counter((one.logical.partition(".")[0], one.plus) for one in tensors if one.plus)
    for (name, plus), count in sums.items():
        done = "added to" if plus > 0 else "subtracted from"
        yield (
            f"{abs(plus)} is {done} `{name}`: {counted(count, 'tensor')} computed and rounded to "
            "the dtype, not copied"
        )


def stays_interleaved(tensor: Tensor, source: Layout, target: Layout) -> bool:
    """Return whether parts that take turns do so in the target, too: all are kept as one."""
    sides = (layout.holders[tensor.name].parts for layout in (source, target))
    here, there = ({part.name: leaf.place for part, leaf in parts} for parts in sides)
    return bool(source.leaves[tensor.name].within) and here == there
