"""From the tensors of one layout to those of another: names, axes, and nothing left over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from ckptctl.errors import MappingError, listed
from ckptctl.planner.axes import Observation, dim_sizes, solve
from ckptctl.planner.layouts import Family, Layout, Tie
from ckptctl.planner.matching import key_of, match, missing, require_known, require_whole
from ckptctl.planner.tables import Leaf, Tensor


@dataclass(frozen=True, slots=True)
class View:
    """How one stored tensor shows a logical tensor, or a part of it.

    Attributes:
        key: The stored tensor.
        dims: The logical axes grouped in each dimension, outermost first, as indices into
            ``MappedTensor.axes``: the dims of a :class:`~ckptctl.planner.plan.Side`. The first
            ``len(lead)`` of them hold one spread axis each, the others are stored.
        origin: Where the logical tensor begins in each stored dimension.
        sizes: Its extent in each stored dimension.
        lead: Position along each axis that is spread over several stored tensors.
    """

    key: str
    dims: tuple[tuple[int, ...], ...]
    origin: tuple[int, ...]
    sizes: tuple[int, ...]
    lead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One logical tensor on both sides.

    Attributes:
        logical: Its name with indices filled in, as in ``q.3``.
        axes: Sizes of its atomic axes, in the source's order.
        sources: The stored tensors that together hold it.
        targets: Those that are to hold it.
    """

    logical: str
    axes: tuple[int, ...]
    sources: tuple[View, ...]
    targets: tuple[View, ...]

    @property
    def renames(self) -> bool:
        """Return whether the bytes stay as they are."""
        pairs = zip(self.sources, self.targets, strict=False)
        return len(self.sources) == len(self.targets) == 1 and all(
            (a.dims, a.origin, a.sizes) == (b.dims, b.origin, b.sizes) for a, b in pairs
        )


@dataclass(frozen=True, slots=True)
class TensorMap:
    """How a whole checkpoint changes its layout.

    Attributes:
        tensors: In the target's natural order, layers in numeric order.
        target_shapes: Shape of each stored tensor of the target, in the order of the keys.
        dropped: Source keys that are left out, and why.
        must_equal: Pairs of source keys, kept and dropped, whose bytes have to be the same.
        sizes: All axis sizes that are known, and the number of layers as ``i``.
        tied: Whether tied tensors are one.
    """

    tensors: tuple[MappedTensor, ...]
    target_shapes: Mapping[str, tuple[int, ...]]
    dropped: Mapping[str, str]
    must_equal: tuple[tuple[str, str], ...]
    sizes: Mapping[str, int]
    tied: bool


def map_tensors(
    family: Family,
    source_layout: str,
    target_layout: str,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int] | None = None,
    *,
    tied: bool | None = None,
    untie: bool = False,
    partial: bool = False,
) -> TensorMap:
    """Return how the tensors of *shapes* become those of another layout.

    Args:
        family: The model type.
        source_layout: Layout of the keys of *shapes*.
        target_layout: Layout to produce. The same one keeps every tensor as it is.
        shapes: Shape of each source tensor by key.
        sizes: Axis sizes from a configuration (:func:`ckptctl.planner.configs.read_sizes`).
        tied: Whether the configuration ties tensors; None: as the family does.
        untie: Keep both of two tied tensors, whatever they hold.
        partial: A part of the model was chosen: nothing is missing.

    Raises:
        MappingError: Unknown or missing keys, contradictory shapes, axis sizes that do not follow
            from shapes and configuration, or a tensor for which the target has no name.
        UsageError: The family has no such layout.
    """
    source, target = family.layout(source_layout), family.layout(target_layout)
    known = dict(sizes or {})
    run = _Run(family, source, target, shapes, family.tied if tied is None else tied, untie)
    run.check(known, partial)
    run.solve(known)
    return run.result(partial)


