"""What becomes of each tensor when a checkpoint changes its layout, and how its axes move."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ckptctl.catalog import TensorEntry, is_computed
from ckptctl.errors import MappingError, spell_option
from ckptctl.planner.families.tables import Tensor
from ckptctl.planner.layouts import Layout
from ckptctl.planner.mapping.logical import stand_in
from ckptctl.planner.strided import Strided
from ckptctl.units import counted


class Region(NamedTuple):
    """A part of a stored tensor, or without *sizes* all of it."""

    key: str
    origin: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RedundantData:
    """Elements of the source that no target has, because they are zero or repeat others.

    Attributes:
        part: The elements.
        same_as: Elements that are kept and have to be the same, or None if *part* has to be zero.
        kind: ``tensor`` if *part* is a complete one, ``tiles`` of embeddings for aspect ratios, or
            ``padding`` of a vocabulary.
    """

    part: Region
    same_as: Region | None = None
    kind: Literal["tensor", "tiles", "padding"] = "tensor"

    @classmethod
    def copy(cls, key: str, of: str) -> RedundantData:
        """Return a tensor that has to be the same as another one, which is kept."""
        return cls(Region(key), Region(of))

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the tensors to compare."""
        return (self.part.key, *([self.same_as.key] if self.same_as else ()))

    def under(self, root: str) -> RedundantData:
        """Return it with *root* before its keys."""
        part, same_as = self.part, self.same_as
        return replace(
            self,
            part=part._replace(key=root + part.key),
            same_as=same_as and same_as._replace(key=root + same_as.key),
        )


class SourceTensor(NamedTuple):
    """A stored tensor of the source, and the logical tensor that is read from it.

    Attributes:
        logical: Name of the logical tensor with indices filled in, as in ``q.3``.
        plus: What is added to each of its elements, which are then computed, not copied.
    """

    key: str
    shape: tuple[int, ...]
    logical: str
    plus: int = 0


