"""Fields of DeepSpeed's files of states, checked one by one.

Source: ``state_dict`` of the optimizers in ``deepspeed/runtime``. Every function takes a value,
where needed a name for it, and the file for errors; it raises UnsupportedError where the value is
not what DeepSpeed writes, FormatError where it needs more than the files hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from ckptctl.errors import FormatError, UnsupportedError
from ckptctl.formats.deepspeed.partitions import Segment, Shape
from ckptctl.storage.pickles.inert import Inert
from ckptctl.storage.pickles.torch_tensors import MAX_RANK
from ckptctl.storage.zips.reader import StoredTensor


def mapping_of(value: object, what: str, where: str) -> Mapping[str, object]:
    """Return a dict whose keys are strings."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UnsupportedError(f"`{what}` is not a map of names", where=where)
    return value


def items_of(value: object, what: str, where: str) -> Sequence[object]:
    """Return a list or tuple that is not empty."""
    if not isinstance(value, list | tuple) or not value:
        raise UnsupportedError(f"`{what}` is not a list with anything in it", where=where)
    return value


def whole_number(value: object, what: str, where: str) -> int:
    """Return a number that is not negative."""
    if type(value) is not int or value < 0:
        raise UnsupportedError(f"`{what}` is not a number", where=where)
    return value


def shape_of(value: object, where: str) -> Shape:
    """Return the shape of a parameter."""
    if isinstance(value, tuple | list) and len(value) <= MAX_RANK:
        return tuple(whole_number(size, "a size of a parameter", where) for size in value)
    raise UnsupportedError("the shape of a parameter is not one", where=where)


def shapes_of(value: object, where: str) -> dict[str, Shape]:
    """Return the shapes of parameters by name."""
    found = mapping_of(value, "the shapes of parameters", where)
    return {name: shape_of(shape, where) for name, shape in found.items()}


def groups_of(value: object, where: str) -> tuple[dict[str, Shape], ...]:
    """Return a dict per group; versions before 0.6 wrote the only group without a list."""
    many = [value] if isinstance(value, dict) else items_of(value, "param_shapes", where)
    groups = tuple(shapes_of(group, where) for group in many)
    names = [name for group in groups for name in group]
    if len(set(names)) < len(names):
        raise UnsupportedError("`param_shapes` names a parameter twice", where=where)
    return groups


def segment_of(value: object, file: str, where: str) -> Segment:
    """Return a partition: a flat tensor without gaps."""
    if not isinstance(value, StoredTensor) or len(value.shape) != 1 or value.strides is not None:
        raise UnsupportedError("a partition is not a flat tensor", where=where)
    return Segment(file, value)


def stage_of(value: object, where: str) -> int:
    """Return the number in a ``ZeroStageEnum``, which is a record here."""
    if isinstance(value, Inert) and len(value.args) == 1:
        value = value.args[0]
    if type(value) is not int or value not in (1, 2):
        raise UnsupportedError("`zero_stage` does not fit the partitions", where=where)
    return value


def world_of(value: object, where: str) -> int:
    """Return the number of ranks, which all groups must have in common."""
    counts = {
        whole_number(count, "partition_count", where)
        for count in (value if isinstance(value, list | tuple) else [value])
    }
    if len(counts) > 1:
        raise FormatError(
            "this was saved with a mixture of experts divided among ranks, which is not read",
            where=where,
            why=f"groups have {' or '.join(map(str, sorted(counts)))} partitions",
        )
    if not counts or counts == {0}:
        raise UnsupportedError("`partition_count` is not a number of ranks", where=where)
    return counts.pop()


def paddings_of(value: object, where: str) -> tuple[tuple[int, ...], ...] | None:
    """Return the elements after each parameter of each group; None: none."""
    if value is None:
        return None
    groups = items_of(value, "param_alignment_paddings", where)
    if not all(isinstance(group, list | tuple) for group in groups):
        raise UnsupportedError(
            "`param_alignment_paddings` is not a list for each group", where=where
        )
    return tuple(
        tuple(whole_number(gap, "an alignment padding", where) for gap in group)
        for group in cast("Sequence[Sequence[object]]", groups)
    )


def mappings_of(value: object) -> tuple[Mapping[str, tuple[object, object]], ...] | None:
    """Return ``(start, numel)`` of every ``fragment_address``; None: they are not recorded."""
    if not isinstance(value, list):
        return None
    return tuple(
        {
            name: (record.state.get("start"), record.state.get("numel"))
            for name, record in group.items()
            if isinstance(record, Inert) and isinstance(record.state, dict)
        }
        for group in value
        if isinstance(group, dict)
    )


def base_of(
    value: object, count: int, where: str
) -> tuple[tuple[Mapping[str, object], ...], Sequence[object]]:
    """Return the inner optimizer's states by partition, and its settings.

    Elastic checkpoints have a list of states; files that a script has made smaller have none.
    """
    if value is None:
        return ({},) * count, ()
    if isinstance(value, list):
        elastic = dict(enumerate(value))
        return tuple(mapping_of(elastic.get(n, {}), "state", where) for n in range(count)), ()
    base = mapping_of(value, "the inner optimizer's state", where)
    state, settings = base.get("state"), base.get("param_groups")
    found = state if isinstance(state, dict) else {}
    states = tuple(mapping_of(found.get(n, {}), "state", where) for n in range(count))
    return states, settings if isinstance(settings, list) else ()
