"""Match an adapter to a model: which rows of which tensor change, and by which factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptctl.catalog import ComputedTensor, ComputeInput, TensorEntry, computed_name
from ckptctl.errors import MappingError, UnsupportedError, quote_names, spell_option
from ckptctl.planner.copying.blocks import build_rearranged_file, build_view, is_view
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.adapters import (
    FACTOR_ROLES,
    UNFUSED,
    derive_unfused_adapters,
    derive_unfused_model,
    find_scaled_biases,
)
from ckptctl.planner.mapping.mapped import ComposedTensor, compose_tensors
from ckptctl.planner.mapping.source import SurplusError
from ckptctl.planner.mapping.tensors import map_tensors
from ckptctl.planner.strided import StridedTensor
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Delta:
    """Low-rank change of some rows of one model tensor.

    Attributes:
        rows: The rows that change.
        factors: Names of A and B in the adapter.
        a: ``[rank, columns]``, with the columns in the model's order.
        b: ``[rows, rank]``, with the rows in the order of *rows*.
        magnitude: DoRA's row norms in the order of *rows*, or None without DoRA.
        beneath: The adapter's own copy of the base tensor, which is changed instead, or None.
        bias: Name of the model's bias that DoRA scales too, and the index of its first element;
            None if the bias stays as it is.
    """

    key: str
    rows: range
    factors: tuple[str, str]
    a: StridedTensor
    b: StridedTensor
    magnitude: StridedTensor | None = None
    beneath: StridedTensor | None = None
    bias: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Deltas:
    """All changes of an adapter to one model.

    Attributes:
        replaced: Fully trained tensors of the adapter, by the model tensor that they replace.
        pinned: Changed or replaced model tensors whose dtype must stay.
        logical: Logical names (from the family's tables) of everything changed or replaced.
    """

    changed: tuple[Delta, ...]
    replaced: Mapping[str, StridedTensor]
    pinned: frozenset[str]
    logical: frozenset[str] = frozenset()


def deltas(
    base: Family,
    layouts: tuple[str, str],
    shapes: Shapes,
    factors: Mapping[str, TensorEntry],
    sizes: Mapping[str, int],
    lists: Mapping[str, Sequence[int]],
    paths: tuple[str, str],
) -> Deltas:
    """Match an adapter's factors to the tensors of a model.

    Args:
        base: The model's family.
        layouts: The layouts of the model and of the adapter.
        shapes: Shapes of the model's tensors.
        factors: The adapter's tensors.
        sizes: Axis sizes from the model's configuration.
        lists: Lists of layer numbers from the configuration.
        paths: Paths of the model and the adapter, for errors.
    """
    both = f"adapter `{paths[1]}` and model `{paths[0]}`"
    try:
        model = map_tensors(
            derive_unfused_model(base, layouts[0]), layouts[0], UNFUSED, shapes, sizes, partial=True,
            tied=False, lists=lists,
        )  # fmt: skip
    except SurplusError as error:
        error.where = paths[0]
        raise
    known = {axis: size for axis, size in model.sizes.items() if isinstance(size, int)}
    held = {key: entry.shape for key, entry in factors.items()}
    try:
        adapter = map_tensors(
            derive_unfused_adapters(base, layouts[0]), layouts[1], UNFUSED, held, known, partial=True,
            tied=False, lists=lists,
        )  # fmt: skip
    except SurplusError as error:
        raise MappingError(
            f"the adapter has {error.name} = {error.count:,}, but its model has {error.stated:,}",
            where=both,
            hint="check that the adapter belongs to this model",
        ) from error
    composed = compose_tensors(model.tensors), compose_tensors(adapter.tensors)
    return _Formulas(base, layouts, *composed, shapes, factors).result(both)


class _Formulas:
    def __init__(
        self,
        base: Family,
        layouts: tuple[str, str],
        model: Mapping[str, ComposedTensor],
        adapter: Mapping[str, ComposedTensor],
        shapes: Shapes,
        factors: Mapping[str, TensorEntry],
    ) -> None:
        self.base, self.layouts, self.shapes, self.factors = base, layouts, shapes, factors
        self.model = model
        self.parts: dict[str, dict[str, ComposedTensor]] = {}
        for key, item in adapter.items():
            head, dot, rest = key.partition(".")
            logical, role = head.rsplit("-", 1)
            self.parts.setdefault(f"{logical}{dot}{rest}", {})[role] = item
        self._choose_variants()

    def _choose_variants(self) -> None:
        """Drop parts that belong to another variant of a layer than the one the model has.

        The same adapter tensor can match several variants, such as the norm before experts and the
        norm before a dense layer.
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

    def result(self, paths: str) -> Deltas:
        """Build the changes.

        *paths* names both checkpoints in errors.
        """
        homeless = [
            _source(item)
            for name, roles in self.parts.items()
            if name not in self.model
            for item in list(roles.values())[:1]
        ]
        if homeless:
            raise MappingError(
                f"the model is missing the layers of {pluralize(len(homeless), 'adapter tensor')}",
                where=paths,
                why=quote_names(homeless),
                hint="check that the adapter belongs to this model; if these layers are tied to "
                f"others, convert the model with {spell_option('--untie')} first",
            )
        changed: dict[object, Delta] = {}
        replaced: dict[str, StridedTensor] = {}
        pinned: set[str] = set()
        for name, roles in self.parts.items():
            key = _source(self.model[name])
            if name.partition(".")[0] in self.base.pinned:
                pinned.add(key)
            # A layer with factors keeps its trained bias in the base layer beneath them.
            bias = roles.get("beneath") if len(self.shapes[key]) == 1 else None
            trained = roles.get("saved") or bias
            if trained is not None:
                replaced[key] = self._replacement(name, trained)
            else:
                delta = self._delta(name, roles)
                changed.setdefault((delta.key, delta.rows, delta.factors), delta)
        logical = frozenset(self.parts)
        return Deltas(tuple(changed.values()), replaced, frozenset(pinned), logical)

    def _delta(self, name: str, roles: Mapping[str, ComposedTensor]) -> Delta:
        for role in FACTOR_ROLES[:2]:
            if role not in roles:
                there = _source(next(iter(roles.values())))
                raise UnsupportedError(f"`{there}` has no matching `{role}`", where=there)
        layer = self.model[name]
        a, b, magnitude = (roles.get(role) for role in FACTOR_ROLES)
        assert a is not None and b is not None
        ranks = a.shape[0], b.shape[-1]
        if ranks[0] != ranks[1] or not ranks[0]:
            raise UnsupportedError(
                f"A has rank {ranks[0]}, B has rank {ranks[1]}",
                where=f"tensors `{_source(a)}` and `{_source(b)}`",
            )
        rows = _rows(layer)
        return Delta(
            _source(layer),
            range(self.shapes[_source(layer)][0]) if rows is None else rows,
            (_source(a), _source(b)),
            a.bind_entries(self.factors),
            self._rows_of(layer, b),
            self._rows_of(layer, magnitude) if magnitude else None,
            self._replacement(name, roles["beneath"]) if "beneath" in roles else None,
            self._bias(name) if magnitude else None,
        )

    def _rows_of(self, layer: ComposedTensor, item: ComposedTensor) -> StridedTensor:
        """Return the rows of a factor or magnitude that belong to the rows of *layer*.

        If the parts of the tensor are interleaved, all its rows are returned, shared by its parts.
        """
        if _rows(layer) is not None and _rows(item) is not None:
            return item.bind_entries(self.factors)
        stored = self.factors[_source(item)]
        alike = stored.shape[0] == self.shapes[_source(layer)][0]
        if not alike or _along_rows(layer) != _along_rows(item):
            raise UnsupportedError(
                "an adapter cannot be merged into rows of several layers that are interleaved "
                "differently",
                where=f"tensors `{_source(layer)}` and `{_source(item)}`",
                hint="convert the adapter to `peft`, or the model to the adapter's layout, first",
            )
        return StridedTensor.from_entry(stored)

    def _bias(self, name: str) -> tuple[str, int] | None:
        """Find the bias that DoRA scales with a layer, and the index of its first element."""
        head, dot, rest = name.partition(".")
        bias = find_scaled_biases(self.base, self.layouts[1]).get(head, "")
        item = self.model.get(f"{bias}{dot}{rest}")
        if item is None:
            return None
        if self._row_order(head) != self._row_order(bias):
            raise MappingError(
                "a bias that DoRA scales is ordered differently from the rows of its weight",
                where=f"tensor `{_source(item)}`",
                hint="convert the model to the adapter's layout first",
            )
        rows = _rows(item)
        return _source(item), rows.start if rows else 0

    def _row_order(self, head: str) -> tuple[str, ...]:
        leaves = (
            tensor.leaves[self.layouts[0]]
            for tensor in self.base.tensors.values()
            if tensor.name.partition(".")[0] == head and self.layouts[0] in tensor.leaves
        )
        return next(leaves).dims[0]

    def _replacement(self, name: str, saved: ComposedTensor) -> StridedTensor:
        """Return an adapter tensor in the form in which the model stores the one it replaces."""
        old, new = self.model[name], self.factors[_source(saved)]
        if len(saved.sources) == 1 and not saved.sources[0].offset:
            if new.shape == self.shapes[_source(old)] and saved.arrangement == old.arrangement:
                return StridedTensor.from_entry(new)
            if old.is_rename:
                return saved.bind_entries(self.factors)
        raise MappingError(
            "a tensor that the adapter replaces is stored differently in the model",
            where=f"tensor `{_source(saved)}`",
            why="the two layouts split it or order it differently",
            hint="convert the model to the adapter's layout first",
        )


def as_input(
    root: TreePath, tensor: StridedTensor, computed: dict[str, ComputedTensor]
) -> ComputeInput:
    """Return an adapter tensor as a view, or as a virtual file that is added to *computed*."""
    if tensor.parts and is_view(tensor):
        return ComputeInput(root, build_view(tensor.parts[0].entry, tensor))
    made = build_rearranged_file(root, tensor)
    stored = tensor.parts[0].entry.name if tensor.parts else ""
    name = computed_name(f"adapter/{stored}{tensor.shape}@{len(computed)}")
    computed[name] = made
    return ComputeInput(root, made.to_entry(stored, (stored,), name))


def _source(item: ComposedTensor) -> str:
    return item.sources[0].key


def _piece(item: ComposedTensor) -> tuple[str, object]:
    return _source(item), item.arrangement


def _rows(item: ComposedTensor) -> range | None:
    """Return the rows of the stored tensor that are the item's, or None if others lie between."""
    rows = item.shape[0]
    for begin, _, axes in _along_rows(item):
        if sum((size - 1) * stride for size, _, stride in axes) >= rows:
            return None
        return range(begin, begin + rows)
    return range(rows)


def _along_rows(item: ComposedTensor) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
    """List, for each part, its first row, its origin and its axes along the stored rows."""
    return [
        (
            part.begin[0],
            part.origin[0],
            [(axis.size, axis.step, axis.stride) for axis in part.axes if axis.at == 0],
        )
        for part in item.tensor.parts
    ]
