"""Match an adapter's LoRA factors to the rows of the model tensors that they change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ckptctl.catalog import (
    ComputedTensor,
    ComputeInput,
    TensorEntry,
    build_computed_name,
    compute_row_major_strides,
)
from ckptctl.errors import MappingError, UnsupportedError, format_option, quote_names
from ckptctl.planner.copying.blocks import build_rearranged_file, build_view, has_uniform_strides
from ckptctl.planner.families.tables import Leaf, LogicalTensor
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.adapters import (
    FACTOR_ROLES,
    PEFT_LAYOUTS,
    UNFUSED,
    derive_stacked_adapters,
    derive_unfused_adapters,
    derive_unfused_model,
    map_scaled_biases,
)
from ckptctl.planner.mapping.mapped import ComposedTensor, compose_tensors
from ckptctl.planner.mapping.source import ModelFacts, SurplusError
from ckptctl.planner.mapping.tensors import PARTIAL, map_tensors
from ckptctl.planner.strided import StridedTensor
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

Shapes = Mapping[str, tuple[int, ...]]
MAX_ROW_BLOCKS = 1 << 12
"""Maximum number of blocks of rows of a layer that are merged separately."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Low-rank change of some rows of one model tensor.

    Attributes:
        key: Name of the model tensor.
        rows: The rows of the tensor that change, as of a matrix whose columns are the last
            dimension.
        factors: Names of A and B in the adapter.
        a: Factor A, ``[rank, columns]``, with the columns in the model's order.
        b: Factor B, ``[rows, rank]``, with the rows in the order of *rows*.
        magnitude: DoRA magnitudes in the order of *rows*, or None if the layer has no DoRA.
        base_tensor: Copy of the base tensor in the adapter, to which the change is added instead
            of the model's tensor, or None if the adapter has no copy.
        bias: Name of the bias that DoRA scales too, and the index of the bias element for the
            first row, or None if no bias is scaled.
    """

    key: str
    rows: range
    factors: tuple[str, str]
    a: StridedTensor
    b: StridedTensor
    magnitude: StridedTensor | None = None
    base_tensor: StridedTensor | None = None
    bias: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Deltas:
    """All changes that an adapter makes to one model.

    Attributes:
        changed: Low-rank changes of model tensors.
        replaced: Fully trained tensors of the adapter, by name of the replaced model tensor.
        pinned: Names of changed or replaced model tensors that keep their dtype.
        logical_names: Names, in the family's tables, of all changed or replaced tensors.
    """

    changed: tuple[Delta, ...]
    replaced: Mapping[str, StridedTensor]
    pinned: frozenset[str]
    logical_names: frozenset[str] = frozenset()


def join_deltas(parts: Sequence[Deltas]) -> Deltas:
    """Join the changes of different parts of one adapter."""
    return Deltas(
        tuple(delta for part in parts for delta in part.changed),
        {key: tensor for part in parts for key, tensor in part.replaced.items()},
        frozenset().union(*(part.pinned for part in parts)),
        frozenset().union(*(part.logical_names for part in parts)),
    )


@dataclass(frozen=True, slots=True)
class UnfusedModel:
    """The tensors of a model, separated into those of the family's tables.

    Attributes:
        family: The model's family.
        layout: The model's layout.
        path: Path of the model, for error messages.
        shapes: Shapes of the model's tensors.
        layer_lists: Lists of layer numbers from the model's config.json.
        tensors: Elements of each tensor of the tables.
        sizes: Axis sizes that the configuration and the tensors show.
    """

    family: Family
    layout: str
    path: str
    shapes: Shapes
    layer_lists: Mapping[str, Sequence[int]]
    tensors: Mapping[str, ComposedTensor]
    sizes: Mapping[str, int]

    @classmethod
    def map(
        cls,
        family: Family,
        layout: str,
        path: str,
        shapes: Shapes,
        sizes: Mapping[str, int],
        layer_lists: Mapping[str, Sequence[int]],
    ) -> UnfusedModel:
        """Map the tensors of a model, whose configuration states *sizes*."""
        try:
            facts = ModelFacts(sizes=sizes, tied=False, layer_lists=layer_lists)
            unfused_family = derive_unfused_model(family, layout)
            mapped = map_tensors(unfused_family, layout, UNFUSED, shapes, facts, PARTIAL)
        except SurplusError as error:
            error.where = path
            raise
        axis_sizes = {axis: size for axis, size in mapped.sizes.items() if isinstance(size, int)}
        tensors = compose_tensors(mapped.tensors)
        return cls(family, layout, path, shapes, layer_lists, tensors, axis_sizes)

    def find_expert_shape(
        self, tensor: LogicalTensor, _: Leaf, indices: Mapping[str, int]
    ) -> tuple[int, int] | None:
        """Find the shape of the first expert's matrix, or None if a layer has no experts."""
        composed = self.tensors.get(f"{tensor.name.format(**indices)}.0")
        return (composed.shape[0], composed.shape[1]) if composed is not None else None


