"""Validation of the tables and fields of a model family before it is used."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from ckptctl.errors import quote_names
from ckptctl.planner.layouts import Family, Layout

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


def iterate_contradictions(family: Family) -> Iterator[str]:
    """Yield a message for each contradiction in *family*.

    Raises:
        TableError: A table cannot be parsed.
        ValueError: A key of :attr:`~ckptctl.planner.layouts.Family.drops` is not a template.
    """
    if not _NAME.match(family.name):
        yield f"the name `{family.name}` must consist of lower-case letters, digits and `_`"
    if not family.tensors:
        yield "the tables are empty"
    yield from _check_layouts(family)
    yield from _check_names(family)
    for tensor in family.tensors.values():
        axes = {
            layout: sorted(family.expand_axes(leaf.axes)) for layout, leaf in tensor.leaves.items()
        }
        first = next(iter(axes), "")
        for layout in axes:
            if axes[layout] != axes[first]:
                yield (
                    f"row `{tensor.name}` has the axes {' '.join(axes[layout])} in layout "
                    f"`{layout}` and {' '.join(axes[first])} in `{first}`"
                )
        if tensor.split_axis and any(
            tensor.split_axis not in leaf.axes for leaf in tensor.leaves.values()
        ):
            yield f"row `{tensor.name}` divides `{tensor.split_axis}`, which is not one of its axes"
    for name in family.layouts:
        yield from _check_stored_tensors(family, family.get_layout(name))


def _check_layouts(family: Family) -> Iterator[str]:
    used = {layout for tensor in family.tensors.values() for layout in tensor.leaves}
    for name in family.layouts:
        if name not in used:
            yield f"`layouts` names `{name}`, which is not in any table"
    for drop in family.drops:
        if drop.layout not in family.layouts:
            yield f"the drop of `{drop.key}` names layout `{drop.layout}`, which does not exist"


def _check_names(family: Family) -> Iterator[str]:
    for tie in family.ties:
        for name in (tie.tensor, tie.of):
            if name not in family.tensors:
                rows = quote_names(list(family.tensors))
                yield f"a tie names `{name}`, which is not one of the rows {rows}"
    for demand in family.demands:
        for name in demand.tensors:
            if not any(True for _ in family.find_tensors((name,))):
                yield f"`{name}` in `demands=` is neither a row nor an `optional` group"
    declared = {variant for group in family.variants for variant in group}
    for tensor in family.tensors.values():
        if tensor.variant and tensor.variant not in declared:
            yield f"row `{tensor.name}` is of variant `{tensor.variant}`, which is not declared"


def _check_stored_tensors(family: Family, layout: Layout) -> Iterator[str]:
    for stored in layout.stored:
        parts = {leaf.part for _, leaf in stored.parts}
        if parts != {None} and parts != set(range(len(parts))):
            yield f"parts of `{stored.template.text}` in `{layout.name}` are not numbered 0, 1, ..."
        dim_kinds = {
            (leaf.concat_dim, leaf.interleave_axis, leaf.spread_axes, len(leaf.dims))
            for _, leaf in stored.parts
        }
        if len(dim_kinds) > 1:
            yield f"rows of `{stored.template.text}` in `{layout.name}` have different dimensions"
        if len(parts) > 1 and any(leaf.offset for _, leaf in stored.parts):
            yield f"an offset is added to a part of `{stored.template.text}` in `{layout.name}`"
        for tensor, leaf in stored.parts:
            axis = leaf.interleave_axis
            if axis and family.expand_axes(leaf.dims[0])[:1] != (axis,):
                yield f"row `{tensor.name}` does not begin with `{axis}` in `{layout.name}`"


def iterate_type_errors(family: Family) -> Iterator[str]:
    """Yield a message for each field of *family* with a wrong type."""
    hints = get_type_hints(Family)
    for field in fields(family):
        value = getattr(family, field.name)
        if not _matches_type(value, hints[field.name]):
            yield f"`{field.name}` is {value!r}, not of type {field.type}"


def _matches_type(value: object, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_matches_type(value, alternative) for alternative in inner)
    if origin is tuple and isinstance(value, tuple):
        each = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return len(each) == len(value) and all(map(_matches_type, value, each))
    if origin is Mapping and isinstance(value, Mapping):
        return all(
            _matches_type(k, inner[0]) and _matches_type(v, inner[1]) for k, v in value.items()
        )
    kind = origin or hint
    return isinstance(value, kind) if isinstance(kind, type) else True