class _Run:
    """One call of :func:`map_tensors`."""

    def __init__(
        self,
        family: Family,
        source: Layout,
        target: Layout,
        shapes: Mapping[str, tuple[int, ...]],
        tied: bool,
        untie: bool,
    ) -> None:
        self.family, self.source, self.target = family, source, target
        self.shapes, self.tied, self.untie = shapes, tied, untie
        self.matched = match(source, shapes)
        self.identity = source.name == target.name
        self.sizes: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.must_equal: list[tuple[str, str]] = []
        self.dropped = {} if self.identity else dict(self.matched.dropped)
        self.geometry: dict[object, tuple[tuple[int, ...], _Dims, _Dims]] = {}

    def check(self, known: Mapping[str, int], partial: bool) -> None:
        """Refuse unknown and missing keys, and a number of layers that contradicts *known*."""
        found = self.matched.counts(self.family)
        for index, count in found.items():
            if count > known.get(index, count):
                raise MappingError(
                    f"the checkpoint has more layers than its configuration says: {count}",
                    why=f"{self.family.called(index)} = {known[index]}",
                    hint="do the configuration and all files belong to the same model?",
                )
        self.counts = found | {i: n for i, n in known.items() if i in found}
        lost = missing(self.family, self.source, self.matched, self.counts)
        tied = self._tied_keys()
        lost = [key for key in lost if key not in tied]
        require_known(self.family, self.source, self.matched, lost)
        if not partial:
            require_whole(self.family, self.source, lost, self.tied)

    def _tied_keys(self) -> set[str]:
        """Return the keys of which one suffices, where one of a tied pair is there."""
        keys: set[str] = set()
        for tie in self.family.ties if self.tied else ():
            pair = [(name, ()) for name in (tie.tensor, tie.of)]
            if any(slot in self.matched.keys for slot in pair):
                keys |= {self.source.leaves[n].key.text for n, _ in pair if n in self.source.leaves}
        return keys

    def solve(self, known: Mapping[str, int]) -> None:
        """Find all axis sizes, from one tensor of each kind and shape."""
        kinds: dict[tuple[str, tuple[int, ...]], Observation] = {}
        for (name, _), key in self.matched.keys.items():
            kind = name, self.shapes[key]
            if kind not in kinds:
                kinds[kind] = Observation(key, self.source.leaves[name], self.shapes[key])
        self.sizes = solve(self.family, kinds.values(), known) | self.counts

    def result(self, partial: bool) -> TensorMap:
        """Return the map; *partial*: chosen tensors only."""
        tensors: list[MappedTensor] = []
        homeless: list[str] = []
        for tensor, values in self._wanted():
            origin = self._source_of(tensor, values, partial)
            if origin and tensor.name not in self.target.leaves:
                homeless.append(origin[0])
            elif origin:
                tensors.append(self._mapped(tensor, values, *origin))
        if homeless:
            raise MappingError(
                f"layout `{self.target.name}` of `{self.family.name}` has no place for "
                f"{len(homeless):,} tensors",
                where=f"tensor `{homeless[0]}`",
                why=f"among them {listed(homeless)}",
                hint="a model with these cannot be expressed there; keep its layout",
            )
        tensors += self._passed_through()
        shapes = {view.key: view.sizes for mapped in tensors for view in mapped.targets}
        return TensorMap(
            tuple(tensors),
            shapes,
            self.dropped,
            tuple(self.must_equal),
            self.sizes,
            self.tied and not self.untie,
        )

    def _wanted(self) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """Yield the logical tensors in natural order: a block repeats as a whole."""
        indices: dict[int, set[tuple[int, ...]]] = {}
        for name, values in self.matched.keys:
            indices.setdefault(self.family.tensors[name].block, set()).add(values)
        for number, block in groupby(self.family.tensors.values(), key=lambda t: t.block):
            members = list(block)
            plain = not members[0].indices
            for values in [()] if plain else sorted(indices.get(number, ())):
                yield from ((tensor, values) for tensor in members)

    def _source_of(
        self, tensor: Tensor, values: tuple[int, ...], partial: bool
    ) -> tuple[str, Leaf] | None:
        """Return the key that a logical tensor is read from and how it is stored there."""
        key = self.matched.keys.get((tensor.name, values))
        if self.identity:
            found = (key, self.source.leaves[tensor.name]) if key else None
            return found or (self._untied(tensor) if self.untie and not partial else None)
        for tie in self.family.ties if self.tied else ():
            if tensor.name == tie.of and key is None:
                return self._found(tie.tensor)
            if tensor.name == tie.tensor:
                if partial and not key and self.source.name in tie.stored_in:
                    return None
                return self._tied_source(tie, key)
        return (key, self.source.leaves[tensor.name]) if key else None

    def _tied_source(self, tie: Tie, key: str | None) -> tuple[str, Leaf] | None:
        """Return what the second of two tied tensors is read from; None: the target omits it."""
        kept = self._found(tie.of)
        if self.untie:
            return self._found(tie.tensor) or kept
        if kept and key:
            self.must_equal.append((kept[0], key))
            self.dropped[key] = f"tied: the same as `{kept[0]}`"
        if self.target.name not in tie.stored_in:
            return None
        return kept or self._found(tie.tensor)

    def _untied(self, tensor: Tensor) -> tuple[str, Leaf] | None:
        """Return what a tied tensor that the source leaves out is read from."""
        ties = self.family.ties if self.tied else ()
        return next((self._found(tie.of) for tie in ties if tie.tensor == tensor.name), None)

    def _found(self, name: str) -> tuple[str, Leaf] | None:
        key = self.matched.keys.get((name, ()))
        return (key, self.source.leaves[name]) if key else None

    def _mapped(
        self, tensor: Tensor, values: tuple[int, ...], key: str, stored: Leaf
    ) -> MappedTensor:
        wanted = self.target.leaves[tensor.name]
        shape = self.shapes[key]
        kind = (stored.dims, wanted.dims, shape)
        if kind not in self.geometry:
            self.geometry[kind] = self._geometry(tensor, key, stored, wanted)
        axes, from_dims, to_dims = self.geometry[kind]
        name = tensor.name.format(**dict(zip(tensor.indices, values, strict=True)))
        target = key_of(self.target, tensor, values)
        sizes = shape if from_dims == to_dims else _extents(axes, to_dims)
        return MappedTensor(
            name, axes, (_view(key, from_dims, shape),), (_view(target, to_dims, sizes),)
        )

    def _geometry(
        self, tensor: Tensor, key: str, stored: Leaf, wanted: Leaf
    ) -> tuple[tuple[int, ...], _Dims, _Dims]:
        """Return axis sizes and the dims of both sides; equal orders need no axis sizes."""
        family, shape = self.family, self.shapes[key]
        if stored.dims == wanted.dims:
            plain = tuple((n,) for n in range(len(shape)))
            return shape, plain, plain
        axes = family.expand(stored.axes)
        unknown = [axis for axis in axes if axis not in self.sizes]
        if unknown:
            names = list(dict.fromkeys(family.called(axis) for axis in unknown))
            raise MappingError(
                f"cannot reorder the axes of `{tensor.name.partition('.')[0]}` without "
                f"{' and '.join(names)}",
                where=f"tensor `{key}`",
                why=f"its shape is {shape}: {stored} becomes {wanted}, and no configuration "
                "says how many there are",
                hint="--assets DIR names a directory that holds config.json or params.json",
            )
        position = {axis: n for n, axis in enumerate(axes)}
        from_dims, to_dims = (
            tuple(tuple(position[axis] for axis in family.expand(group)) for group in leaf.dims)
            for leaf in (stored, wanted)
        )
        return tuple(self.sizes[axis] for axis in axes), from_dims, to_dims

    def _passed_through(self) -> list[MappedTensor]:
        """Return the tensors without information, which the same layout keeps."""
        if not self.identity:
            return []
        return [self._same(key) for key in self.matched.dropped]

    def _same(self, key: str) -> MappedTensor:
        shape = self.shapes[key]
        view = _view(key, tuple((n,) for n in range(len(shape))), shape)
        return MappedTensor(key, shape, (view,), (view,))


_Dims = tuple[tuple[int, ...], ...]


def _view(key: str, dims: _Dims, shape: tuple[int, ...]) -> View:
    return View(key, dims, (0,) * len(shape), shape)


def _extents(axes: tuple[int, ...], dims: _Dims) -> tuple[int, ...]:
    named = {str(n): size for n, size in enumerate(axes)}
    return dim_sizes([tuple(str(n) for n in group) for group in dims], named)