class TargetTensor(NamedTuple):
    """A stored tensor of the target, as far as a logical tensor fills it.

    Attributes:
        tensor: It has the elements that the logical tensor has. Its parts are those of stand-ins
            for the sources (:mod:`ckptctl.planner.mapping.logical`).
    """

    key: str
    tensor: Strided


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One logical tensor on both sides.

    Attributes:
        sources: The stored tensors that together hold it; there is at least one.
        targets: Those that are to hold it.
    """

    sources: tuple[SourceTensor, ...]
    targets: tuple[TargetTensor, ...]

    @classmethod
    def same(
        cls, source: str, target: str, shape: tuple[int, ...], logical: str = ""
    ) -> MappedTensor:
        """Return a stored tensor that keeps its axes; *logical* is *target* if it is unknown."""
        read = SourceTensor(source, shape, logical or target)
        return cls((read,), (TargetTensor(target, stand_in(0, shape)),))

    @property
    def logical(self) -> str:
        """Return its name with indices filled in."""
        return self.sources[0].logical


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


@dataclass(frozen=True, slots=True)
class ComposedTensor:
    """A stored tensor of the target, composed of elements of the source's stored tensors.

    Attributes:
        tensor: Its parts are those of stand-ins, which are numbered as *sources* are.
    """

    key: str
    tensor: Strided
    sources: tuple[SourceTensor, ...]

    @classmethod
    def same(cls, source: str, target: str, shape: tuple[int, ...]) -> ComposedTensor:
        """Return a stored tensor that keeps its axes, whatever they are."""
        return cls(target, stand_in(0, shape), (SourceTensor(source, shape, target),))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape."""
        return self.tensor.shape

    @property
    def keys(self) -> dict[str, None]:
        """Return the keys of the source's tensors, each once."""
        return dict.fromkeys([source.key for source in self.sources])

    @property
    def logical(self) -> dict[str, list[SourceTensor]]:
        """Return the source's tensors by the logical tensors that are read from them."""
        groups: dict[str, list[SourceTensor]] = {}
        for source in self.sources:
            groups.setdefault(source.logical, []).append(source)
        return groups

    @property
    def place(self) -> tuple[object, ...]:
        """Return a value that tensors share which arrange their sources' elements alike."""
        return self.shape, tuple([(part.of.name, *part[1:]) for part in self.tensor.parts])

    @property
    def renames(self) -> bool:
        """Return whether a stored tensor is kept, all its bytes in order."""
        first, *others = self.sources
        if others or first.plus:
            return False
        same = all(self.tensor == Strided.whole(part.of) for part in self.tensor.parts)
        return same and (bool(self.tensor.parts) or first.shape == self.shape)

    @property
    def is_covered(self) -> bool:
        """Return whether logical tensors give it all of its elements."""
        return self.tensor.covered == math.prod(self.shape)

    def elements(self, entries: Mapping[str, TensorEntry], dtype: str | None = None) -> Strided:
        """Return it as elements of stored tensors, to which nothing is added.

        Args:
            entries: The source's tensors.
            dtype: The dtype to which elements are cast, or None to keep theirs.

        Raises:
            MappingError: They have different dtypes.
        """
        read = [entries[source.key] for source in self.sources]
        stored_dtype = read[0].dtype
        for entry in read:
            if entry.dtype != stored_dtype:
                raise MappingError(
                    f"parts of one tensor have different dtypes: {stored_dtype} and {entry.dtype}",
                    where=f"tensor `{entry.name}`",
                    why=f"they are merged into one tensor, `{self.key}`",
                )
        parts = [part._replace(of=read[int(part.of.name)]) for part in self.tensor.parts]
        return Strided(self.shape, stored_dtype, dtype or stored_dtype, tuple(parts))

    def __add__(self, other: ComposedTensor) -> ComposedTensor:
        """Return the tensor with the parts and the sources of *other* added."""
        count = len(self.sources)
        others = [
            part._replace(of=replace(part.of, name=str(count + int(part.of.name))))
            for part in other.tensor.parts
        ]
        parts = (*self.tensor.parts, *others)
        tensor = replace(self.tensor, parts=parts)
        return replace(self, tensor=tensor, sources=(*self.sources, *other.sources))


def compose(
    tensors: Iterable[MappedTensor], root: str = "", prefix: str = ""
) -> dict[str, ComposedTensor]:
    """Return the stored tensors of the target by their keys, in the order of *tensors*.

    Keys of the source get *root* before them, but for those that no checkpoint has, and keys of the
    target *prefix*.
    """
    composed: dict[str, ComposedTensor] = {}
    for mapped in tensors:
        sources = mapped.sources
        if root:
            sources = tuple(
                [
                    SourceTensor(key if is_computed(key) else root + key, shape, logical, plus)
                    for key, shape, logical, plus in sources
                ]
            )
        for target in mapped.targets:
            key, tensor = prefix + target.key, target.tensor
            made = ComposedTensor(key, tensor, sources)
            composed[key] = composed[key] + made if key in composed else made
    return composed


def require_covered(tensors: Sequence[MappedTensor]) -> None:
    """Refuse a target tensor of which only some parts are there."""
    lacking: dict[str, int] = {}
    for mapped in tensors:
        for key, tensor in mapped.targets:
            lacking[key] = lacking.get(key, math.prod(tensor.shape)) - tensor.covered
    partly = next((key for key, count in lacking.items() if count), None)
    if partly is not None:
        raise MappingError(
            "a target tensor would be only partly filled",
            where=f"tensor `{partly}`",
            why="the tensors for the rest of it are missing",
            hint=f"convert all of them or none ({spell_option('--include')}, "
            f"{spell_option('--exclude')})",
        )


def notes_on_sums(tensors: Iterable[MappedTensor]) -> Iterator[str]:
    """Yield notes on tensors to whose elements a number is added."""
    read = (one.sources[0] for one in tensors)
    sums = Counter((one.logical.partition(".")[0], one.plus) for one in read if one.plus)
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
