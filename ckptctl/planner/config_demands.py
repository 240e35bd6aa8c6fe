"""Detection of optional tensors that config.json requires, by component and layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ckptctl.planner.config_facts import Json, get_model_params, parse_size, read_sizes
from ckptctl.planner.families.declarations import get_nested, matches_conditions
from ckptctl.planner.families.demands import Demand
from ckptctl.planner.mapping.matching import IndexValues, MatchedKeys, Slot, list_index_values

if TYPE_CHECKING:
    from ckptctl.planner.families.tables import LogicalTensor
    from ckptctl.planner.layouts import Family


def find_required_tensors(
    family: Family, config: Json | None, matched: MatchedKeys | None
) -> frozenset[Slot]:
    """Find the optional tensors that *config* requires of a complete model.

    Args:
        family: The model type.
        config: config.json, or None if nothing is required.
        matched: Matched keys of the model, from which layers are counted if *config* has no count.

    Returns:
        The names of the required logical tensors, with index values.

    Raises:
        MappingError: A number of layers in *config* is invalid.
    """
    if config is None or not family.demands:
        return frozenset()
    counts = matched.count_indices() if matched else {}
    values, sizes = (
        get_model_params(config),
        {**counts, **family.constants, **read_sizes(family, config, include_defaults=False)},
    )
    return frozenset(
        (tensor.name, indices)
        for demand in family.demands
        if matches_conditions(demand.when, values)
        for tensor in family.find_tensors(demand.tensors)
        for indices in _iterate_required_indices(demand, tensor, values, sizes)
    )


def _iterate_required_indices(
    demand: Demand, tensor: LogicalTensor, values: Json, sizes: Mapping[str, int]
) -> Iterator[IndexValues]:
    """Yield the index values at which *demand* requires *tensor*.

    The last index of a tensor in layers is the layer number.
    """
    all_indices = list_index_values(tensor, sizes)
    if not demand.is_by_layer:
        yield from all_indices
        return
    layers = _find_required_layers(demand, values, len(all_indices))
    yield from (
        indices
        for indices in all_indices
        if indices[-1] in layers and tensor.indices[-1] == demand.index
    )


def _find_required_layers(demand: Demand, values: Json, total: int) -> frozenset[int]:
    """Return the numbers of the layers to which *demand* applies.

    The result is empty if *values* lack a field that determines these layers.
    """
    first_layer = _read_number(values, demand.after, 0)
    end_layer = _read_number(values, demand.first, total)
    excluded_last = _read_number(values, demand.but_last, 0) or 0
    included_last = _read_number(values, demand.last, total)
    if first_layer is None or end_layer is None or included_last is None:
        return frozenset()
    first_layer = max(first_layer, total - included_last)
    layers = frozenset(range(first_layer, min(end_layer, total - excluded_last)))
    if demand.numbers:
        numbers = get_nested(values, demand.numbers)
        listed = numbers if isinstance(numbers, list) else ()
        layers &= {number - demand.start for number in listed if isinstance(number, int)}
    if demand.sources:
        sources = get_nested(values, demand.sources)
        by_layer = enumerate(sources) if isinstance(sources, list) else ()
        layers &= {layer for layer, source in by_layer if layer == source}
    if demand.period:
        period = _read_number(values, demand.period, 0)
        if not period:
            return frozenset()
        layers = frozenset(n for n in layers if (n + 1) % period and n < total // period * period)
    if not demand.kinds:
        return layers
    layer_types = get_nested(values, str(demand.kinds[0]))
    if not isinstance(layer_types, list):
        return frozenset()
    return frozenset(
        n for n in layers if n < len(layer_types) and layer_types[n] in demand.kinds[1:]
    )


def _read_number(values: Json, name: str, default: int) -> int | None:
    """Read the integer field *name*, or return None if it is missing.

    If *name* is empty, return *default*. If it is a number, return it.
    """
    if not name:
        return default
    if name.isdecimal():
        return int(name)
    value = get_nested(values, name)
    return 0 if value == 0 else parse_size(value, name)