def match_adapter(
    model: UnfusedModel, layout: str, factors: Mapping[str, TensorEntry], adapter_path: str
) -> Deltas:
    """Match an adapter's factors to the tensors of a model.

    Args:
        model: The model.
        layout: Layout of the adapter.
        factors: The adapter's tensors.
        adapter_path: Path of the adapter, for error messages.
    """
    family = derive_unfused_adapters(model.family, model.layout)
    return _match_factors(model, family, layout, factors, adapter_path)


def match_stacked_adapter(
    model: UnfusedModel,
    factors: Mapping[str, TensorEntry],
    adapter_path: str,
    *,
    is_transposed: bool,
) -> Deltas:
    """Match factors of expert stacks to the tensors of a model that stores experts differently.

    Args:
        model: The model.
        factors: Factors of stacks, named after the parameters of transformers 5.
        adapter_path: Path of the adapter, for error messages.
        is_transposed: Whether A has the stack's output features and B its input features.
    """
    family = derive_stacked_adapters(model.family, model.layout, is_transposed=is_transposed)
    return _match_factors(model, family, PEFT_LAYOUTS[1], factors, adapter_path)


def _match_factors(
    model: UnfusedModel,
    adapter_family: Family,
    layout: str,
    factors: Mapping[str, TensorEntry],
    adapter_path: str,
) -> Deltas:
    both_paths = f"adapter `{adapter_path}` and model `{model.path}`"
    factor_shapes = {key: entry.shape for key, entry in factors.items()}
    try:
        facts = ModelFacts(sizes=model.sizes, tied=False, layer_lists=model.layer_lists)
        adapter = map_tensors(adapter_family, layout, UNFUSED, factor_shapes, facts, PARTIAL)
    except SurplusError as error:
        raise MappingError(
            f"the adapter has {error.name} = {error.count:,}, but its model has {error.stated:,}",
            where=both_paths,
            hint="check that the adapter belongs to this model",
        ) from error
    composed = compose_tensors(adapter.tensors)
    return _AdapterMatcher(model, layout, composed, factors).build_deltas(both_paths)


