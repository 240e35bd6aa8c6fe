"""Which rows of which tensor of a model an adapter changes, and with what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import add

from ckptctl.catalog import TensorEntry
from ckptctl.errors import MappingError, UnsupportedError, listed, spell_option
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.adapters import (
    APART,
    ROLES,
    adapters_apart,
    models_apart,
    scaled_biases,
)
from ckptctl.planner.mapping.mapped import MappedTensor, Region, View
from ckptctl.planner.mapping.source import SurplusError
from ckptctl.planner.mapping.tensors import map_tensors
from ckptctl.planner.strided import Strided
from ckptctl.units import counted

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of a stored tensor, its rows (A: its columns) maybe in another order than wanted.

    Attributes:
        axes: Sizes of the axes that the rows are made of, outermost first; ``()``: in order.
        order: Those axes as they are wanted, as indices into *axes*.
    """

    key: str
    start: int
    axes: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    def of_rows(self, entry: TensorEntry, rows: int) -> Strided:
        """Return the part of the stored tensor *entry*, so many rows, as they are wanted."""
        return self._in_order(Strided.whole(entry).narrow(0, self.start, rows), 0)

    def of_columns(self, entry: TensorEntry) -> Strided:
        """Return all of the stored tensor *entry*, its columns as they are wanted."""
        return self._in_order(Strided.whole(entry), 1)

    def _in_order(self, tensor: Strided, dim: int) -> Strided:
        if not self.axes:
            return tensor
        split = tensor.split(dim, self.axes)
        order = [dim + axis for axis in self.order]
        rest = range(dim + len(order), len(split.shape))
        return split.permute((*range(dim), *order, *rest)).merge(dim, len(order))


@dataclass(frozen=True, slots=True)
class Delta:
    """What becomes of some rows of a tensor of the model.

    Attributes:
        stop: The row after the last one.
        rank: The size that A and B share.
        magnitude: Their lengths; None: no DoRA.
        beneath: The adapter's own copy of the tensor, to be changed instead; None: it has none.
        bias: The model's bias that is scaled as the rows are; None: there is none, or it stays.
    """

    key: str
    start: int
    stop: int
    rank: int
    a: Factor
    b: Factor
    magnitude: Factor | None
    beneath: str | None = None
    bias: Factor | None = None


@dataclass(frozen=True, slots=True)
class Deltas:
    """An adapter, laid over a model.

    Attributes:
        replaced: For tensors that are exchanged as a whole what the adapter has instead: a tensor,
            or the part of a stack.
        pinned: Tensors of the model, changed or replaced, that are never cast.
        logical: Names of what it changes or replaces in the tables of the model type.
    """

    changed: tuple[Delta, ...]
    replaced: Mapping[str, Region]
    pinned: frozenset[str]
    logical: frozenset[str] = frozenset()


class AdapterMismatchError(MappingError):
    """An adapter changes what its model does not have; whoever knows their paths adds them."""


def deltas(
    base: Family,
    layouts: tuple[str, str],
    shapes: tuple[Shapes, Shapes],
    sizes: Mapping[str, int],
    lists: Mapping[str, Sequence[int]],
) -> Deltas:
    """Lay an adapter over a model: of *layouts* and *shapes* the model's come first."""
    model = map_tensors(
        models_apart(base, layouts[0]), layouts[0], APART, shapes[0], sizes, partial=True,
        tied=False, lists=lists,
    )  # fmt: skip
    known = {axis: size for axis, size in model.sizes.items() if isinstance(size, int)}
    try:
        adapter = map_tensors(
            adapters_apart(base, layouts[0]), layouts[1], APART, shapes[1], known, partial=True,
            tied=False, lists=lists,
        )  # fmt: skip
    except SurplusError as error:
        raise AdapterMismatchError(
            f"the adapter has {error.name} = {error.count:,}, but its model has {error.stated:,}",
            hint="check that the adapter belongs to this model",
        ) from error
    return _Formulas(base, layouts, model.tensors, adapter.tensors, shapes).result()


