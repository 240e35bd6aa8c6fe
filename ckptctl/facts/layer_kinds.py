"""Kinds and sizes of single layers in a config.json, compared with the tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ckptctl.facts.contradictions import Contradiction, Statement
from ckptctl.planner.config_facts import Json, find_default_size, read_sizes
from ckptctl.planner.families.declarations import get_nested, has_field
from ckptctl.planner.families.demands import LayerKind, LayerSize
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.matching import MatchedKeys, ModelTensors

LISTS = ("layer_types", "mlp_layer_types", "indexer_types", "no_rope_layers")
"""Keys with a list that transformers requires to have one entry for each layer."""


def misplaced(
    family: Family, config: Json, source: str, matched: MatchedKeys
) -> Iterator[Contradiction]:
    """Yield the facts that give layers another kind than their tensors show."""
    seen: set[str] = set()
    for kind in family.kinds:
        if kind.variant in seen:
            continue
        group = next((names for names in family.variants if kind.variant in names), ())
        shown: dict[int, str] = {}
        for (variant, indices), places in matched.layers.items():
            if variant in group and indices[-1:] == ("i",):
                shown |= {place[-1]: variant for place in places}
        layers = _layers(kind, config, max(shown, default=-1) + 1)
        if layers is None:
            continue
        seen.add(kind.variant)
        wrong = [n for n in sorted(shown) if (n in layers) != (shown[n] == kind.variant)]
        if wrong:
            fact = next((f for f in kind.facts if has_field(config, f)), kind.facts[0])
            stated = has_field(config, fact)
            value = _value(config, fact)
            whose = "" if stated else "transformers"
            one = Statement(fact, value, source, stated, default=whose)
            is_of = f"layer {wrong[0]} is `{shown[wrong[0]]}`"
            place = f"the tensors (`{_key(family, matched, shown[wrong[0]], wrong[0])}`)"
            two = Statement(fact, None, place, shown=is_of, shows=True)
            yield Contradiction(fact, (one, two))


def misfitting(
    family: Family, config: Json, source: str, tensors: ModelTensors
) -> Iterator[Contradiction]:
    """Yield per-layer sizes that the shapes of that layer contradict."""
    by_axis = {one.axis: one for one in family.layer_sizes}
    fixed = {**family.constants, **read_sizes(family, config)}
    total = tensors.matched.count_indices().get("i", 0)
    seen: set[str] = set()
    for (name, values), keys in tensors.matched.keys.items():
        tensor, leaf = family.tensors[name], tensors.layout.leaves[name]
        groups = [group for group in leaf.dims if not by_axis.keys().isdisjoint(group)]
        if not groups or leaf.part is not None or tensor.indices[-1:] != ("i",):
            continue
        layer = {a: _layer_size(one, config, values[-1], total) for a, one in by_axis.items()}
        sizes = {**fixed, **{axis: size for axis, size in layer.items() if size is not None}}
        for key in keys.values():
            for group in groups:
                dim = leaf.dims.index(group)
                shape = tensors.shapes.get(key, ())
                if dim >= len(shape) or not all(axis in sizes for axis in group):
                    continue
                wanted = math.prod(sizes[axis] for axis in group)
                fact = by_axis[next(axis for axis in group if axis in by_axis)].fact
                if shape[dim] != wanted and fact not in seen:
                    seen.add(fact)
                    others = [family.describe_size(axis) for axis in group if axis not in by_axis]
                    given = f" (times {', '.join(others)})" if others else ""
                    said = f"{wanted:,} in layer {values[-1]}{given}"
                    one = Statement(fact, wanted, source, shown=said)
                    place = f"the tensors (`{key}` of shape {list(shape)})"
                    yield Contradiction(fact, (one, Statement(fact, shape[dim], place, shows=True)))


def _layer_size(size: LayerSize, config: Json, layer: int, total: int) -> int | None:
    """Return the size of a layer, or None if the config does not state it."""
    value = _value(config, size.fact)
    kinds = get_nested(config, size.kinds[0]) if size.kinds else None
    if isinstance(kinds, list) and layer < len(kinds) and kinds[layer] in size.kinds[1:]:
        other = get_nested(config, size.other)
        value = value if other is None else other
    if size.by_layer:
        own = get_nested(config, f"{size.by_layer}.{layer}.{size.fact.rpartition('.')[2]}")
        value = value if own is None else own
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    last = get_nested(config, size.last) if size.last else None
    is_last = isinstance(last, int) and layer >= total - last
    return 2 * value if is_last and get_nested(config, size.doubled) is True else value


def uncounted_kinds(config: Json, source: str, prefix: str = "") -> Iterator[Contradiction]:
    """Yield per-layer lists of a config.json whose length is not the number of layers."""
    number = config.get("num_hidden_layers")
    for name in LISTS:
        kinds = config.get(name)
        counted = isinstance(number, int) and not isinstance(number, bool)
        if isinstance(kinds, list) and counted and len(kinds) != number:
            fact = f"{prefix}num_hidden_layers"
            entries = Statement(fact, len(kinds), source, said=f"{prefix}{name}")
            yield Contradiction(fact, (Statement(fact, number, source), entries))
    for key, inner in config.items():
        if isinstance(inner, Mapping):
            yield from uncounted_kinds(inner, source, f"{prefix}{key}.")


def _layers(kind: LayerKind, config: Json, total: int) -> frozenset[int] | None:
    """Return the layers of *kind*, or None if the config does not tell."""
    values = {name: _value(config, name) for name in (*kind.facts, kind.but) if name}
    if any(values[name] is None for name in kind.facts if name not in kind.when):
        return None
    if not all(sign == values[name] for name, sign in kind.when.items()):
        return frozenset()
    layers = set(range(total))
    if kind.kinds:
        listed = values[kind.kinds[0]]
        if not isinstance(listed, list):
            return None
        layers &= {n for n, one in enumerate(listed) if one in kind.kinds[1:]}
    for name in filter(None, (kind.first, kind.after, kind.every)):
        count = values[name]
        if not isinstance(count, int):
            return None
        if name == kind.first:
            layers &= set(range(min(count, total)))
        elif name == kind.after:
            layers -= set(range(min(count, total)))
        else:
            layers = {n for n in layers if count > 0 and (n + 1) % count == 0}
    if kind.numbers:
        numbers = values[kind.numbers]
        if not isinstance(numbers, list):
            return None
        layers &= {n for n in numbers if isinstance(n, int)}
    excluded = values.get(kind.but)
    return frozenset(layers - {*excluded} if isinstance(excluded, list) else layers)


def _value(config: Json, name: str) -> object:
    """Return a value of config.json, or transformers' default if it is not set."""
    return get_nested(config, name) if has_field(config, name) else find_default_size(config, name)


def _key(family: Family, matched: MatchedKeys, variant: str, layer: int) -> str:
    """Return a key of *layer* that only *variant* has."""
    for (name, values), keys in matched.keys.items():
        if family.tensors[name].variant == variant and values[-1:] == (layer,):
            return next(iter(keys.values()))
    return "their names"