class _AdapterMatcher:
    """Matches adapter tensors to model tensors by their names in the family's tables."""

    def __init__(
        self,
        model: UnfusedModel,
        layout: str,
        adapter: Mapping[str, ComposedTensor],
        factors: Mapping[str, TensorEntry],
    ) -> None:
        self.family, self.layouts = model.family, (model.layout, layout)
        self.model, self.shapes, self.factors = model.tensors, model.shapes, factors
        self.parts: dict[str, dict[str, ComposedTensor]] = {}
        for key, item in adapter.items():
            head, dot, indices = key.partition(".")
            logical, role = head.rsplit("-", 1)
            self.parts.setdefault(f"{logical}{dot}{indices}", {})[role] = item
        self._drop_other_variants()

    def _drop_other_variants(self) -> None:
        """Drop adapter tensors that were matched to layer variants that the model does not have.

        The same adapter tensor can match several variants, such as the norm before experts and the
        norm before a dense layer.
        """
        variants = {t.name.partition(".")[0] for t in self.family.tensors.values() if t.variant}
        matched_pieces = {
            _get_source_place(item)
            for name, roles in self.parts.items()
            if name in self.model
            for item in roles.values()
        }
        self.parts = {
            name: roles
            for name, roles in self.parts.items()
            if name in self.model
            or name.partition(".")[0] not in variants
            or any(_get_source_place(item) not in matched_pieces for item in roles.values())
        }

    def build_deltas(self, paths: str) -> Deltas:
        """Build the changes of all layers that the adapter matches.

        *paths* names both checkpoints in error messages.
        """
        unmapped = [
            _get_source_key(item)
            for name, roles in self.parts.items()
            if name not in self.model
            for item in list(roles.values())[:1]
        ]
        if unmapped:
            raise MappingError(
                f"the model is missing the layers of {pluralize(len(unmapped), 'adapter tensor')}",
                where=paths,
                why=quote_names(unmapped),
                hint="check that the adapter belongs to this model; if these layers are tied to "
                f"others, convert the model with {format_option('--untie')} first",
            )
        changed: dict[object, Delta] = {}
        replaced: dict[str, StridedTensor] = {}
        pinned: set[str] = set()
        for name, roles in self.parts.items():
            key = _get_source_key(self.model[name])
            if name.partition(".")[0] in self.family.pinned:
                pinned.add(key)
            # PEFT stores the trained bias of a layer with factors in its ``base_layer``.
            bias = roles.get("beneath") if len(self.shapes[key]) == 1 else None
            trained_tensor = roles.get("saved") or bias
            if trained_tensor is not None:
                replaced[key] = self._build_replacement(name, trained_tensor)
            else:
                for delta in self._iterate_deltas(name, roles):
                    changed.setdefault((delta.key, delta.rows, delta.factors), delta)
        logical = frozenset(self.parts)
        return Deltas(tuple(changed.values()), replaced, frozenset(pinned), logical)

    def _iterate_deltas(self, name: str, roles: Mapping[str, ComposedTensor]) -> Iterator[Delta]:
        """Yield the changes of all rows of a layer, which the model may interleave with others."""
        for role in FACTOR_ROLES[:2]:
            if role not in roles:
                present_factor = _get_source_key(next(iter(roles.values())))
                raise UnsupportedError(
                    f"`{present_factor}` has no matching `{role}`", where=present_factor
                )
        layer = self.model[name]
        a, b, magnitude = (roles.get(role) for role in FACTOR_ROLES)
        assert a is not None and b is not None
        ranks = a.shape[0], b.shape[-1]
        if ranks[0] != ranks[1] or not ranks[0]:
            raise UnsupportedError(
                f"A has rank {ranks[0]}, B has rank {ranks[1]}",
                where=f"tensors `{_get_source_key(a)}` and `{_get_source_key(b)}`",
            )
        base_copy = roles.get("beneath")
        base_tensor = self._build_replacement(name, base_copy) if base_copy else None
        key, bound_a = _get_source_key(layer), a.bind_entries(self.factors)
        names = (_get_source_key(a), _get_source_key(b))
        bias = self._find_scaled_bias(name) if magnitude else None
        if self._has_same_interleaving(layer, b):
            # One change then applies to all layers that both tensors interleave.
            rows = range(math.prod(self.shapes[key][:-1]))
            bound_b = StridedTensor.from_entry(self.factors[names[1]])
            scales = (
                StridedTensor.from_entry(self.factors[_get_source_key(magnitude)])
                if magnitude
                else None
            )
            yield Delta(key, rows, names, bound_a, bound_b, scales, base_tensor, bias)
            return
        row_blocks = _split_rows(layer, self.shapes[key])
        is_transposed = any(block.is_transposed for block in row_blocks or ())
        if row_blocks is None or (bias and len(row_blocks) > 1) or (magnitude and is_transposed):
            raise UnsupportedError(
                "an adapter cannot be merged into rows of several layers that are interleaved "
                "differently",
                where=f"tensors `{key}` and `{names[1]}`",
                hint="convert the adapter to `peft`, or the model to the adapter's layout, first",
            )
        bound_b = b.bind_entries(self.factors)
        scales = magnitude.bind_entries(self.factors) if magnitude else None
        for block in row_blocks:
            factors = bound_a, block.select_from(bound_b)
            if block.is_transposed:
                factors = factors[1].permute((1, 0)), factors[0].permute((1, 0))
            block_scales = block.select_from(scales) if scales else None
            yield Delta(key, block.stored_rows, names, *factors, block_scales, base_tensor, bias)

    def _has_same_interleaving(self, layer: ComposedTensor, item: ComposedTensor) -> bool:
        """Check if a factor interleaves its rows with those of others, just as a layer does."""
        if _find_stored_rows(layer) is not None:
            return False
        stored = self.factors[_get_source_key(item)]
        has_same_rows = stored.shape[0] == self.shapes[_get_source_key(layer)][0]
        return has_same_rows and _list_row_axes(layer) == _list_row_axes(item)

    def _find_scaled_bias(self, name: str) -> tuple[str, int] | None:
        """Find the bias that DoRA scales with a layer.

        Returns the key of the stored bias and the index of the layer's first element in it, or None
        if no bias is scaled.
        """
        layer_name, dot, indices = name.partition(".")
        bias_name = map_scaled_biases(self.family, self.layouts[1]).get(layer_name, "")
        item = self.model.get(f"{bias_name}{dot}{indices}")
        if item is None:
            return None
        if self._get_row_axes(layer_name) != self._get_row_axes(bias_name):
            raise MappingError(
                "a bias that DoRA scales is ordered differently from the rows of its weight",
                where=f"tensor `{_get_source_key(item)}`",
                hint="convert the model to the adapter's layout first",
            )
        rows = _find_stored_rows(item)
        return _get_source_key(item), rows.start if rows else 0

    def _get_row_axes(self, head: str) -> tuple[str, ...]:
        leaves = (
            tensor.leaves[self.layouts[0]]
            for tensor in self.family.tensors.values()
            if tensor.name.partition(".")[0] == head and self.layouts[0] in tensor.leaves
        )
        return next(leaves).dims[0]

    def _build_replacement(self, name: str, trained_tensor: ComposedTensor) -> StridedTensor:
        """Return the tensor that replaces model tensor *name*, or raise if layouts differ."""
        model_item, adapter_entry = self.model[name], self.factors[_get_source_key(trained_tensor)]
        if len(trained_tensor.sources) == 1 and not trained_tensor.sources[0].offset:
            if (
                adapter_entry.shape == self.shapes[_get_source_key(model_item)]
                and trained_tensor.arrangement == model_item.arrangement
            ):
                return StridedTensor.from_entry(adapter_entry)
            if model_item.is_rename:
                return trained_tensor.bind_entries(self.factors)
        raise MappingError(
            "a tensor that the adapter replaces is stored differently in the model",
            where=f"tensor `{_get_source_key(trained_tensor)}`",
            why="the two layouts split it or order it differently",
            hint="convert the model to the adapter's layout first",
        )


