"""Which optional tensors a config.json demands: those of the parts and layers that it describes."""

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
"""The index of the layers that config.json counts; those after them have another."""


def demanded(family: Family, config: Json | None, matched: Matched | None) -> frozenset[Slot]:
    """Return the logical tensors, each with its indices, that *config* demands of a whole model.

    Args:
        family: The model type.
        config: config.json; None: nothing demands anything.
        matched: What is there, which counts the layers that *config* does not count.

    Raises:
        MappingError: It states what is no number of layers.
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
    """Yield the indices at which *tensor* has to be; the last one numbers the layers."""
    every = slots(tensor, sizes)
    if not demand.by_layer:
        yield from every
        return
    layers = _layers(demand, values, len(every))
    yield from (at for at in every if at[-1] in layers and tensor.indices[-1] == LAYER)


def _layers(demand: Demand, values: Json, total: int) -> frozenset[int]:
    """Return the layers that have to have the tensors; what is not stated demands none."""
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
    """Return the number under *name*, or *usual* for no name; None: it is not stated."""
    if not name:
        return usual
    stated = looked_up(values, name)
    return 0 if stated == 0 else count(stated, name)