class _Formulas:
    def __init__(
        self,
        base: Family,
        layouts: tuple[str, str],
        model: Sequence[MappedTensor],
        adapter: Sequence[MappedTensor],
        shapes: tuple[Shapes, Shapes],
    ) -> None:
        self.base, self.layouts, self.shapes = base, layouts, shapes
        self.model = {item.targets[0].key: item for item in model}
        self.parts: dict[str, dict[str, MappedTensor]] = {}
        for item in chain.from_iterable(map(_one_by_one, adapter)):
            head, dot, rest = item.targets[0].key.partition(".")
            logical, role = head.rsplit("-", 1)
            self.parts.setdefault(f"{logical}{dot}{rest}", {})[role] = item
        self._choose_variants()

    def _choose_variants(self) -> None:
        """Forget what a layer would be of another variant: the model shows which one it is of.

        An adapter has no more than one name for what two variants have, as a norm before experts
        or before a dense layer.
        """
        variants = {t.name.partition(".")[0] for t in self.base.tensors.values() if t.variant}
        there = {
            _piece(item)
            for name, roles in self.parts.items()
            if name in self.model
            for item in roles.values()
        }
        self.parts = {
            name: roles
            for name, roles in self.parts.items()
            if name in self.model
            or name.partition(".")[0] not in variants
            or any(_piece(item) not in there for item in roles.values())
        }

    def result(self) -> Deltas:
        homeless = [
            _source(item)
            for name, roles in self.parts.items()
            if name not in self.model
            for item in list(roles.values())[:1]
        ]
        if homeless:
            raise AdapterMismatchError(
                f"the model is missing the layers of {counted(len(homeless), 'adapter tensor')}",
                why=listed(homeless),
                hint="check that the adapter belongs to this model; if these layers are tied to "
                f"others, convert the model with {spell_option('--untie')} first",
            )
        changed: list[Delta] = []
        replaced: dict[str, Region] = {}
        pinned: set[str] = set()
        for name, roles in self.parts.items():
            key = _source(self.model[name])
            if name.partition(".")[0] in self.base.pinned:
                pinned.add(key)
            trained = self._trained(key, roles)
            if trained is not None:
                replaced[key] = self._whole(name, trained)
            else:
                changed.append(self._delta(name, roles))
        return Deltas(
            tuple(dict.fromkeys(changed)), replaced, frozenset(pinned), frozenset(self.parts)
        )

    def _trained(self, key: str, roles: Mapping[str, MappedTensor]) -> MappedTensor | None:
        """Return what takes the place of a tensor: one that was trained as a whole, or a bias.

        The bias of a layer with factors is trained in the layer that these are laid over.
        """
        vector = len(self.shapes[0][key]) == 1
        return roles.get("saved") or (roles.get("beneath") if vector else None)

    def _delta(self, name: str, roles: Mapping[str, MappedTensor]) -> Delta:
        for role in ROLES[:2]:
            if role not in roles:
                there = _source(next(iter(roles.values())))
                raise UnsupportedError(f"`{there}` has no matching `{role}`", where=there)
        place = self.model[name].sources[0]
        a, b, magnitude = (roles.get(role) for role in ROLES)
        assert a is not None and b is not None
        ranks = a.sources[0].sizes[0], b.sources[0].sizes[-1]
        if ranks[0] != ranks[1] or not ranks[0]:
            raise UnsupportedError(
                f"A has rank {ranks[0]}, B has rank {ranks[1]}",
                where=f"tensors `{_source(a)}` and `{_source(b)}`",
            )
        return Delta(
            place.key,
            0 if place.step else place.origin[0],
            place.sizes[0] * place.step or place.origin[0] + place.sizes[0],
            ranks[0],
            _factor(a, 1),
            _rows(place, b),
            _rows(place, magnitude) if magnitude else None,
            self._whole(name, roles["beneath"]).key if "beneath" in roles else None,
            self._bias(name) if magnitude else None,
        )

    def _bias(self, name: str) -> Factor | None:
        """Return the bias of a layer with a magnitude, if that scales it."""
        head, dot, rest = name.partition(".")
        bias = scaled_biases(self.base, self.layouts[1]).get(head, "")
        item = self.model.get(f"{bias}{dot}{rest}")
        if item is None:
            return None
        if self._row_order(head) != self._row_order(bias):
            raise MappingError(
                "a bias that DoRA scales is ordered differently from the rows of its weight",
                where=f"tensor `{_source(item)}`",
                hint="convert the model to the adapter's layout first",
            )
        return Factor(_source(item), item.sources[0].origin[0])

    def _row_order(self, head: str) -> tuple[str, ...]:
        leaves = (
            tensor.leaves[self.layouts[0]]
            for tensor in self.base.tensors.values()
            if tensor.name.partition(".")[0] == head and self.layouts[0] in tensor.leaves
        )
        return next(leaves).dims[0]

    def _whole(self, name: str, saved: MappedTensor) -> Region:
        """Return what of the adapter takes the place of a tensor of the model."""
        old, new = self.model[name].sources[0], saved.sources[0]
        shapes = self.shapes[0][old.key], self.shapes[1][new.key]
        lead = len(saved.targets[0].lead)
        inside = new.sizes[:lead] == (1,) * lead and new.sizes[lead:] == old.sizes
        whole = old.sizes == shapes[0] and inside and new.dims == saved.targets[0].dims
        part = shapes[0] == shapes[1] and _lies_alike(old, saved)
        part = part and (old.origin, old.sizes) == (new.origin, new.sizes)
        if not (whole or part) or self.model[name].plus != saved.plus:
            raise MappingError(
                "a tensor that the adapter replaces is stored differently in the model",
                where=f"tensor `{new.key}`",
                why="the two layouts split it or order it differently",
                hint="convert the model to the adapter's layout first",
            )
        return Region(new.key, new.origin, new.sizes) if whole else _all_of(new.key, shapes[1])


