"""Compare the sizes that a configuration states with the tensors.

Shapes show the sizes of axes. For axes that only occur in products, such as heads and head
dimension, statements are assumed one after another. A statement that does not fit the shapes
together with those before it is contradicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.errors import MappingError
from ckptctl.facts.contradictions import Statement
from ckptctl.planner.axes import AxisSizes, Observation, solve_axis_sizes
from ckptctl.planner.config_facts import evaluate_formula, list_operands, name_axis_size
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.matching import ModelTensors


def of_shapes(
    family: Family,
    tensors: ModelTensors,
    stated: Sequence[Statement],
    padded: Mapping[str, int] | None = None,
) -> Iterator[Statement]:
    """Yield the sizes shown by shapes and numbers of keys that differ from *stated*.

    Sizes that follow from formulas over several facts are yielded together with what contradicts
    them, since no file states them.

    Sizes of *padded* axes may be larger than stated.
    """
    counts = tensors.matched.count_indices()
    chosen = tensors.matched
    if len(tensors.shapes) < len(chosen.order):
        chosen = chosen.select_keys(tensors.shapes)
    there = chosen.count_indices()
    indices = {index for tensor in family.tensors.values() for index in tensor.indices}
    said = _sizes(family, stated)
    for axis, statement in said.items():
        size = _size(statement)
        wrong = (
            there.get(axis, 0) > size
            if statement.stated
            else axis in indices and counts.get(axis, size) != size
        )
        if wrong:
            source = f"the indices in the tensor names ({_called(tensors, axis)})"
            yield Statement(statement.fact, counts[axis], source, shows=True)
    pairs = [*said.items(), *(_formulas(family, stated) if family.formulas else ())]
    for axis, one in pairs:
        if axis in indices and axis not in said and counts.get(axis, 0) != _size(one):
            source = "the indices in the tensor names"
            yield one
            yield Statement(one.fact, counts.get(axis, 0), source, shows=True)
    pairs = [(axis, one) for axis, one in pairs if axis not in indices]
    yield from _solved(family, tensors, pairs, padded or {})


def _solved(
    family: Family,
    tensors: ModelTensors,
    said: Sequence[tuple[str, Statement]],
    padded: Mapping[str, int],
) -> Iterator[Statement]:
    """Yield the axis sizes shown by shapes that differ from *said*."""
    seen: dict[object, Observation] = {}
    for key, stored in tensors.matched.tensor_by_key.items():
        if key in tensors.shapes:
            shape = tensors.shapes[key]
            seen.setdefault((id(stored), shape), Observation(key, stored, shape))
    items = [*seen.values()]
    wanted = [(axis, padded.get(axis, _size(one)), one) for axis, one in said]
    sizes = {axis: size for axis, size, _ in wanted}
    same = all(sizes[axis] == size for axis, size, _ in wanted)
    if same and _solve(family, items, sizes) is not None:
        return
    known: dict[str, int] = {}
    found = _solve(family, items, known)
    if found is None:
        return  # shapes contradict each other: mapping the tensors reports how
    beside: list[str] = []
    for axis, size, one in wanted:
        more = _solve(family, items, {**known, axis: size})
        if more is not None and known.get(axis, size) == size:
            if axis not in found.axes:
                beside.append(f"`{one.fact}` = {size}")
            known[axis], found = size, more
            continue
        value = found.axes.get(axis)
        shown = "" if value is not None else "a different number"
        others = "" if axis in _alone(items) or not beside else f", given {', '.join(beside)}"
        source = f"the tensors ({_shown(family, items, axis)}{others})"
        yield one
        yield Statement(one.fact, value, source, shown=shown, shows=True)


def _solve(
    family: Family, items: Sequence[Observation], sizes: Mapping[str, int]
) -> AxisSizes | None:
    try:
        return solve_axis_sizes(family, items, sizes)
    except MappingError:
        return None


def _sizes(family: Family, stated: Sequence[Statement]) -> dict[str, Statement]:
    """Return the first, or a trusted, statement about the size of each axis."""
    by_fact: dict[str, Statement] = {}
    for one in sorted(stated, key=lambda one: (not one.trusted, not one.stated)):
        if isinstance(one.value, int) and not isinstance(one.value, bool) and one.value > 0:
            by_fact.setdefault(one.fact, one)
    facts = {axis: name_axis_size(family, axis) for axis in family.sizes}
    return {axis: by_fact[fact] for axis, fact in facts.items() if fact in by_fact}


def _formulas(family: Family, stated: Sequence[Statement]) -> Iterator[tuple[str, Statement]]:
    """Yield axis sizes that formulas give for the stated facts."""
    values: dict[str, Statement] = {}
    for one in sorted(stated, key=lambda one: (not one.trusted, not one.stated)):
        if isinstance(one.value, int) and not isinstance(one.value, bool):
            values.setdefault(one.fact, one)
        elif isinstance(one.value, list):
            values.setdefault(f"len({one.fact})", replace(one, value=len(one.value)))
    for axis, formula in family.formulas:
        parts = {name: values[name] for name in list_operands(formula) if name in values}
        size = evaluate_formula(formula, {name: _size(one) for name, one in parts.items()})
        if size is not None:
            silent = [name for name, one in parts.items() if not one.stated]
            shown = f"{size}" + "".join(f" (with transformers' default of `{n}`)" for n in silent)
            sources = dict.fromkeys(one.source for one in parts.values())
            yield axis, Statement(formula, size, " and ".join(sources), shown=shown)


def _size(statement: Statement) -> int:
    assert isinstance(statement.value, int)
    return statement.value


def _alone(items: Sequence[Observation]) -> set[str]:
    """Return the axes that are a whole dimension of some tensor."""
    leaves = [leaf for item in items for leaf in item.stored.leaves if leaf.part is None]
    return {group[0] for leaf in leaves for group in leaf.dims if len(group) == 1}


def _shown(family: Family, items: Sequence[Observation], axis: str) -> str:
    """Describe a tensor that shows the size of *axis*, preferably as a whole dimension."""
    parts = {axis, *family.expand_axes((axis,))}
    found: list[tuple[bool, int, int, Observation]] = []
    for place, item in enumerate(items):
        groups = [group for leaf in item.stored.leaves for group in leaf.dims]
        named = [len(group) for group in groups if axis in group]
        inside = [len(group) for group in groups if parts & {*group, *family.expand_axes(group)}]
        if inside:
            found.append((not named, min(named or inside), place, item))
    if not found:
        return "all of them"
    item = min(found)[-1]
    return f"`{item.key}` of shape {list(item.shape)}"


def _called(tensors: ModelTensors, index: str) -> str:
    """Return the key with the largest number of *index*, in backquotes."""
    keys = (
        (max(column), group.keys[list(column).index(max(column))])
        for group in tensors.matched.groups
        if (column := group.columns.get(index))
    )
    return f"`{max(keys)[1]}`"