def make_compute_input(
    root: TreePath, tensor: StridedTensor, computed: dict[str, ComputedTensor]
) -> ComputeInput:
    """Return *tensor* as an input of a virtual file.

    If it is not a strided view of a stored tensor, it is added to *computed* as a virtual file.
    """
    if tensor.parts and has_uniform_strides(tensor):
        return ComputeInput(root, build_view(tensor.parts[0].entry, tensor))
    rearranged_tensor = build_rearranged_file(root, tensor)
    stored_name = tensor.parts[0].entry.name if tensor.parts else ""
    name = build_computed_name(f"adapter/{stored_name}{tensor.shape}@{len(computed)}")
    computed[name] = rearranged_tensor
    return ComputeInput(root, rearranged_tensor.to_entry(stored_name, (stored_name,), name))


def _get_source_key(item: ComposedTensor) -> str:
    return item.sources[0].key


def _get_source_place(item: ComposedTensor) -> tuple[str, object]:
    return _get_source_key(item), item.arrangement


def _find_stored_rows(item: ComposedTensor) -> range | None:
    """Return the rows of the stored tensor that belong to *item*, or None if not contiguous."""
    rows = item.shape[0]
    for first_row, _, axes in _list_row_axes(item):
        if sum((size - 1) * stride for size, _, stride in axes) >= rows:
            return None
        return range(first_row, first_row + rows)
    return range(rows)


