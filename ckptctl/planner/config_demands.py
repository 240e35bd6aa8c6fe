"""Optional tensors that a config.json requires because it describes their component or layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ckptctl.planner.config_facts import Json, count, plain, read_sizes
from ckptctl.planner.families.declarations import holds, looked_up
from ckptctl.planner.families.demands import Demand
from ckptctl.planner.mapping.matching import Matched, Slot, Values, slots

if TYPE_CHECKING:
    from ckptctl.planner.families.tables import Tensor
    from ckptctl.planner.layouts import Family


LAYER = "i"
"""The index of the layers that config.json counts. MTP layers after them have another index."""


def demanded(family: Family, config: Json | None, matched: Matched | None) -> frozenset[Slot]:
    """Find the optional tensors that *config* requires of a complete model.

    Args:
        family: The model type.
        config: config.json, or None if nothing is required.
        matched: The keys of the model, for numbers of layers that *config* does not state.

    Returns:
        Logical tensors with the values of their indices.

    Raises:
        MappingError: A number of layers in *config* is invalid.
    """
    if config is None or not family.demands:
        return frozenset()
    counts = matched.counts() if matched else {}
    values, sizes = plain(config), {**counts, **read_sizes(family, config, implied=False)}
    return frozenset(
        (tensor.name, at)
        for demand in family.demands
        if holds(demand.when, values)
        for tensor in family.named(demand.tensors)
        for at in _places(demand, tensor, values, sizes)
    )


def _places(
    demand: Demand, tensor: Tensor, values: Json, sizes: Mapping[str, int]
) -> Iterator[Values]:
    """Yield the index values at which *demand* requires *tensor* (the last one is the layer)."""
    every = slots(tensor, sizes)
    if not demand.by_layer:
        yield from every
        return
    layers = _layers(demand, values, len(every))
    yield from (at for at in every if at[-1] in layers and tensor.indices[-1] == LAYER)


def _layers(demand: Demand, values: Json, total: int) -> frozenset[int]:
    """Return the layers that need the tensors, or an empty set if *values* do not state them."""
    begin = _stated(values, demand.after, 0)
    end = _stated(values, demand.first, total)
    last = _stated(values, demand.but_last, 0) or 0
    if begin is None or end is None:
        return frozenset()
    layers = range(begin, min(end, total - last))
    if not demand.kinds:
        return frozenset(layers)
    kinds = looked_up(values, str(demand.kinds[0]))
    if not isinstance(kinds, list):
        return frozenset()
    return frozenset(n for n in layers if n < len(kinds) and kinds[n] in demand.kinds[1:])


def _stated(values: Json, name: str, usual: int) -> int | None:
    """Return the number under *name* (*usual* if *name* is empty), or None if it is missing."""
    if not name:
        return usual
    stated = looked_up(values, name)
    return 0 if stated == 0 else count(stated, name)
