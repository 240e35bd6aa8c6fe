"""Compare the sizes that config files state with the shapes of the tensors.

Shapes show the sizes of axes. For axes that only occur in products, such as heads and head
dimension, statements are assumed to be true one after another. A statement that does not fit the
shapes and the earlier statements is contradicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.errors import MappingError
from ckptctl.facts.contradictions import Statement
from ckptctl.planner.axes import (
    AxisSizes,
    Equations,
    ObservedShape,
    build_equations,
    solve_axis_sizes,
    solve_equations,
)
from ckptctl.planner.config_facts import evaluate_formula, get_size_field, list_operands
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.matching import ModelTensors


def find_contradicting_sizes(
    family: Family,
    tensors: ModelTensors,
    statements: Sequence[Statement],
    padded_sizes: Mapping[str, int] | None = None,
) -> Iterator[Statement]:
    """Yield sizes that follow from tensor shapes and counts, if *statements* differ from them.

    A size that a formula computes from several facts is yielded together with the size that
    contradicts it, since no file states it.

    *padded_sizes* maps padded axes to their sizes with padding.
    """
    counts = tensors.matched.count_indices()
    selected = tensors.matched
    if len(tensors.shapes) < len(selected.order):
        selected = selected.select_keys(tensors.shapes)
    selected_counts = selected.count_indices()
    indices = {index for tensor in family.tensors.values() for index in tensor.indices}
    statement_by_axis = _map_axes_to_statements(family, statements)
    for axis, statement in statement_by_axis.items():
        size = _get_size(statement)
        is_contradicted = (
            selected_counts.get(axis, 0) > size
            if statement.is_explicit
            else axis in indices and counts.get(axis, size) != size
        )
        if is_contradicted:
            source = f"the indices in the tensor names ({_describe_largest_index(tensors, axis)})"
            yield Statement(statement.fact, counts[axis], source, is_shown_by_tensors=True)
    pairs = [
        *statement_by_axis.items(),
        *(_build_formula_statements(family, statements) if family.formulas else ()),
    ]
    for axis, item in pairs:
        if (
            axis in indices
            and axis not in statement_by_axis
            and counts.get(axis, 0) != _get_size(item)
        ):
            source = "the indices in the tensor names"
            yield item
            yield Statement(item.fact, counts.get(axis, 0), source, is_shown_by_tensors=True)
    pairs = [(axis, item) for axis, item in pairs if axis not in indices]
    yield from _find_contradicted_sizes(family, tensors, pairs, padded_sizes or {})


def _find_contradicted_sizes(
    family: Family,
    tensors: ModelTensors,
    stated_sizes: Sequence[tuple[str, Statement]],
    padded_sizes: Mapping[str, int],
) -> Iterator[Statement]:
    """Yield the axis sizes that follow from tensor shapes and differ from *stated_sizes*."""
    observations = _observe_shapes(tensors)
    try:
        equations = build_equations(family, observations)
    except MappingError:
        return  # find_shape_conflict reports the shape
    expected_sizes = [
        (axis, padded_sizes.get(axis, _get_size(statement)), statement)
        for axis, statement in stated_sizes
    ]
    sizes = {axis: size for axis, size, _ in expected_sizes}
    is_consistent = all(sizes[axis] == size for axis, size, _ in expected_sizes)
    if is_consistent and _try_solve(family, equations, sizes) is not None:
        return
    assumed_sizes: dict[str, int] = {}
    solution = _try_solve(family, equations, assumed_sizes)
    if solution is None:
        return  # find_shape_conflict reports how shapes contradict each other
    assumed_texts: list[str] = []
    for axis, size, statement in expected_sizes:
        refined_solution = _try_solve(family, equations, {**assumed_sizes, axis: size})
        if refined_solution is not None and assumed_sizes.get(axis, size) == size:
            if axis not in solution.axes:
                assumed_texts.append(f"`{statement.fact}` = {size}")
            assumed_sizes[axis], solution = size, refined_solution
            continue
        value = solution.axes.get(axis)
        shown = "" if value is not None else "a different number"
        condition = (
            ""
            if axis in _find_unfactored_axes(observations) or not assumed_texts
            else f", given {', '.join(assumed_texts)}"
        )
        source = f"the tensors ({_describe_evidence(family, observations, axis)}{condition})"
        yield statement
        yield Statement(statement.fact, value, source, shown_value=shown, is_shown_by_tensors=True)


def find_shape_conflict(family: Family, tensors: ModelTensors) -> MappingError | None:
    """Return an error if no sizes of the family's axes fit the shapes of all *tensors*."""
    counts = tensors.matched.count_indices()
    spread = {axis: counts[axis] for axis in tensors.layout.spread_axes if axis in counts}
    try:
        solve_axis_sizes(family, _observe_shapes(tensors), spread)
    except MappingError as error:
        return error
    return None


