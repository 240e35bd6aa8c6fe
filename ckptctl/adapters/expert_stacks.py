"""Find model parameters that stack the experts of a layer, and the equivalent linear layers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptctl import families
from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.errors import MappingError, UnsupportedError, format_option, quote_names
from ckptctl.planner.config_facts import Json
from ckptctl.planner.families.tables import Leaf, LogicalTensor
from ckptctl.planner.families.templates import Template
from ckptctl.planner.layouts import HF, Family
from ckptctl.planner.mapping.adapters import STACKED
from ckptctl.planner.mapping.detect import list_families_matching_configs
from ckptctl.planner.mapping.matching import list_index_values, match_keys

_NUMBER = re.compile(r"\.(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """One linear layer of every expert, as a slice of a stacked parameter.

    Attributes:
        start: Index of the slice's first output feature in the stacked parameter.
        rows: Number of output features.
        modules: Names of the linear layers, one for each expert.
    """

    start: int
    rows: int
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """A parameter that stacks the experts of a layer.

    Attributes:
        key: Parameter name in the model.
        inputs: Number of input features of each linear layer.
        is_output_first: Whether each matrix is stored as ``[out, in]`` instead of ``[in, out]``.
        slices: The linear layers that are concatenated along the output, such as gate and up.
    """

    key: str
    inputs: int
    is_output_first: bool
    slices: tuple[ExpertSlice, ...]

    @property
    def expert_count(self) -> int:
        """Number of experts in the stack."""
        return len(self.slices[0].modules)

    @property
    def outputs(self) -> int:
        """Total number of output features of all slices."""
        return sum(part.rows for part in self.slices)

    @property
    def entry(self) -> TensorEntry:
        """Catalog entry with the shape of the parameter, but without data."""
        matrix_shape = (
            (self.outputs, self.inputs) if self.is_output_first else (self.inputs, self.outputs)
        )
        return TensorEntry(self.key, "float32", (self.expert_count, *matrix_shape), (), (self.key,))


def require_family(catalog: Catalog, config: Json | None) -> Family:
    """Return the family of the adapter's model, or raise if config.json does not identify it."""
    names = (
        list_families_matching_configs(families.load_families(), config)
        if config is not None
        else []
    )
    if len(names) != 1:
        raise MappingError(
            "converting the experts of an adapter requires the configuration of its model",
            where=catalog.path,
            why=f"config.json matches {quote_names(names)}" if names else "there is no config.json",
            hint=f"pass {format_option('--assets DIR')} to use that of the trained model",
        )
    return families.family(names[0])


MatrixShapes = Callable[[LogicalTensor, Leaf, Mapping[str, int]], tuple[int, int] | None]
"""Function that returns ``[rows, columns]`` of one expert's matrix, or None if there is none.

The arguments are the logical tensor, its per-expert leaf and its index values.
"""


def iterate_expert_stacks(
    catalog: Catalog, family: Family, sizes: Mapping[str, int], get_shape: MatrixShapes
) -> Iterator[ExpertStack]:
    """Yield the parameters of the model in which its experts can be stacked.

    Args:
        catalog: The adapter.
        family: Family of its model.
        sizes: Axis sizes of its model.
        get_shape: Function that returns the shapes of the experts' matrices.
    """
    templates = map_stacked_templates(family)
    if not templates:
        raise MappingError(
            f"`{family.name}` has no experts that are stacked in one layout and per-expert in "
            "another",
            where=catalog.path,
        )
    # A configuration that lists layer kinds does not state the number of each kind.
    layer_numbers = (int(n) for name in catalog.tensors for n in _NUMBER.findall(name))
    max_count = 1 + max(layer_numbers, default=0)
    for parts in templates.values():
        counts = dict.fromkeys(parts[0][0].indices, max_count)
        yield from _build_stacks(parts, {**counts, **sizes}, get_shape)


def get_stated_shapes(family: Family, sizes: Mapping[str, int]) -> MatrixShapes:
    """Return a function that computes the shapes of experts' matrices from stated sizes."""

    def compute_axes_size(axes: tuple[str, ...]) -> int:
        unknown = next((axis for axis in axes if axis not in sizes), None)
        if unknown:
            raise UnsupportedError(
                f"config.json does not state the expert width of `{family.name}`",
                where=f"{family.describe_size(unknown)}",
                hint=f"convert the model to layout {STACKED} first, with "
                f"{format_option(f'--to-layout {STACKED}')}",
            )
        return math.prod(sizes[axis] for axis in axes)

    def get_shape(_: LogicalTensor, leaf: Leaf, __: Mapping[str, int]) -> tuple[int, int]:
        return compute_axes_size(leaf.dims[0]), compute_axes_size(leaf.dims[1])

    return get_shape


def map_stacked_templates(
    family: Family,
) -> dict[Template, list[tuple[LogicalTensor, Leaf, Leaf]]]:
    """Map the key template of each expert stack to the tensors in it.

    Each value is a list of tuples: a logical tensor, its stacked leaf and its per-expert leaf.
    """
    if not {HF, STACKED} <= {*family.layouts}:
        return {}
    per_expert_leaves = family.get_layout(HF).leaves
    templates = {}
    for stored in family.get_layout(STACKED).stored:
        parts = [
            (t, leaf, per_expert_leaves[t.name])
            for t, leaf in stored.parts
            if t.name in per_expert_leaves
        ]
        stackable = [part for part in parts if _stacks_experts(part[1], part[2])]
        if stackable and len(stackable) == len(stored.parts):
            templates[stored.template] = stackable
    return templates


def count_expert_layers(family: Family, keys: Collection[str]) -> dict[str, int]:
    """Map those of *keys* that stack experts to the number of linear layers in the stack."""
    templates = map_stacked_templates(family)
    groups = match_keys(family, family.get_layout(STACKED), keys).groups if templates else ()
    keys_by_template = {group.stored.template: group.keys for group in groups}
    return {
        key: len({leaf.part for _, leaf, _ in parts})
        for template, parts in templates.items()
        for key in keys_by_template.get(template, ())
    }


def _stacks_experts(leaf: Leaf, per_expert: Leaf) -> bool:
    """Return whether *leaf* stacks the matrices that *per_expert* stores per expert."""
    axes = per_expert.spread_axes
    return (
        len(axes) == 1
        and len(per_expert.dims) == 2
        and leaf.dims[:1] == (axes,)
        and not leaf.spread_axes
    )


def _build_stacks(
    parts: Sequence[tuple[LogicalTensor, Leaf, Leaf]],
    sizes: Mapping[str, int],
    get_shape: MatrixShapes,
) -> Iterator[ExpertStack]:
    """Yield the expert stack of each decoder layer that has experts."""
    tensor, leaf, per_expert = parts[0]
    (axis,) = per_expert.spread_axes
    is_output_first = leaf.dims[1] == per_expert.dims[0]
    for index_values in list_index_values(tensor, sizes):
        indices = dict(zip(tensor.indices, index_values, strict=True))
        start, inputs, slices = 0, 0, []
        for part, _, part_leaf in parts:
            keys = (
                part_leaf.key.format_key({**indices, axis: expert}) for expert in range(sizes[axis])
            )
            shape = get_shape(part, part_leaf, indices)
            if shape is None:
                continue
            rows, inputs = shape
            modules = tuple(key.removesuffix(".weight") for key in keys)
            slices.append(ExpertSlice(start, rows, modules))
            start += rows
        if len(slices) == len(parts):
            yield ExpertStack(leaf.key.format_key(indices), inputs, is_output_first, tuple(slices))