def _list_row_axes(item: ComposedTensor) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
    """List the stored first row, the first row and the row axes of each part of *item*.

    Each axis is a tuple of size, step and stride.
    """
    return [
        (
            part.stored_origin[0],
            part.origin[0],
            [(axis.size, axis.step, axis.stride) for axis in part.axes if axis.at == 0],
        )
        for part in item.tensor.parts
    ]


@dataclass(frozen=True, slots=True)
class _RowBlock:
    """Adjacent rows of a layer, which are rows or columns of the stored tensor.

    Attributes:
        rows: The rows of the layer.
        stored_rows: The rows of the stored tensor, as a matrix whose columns are the last
            dimension.
        is_transposed: Whether the stored rows are the columns of the layer.
    """

    rows: range
    stored_rows: range
    is_transposed: bool = False

    def select_from(self, tensor: StridedTensor) -> StridedTensor:
        """Select the rows of the block from B or the magnitudes of the layer."""
        return tensor.narrow(0, self.rows.start, len(self.rows))


def _split_rows(layer: ComposedTensor, stored_shape: Sequence[int]) -> list[_RowBlock] | None:
    """Split a layer into blocks, or return None if it has other elements between its own.

    Args:
        layer: The layer, ``[rows, columns]``, whose elements are in one stored tensor.
        stored_shape: Shape of the stored tensor.
    """
    last = len(stored_shape) - 1
    weights = compute_row_major_strides(tuple(stored_shape[:last]))
    blocks: list[_RowBlock] = []
    for part in layer.tensor.parts:
        columns = [axis for axis in part.axes if axis.at == last]
        is_transposed = any(axis.dim == 0 for axis in columns)
        is_adjacent = all((axis.dim == 0) == is_transposed and axis.step == 1 for axis in columns)
        width = math.prod(axis.size for axis in columns)
        if last < 1 or not is_adjacent or width != stored_shape[last]:
            return None
        runs: dict[int, list[tuple[int, int, int]]] = {0: [], 1: []}
        for axis in sorted(part.axes, key=lambda axis: axis.step):
            if axis.at != last:
                _append_run(runs[axis.dim], (axis.size, axis.step, axis.stride * weights[axis.at]))
        inner = _pop_adjacent(runs[1 if is_transposed else 0])
        height = width if is_transposed else inner[0]
        is_complete = not runs[1] and (not is_transposed or inner[0] == layer.shape[1])
        others = runs[0]
        if not is_complete or math.prod(size for size, _, _ in others) > MAX_ROW_BLOCKS:
            return None
        first = sum(n * weight for n, weight in zip(part.stored_origin, weights, strict=False))
        for indices in product(*(range(size) for size, _, _ in others)):
            steps = list(zip(indices, others, strict=True))
            row = part.origin[0] + sum(n * step for n, (_, step, _) in steps)
            stored_row = first + sum(n * stride for n, (_, _, stride) in steps)
            stored_rows = range(stored_row, stored_row + inner[0] * inner[2], inner[2])
            blocks.append(_RowBlock(range(row, row + height), stored_rows, is_transposed))
    return blocks


def _append_run(runs: list[tuple[int, int, int]], run: tuple[int, int, int]) -> None:
    """Append a run of size, step and stride, or extend the last one if the new one continues it."""
    size, step, stride = runs[-1] if runs else (0, 0, 0)
    if runs and run[1:] == (size * step, size * stride):
        runs[-1] = (size * run[0], step, stride)
    else:
        runs.append(run)


def _pop_adjacent(runs: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    """Remove and return the run of adjacent elements, or a run of one element."""
    return runs.pop(0) if runs and runs[0][1] == 1 else (1, 1, 1)