def _all_of(key: str, shape: tuple[int, ...]) -> Region:
    return Region(key, (0,) * len(shape), shape)


def _one_by_one(item: MappedTensor) -> Iterator[MappedTensor]:
    """Yield what one tensor of an adapter is to the model's, which may keep its entries apart."""
    source = item.sources[0]
    start = len(item.targets[0].lead)
    if source.dims[:start] != item.targets[0].dims[:start]:
        yield item
        return
    for target in item.targets:
        origin = (*map(add, source.origin, target.lead), *source.origin[start:])
        part = replace(source, origin=origin, sizes=(1,) * start + source.sizes[start:])
        yield replace(item, sources=(part,), targets=(target,))


def _source(item: MappedTensor) -> str:
    return item.sources[0].key


def _piece(item: MappedTensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    view = item.sources[0]
    return view.key, view.origin, view.sizes


def _rows(place: View, item: MappedTensor) -> Factor:
    """Return the rows of a factor or a magnitude that go with those of a layer at *place*.

    Of a tensor whose parts are interleaved they are all rows, which its parts have in common.
    """
    if not place.step and not item.sources[0].step:
        return _factor(item, 0)
    if not _lies_alike(place, item):
        raise UnsupportedError(
            "an adapter cannot be merged into rows of several layers that are interleaved "
            "differently",
            where=f"tensors `{place.key}` and `{_source(item)}`",
            hint="convert the adapter to `peft`, or the model to the adapter's layout, first",
        )
    return Factor(_source(item), 0)


def _lies_alike(place: View, item: MappedTensor) -> bool:
    """Return whether the rows of *item* lie in what stores it as those of a layer at *place*."""
    view, wanted = item.sources[0], item.targets[0]
    orders = (tuple(chain.from_iterable(one.dims)) for one in (view, wanted))
    same = (view.origin[:2], view.sizes[:2], view.step)
    return same == (place.origin[:2], place.sizes[:2], place.step) and len({*orders}) == 1


def _factor(item: MappedTensor, dim: int) -> Factor:
    source, target = item.sources[0], item.targets[0]
    before, after = source.dims[dim - len(source.sizes)], target.dims[dim - len(target.sizes)]
    start = source.origin[0]
    if before == after:
        return Factor(source.key, start)
    sizes = tuple(item.axes[axis] for axis in before)
    return Factor(source.key, start, sizes, tuple(before.index(axis) for axis in after))