def _observe_shapes(tensors: ModelTensors) -> list[ObservedShape]:
    """Return each shape that tensors of one kind have, with one of these tensors."""
    observations: dict[object, ObservedShape] = {}
    for key, stored in tensors.matched.tensor_by_key.items():
        if key in tensors.shapes:
            shape = tensors.shapes[key]
            observations.setdefault((id(stored), shape), ObservedShape(key, stored, shape))
    return [*observations.values()]


def _try_solve(family: Family, equations: Equations, sizes: Mapping[str, int]) -> AxisSizes | None:
    try:
        return solve_equations(family, equations, sizes)
    except MappingError:
        return None


def _map_axes_to_statements(
    family: Family, statements: Sequence[Statement]
) -> dict[str, Statement]:
    """Map each axis to the statement about its size, preferring trusted, then explicit ones."""
    by_fact: dict[str, Statement] = {}
    for statement in sorted(
        statements, key=lambda statement: (not statement.trusted, not statement.is_explicit)
    ):
        if (
            isinstance(statement.value, int)
            and not isinstance(statement.value, bool)
            and statement.value > 0
        ):
            by_fact.setdefault(statement.fact, statement)
    facts = {axis: get_size_field(family, axis) for axis in family.sizes}
    return {axis: by_fact[fact] for axis, fact in facts.items() if fact in by_fact}


def _build_formula_statements(
    family: Family, statements: Sequence[Statement]
) -> Iterator[tuple[str, Statement]]:
    """Yield the axis sizes that formulas compute from the stated facts."""
    values: dict[str, Statement] = {}
    for statement in sorted(
        statements, key=lambda statement: (not statement.trusted, not statement.is_explicit)
    ):
        if isinstance(statement.value, int) and not isinstance(statement.value, bool):
            values.setdefault(statement.fact, statement)
        elif isinstance(statement.value, list):
            values.setdefault(
                f"len({statement.fact})", replace(statement, value=len(statement.value))
            )
    for axis, formula in family.formulas:
        parts = {name: values[name] for name in list_operands(formula) if name in values}
        size = evaluate_formula(
            formula, {name: _get_size(statement) for name, statement in parts.items()}
        )
        if size is not None:
            defaulted = [name for name, statement in parts.items() if not statement.is_explicit]
            shown = f"{size}" + "".join(
                f" (with transformers' default of `{default_name}`)" for default_name in defaulted
            )
            sources = dict.fromkeys(statement.source for statement in parts.values())
            yield axis, Statement(formula, size, " and ".join(sources), shown_value=shown)


def _get_size(statement: Statement) -> int:
    assert isinstance(statement.value, int)
    return statement.value


def _find_unfactored_axes(observations: Sequence[ObservedShape]) -> set[str]:
    """Return the axes that are a complete dimension of at least one tensor."""
    leaves = [leaf for item in observations for leaf in item.stored.leaves if leaf.part is None]
    return {group[0] for leaf in leaves for group in leaf.dims if len(group) == 1}


def _describe_evidence(family: Family, observations: Sequence[ObservedShape], axis: str) -> str:
    """Describe a tensor that shows the size of *axis*, preferably as a complete dimension."""
    parts = {axis, *family.expand_axes((axis,))}
    candidates: list[tuple[bool, int, int, ObservedShape]] = []
    for position, item in enumerate(observations):
        groups = [group for leaf in item.stored.leaves for group in leaf.dims]
        sizes_with_axis = [len(group) for group in groups if axis in group]
        sizes_with_parts = [
            len(group) for group in groups if parts & {*group, *family.expand_axes(group)}
        ]
        if sizes_with_parts:
            candidates.append(
                (not sizes_with_axis, min(sizes_with_axis or sizes_with_parts), position, item)
            )
    if not candidates:
        return "all of them"
    item = min(candidates)[-1]
    return f"`{item.key}` of shape {list(item.shape)}"


def _describe_largest_index(tensors: ModelTensors, index: str) -> str:
    """Return the key that has the largest value of *index*, in backquotes for messages."""
    keys = (
        (max(column), group.keys[list(column).index(max(column))])
        for group in tensors.matched.groups
        if (column := group.columns.get(index))
    )
    return f"`{max(keys)[1]}`"
