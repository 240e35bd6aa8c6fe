"""Compare the layer kinds and layer sizes in a config.json with the tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ckptctl.facts.contradictions import Contradiction, Statement
from ckptctl.planner.config_facts import (
    Json,
    get_value_or_default,
    read_layer_sizes,
    read_sizes,
)
from ckptctl.planner.families.declarations import has_field
from ckptctl.planner.families.demands import LayerKind
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.matching import MatchedKeys, ModelTensors

PER_LAYER_LISTS = ("layer_types", "mlp_layer_types", "indexer_types", "no_rope_layers")
"""Keys of config.json whose lists transformers requires to have one entry for each layer."""


def find_kind_mismatches(
    family: Family, config: Json, source: str, matched: MatchedKeys
) -> Iterator[Contradiction]:
    """Yield the facts that state another kind of layer than the layer's tensors show."""
    handled_variants: set[str] = set()
    for layer_kind in family.kinds:
        if layer_kind.variant in handled_variants:
            continue
        group = next((names for names in family.variants if layer_kind.variant in names), ())
        variant_by_layer: dict[int, str] = {}
        for (variant, indices), layer_indices in matched.layers.items():
            if variant in group and indices[-1:] == ("i",):
                variant_by_layer |= {
                    indices_of_key[-1]: variant for indices_of_key in layer_indices
                }
        layers = _find_layers_of_kind(layer_kind, config, max(variant_by_layer, default=-1) + 1)
        if layers is None:
            continue
        handled_variants.add(layer_kind.variant)
        mismatched_layers = [
            n
            for n in sorted(variant_by_layer)
            if (n in layers) != (variant_by_layer[n] == layer_kind.variant)
        ]
        if mismatched_layers:
            fact = next((f for f in layer_kind.facts if has_field(config, f)), layer_kind.facts[0])
            is_explicit = has_field(config, fact)
            value = get_value_or_default(config, fact)
            default_owner = "" if is_explicit else "transformers"
            config_statement = Statement(
                fact, value, source, is_explicit, default_owner=default_owner
            )
            layer = mismatched_layers[0]
            layer_text = f"layer {layer} is `{variant_by_layer[layer]}`"
            example = _find_example_key(family, matched, variant_by_layer[layer], layer)
            tensor_text = f"the tensors (`{example}`)"
            tensor_statement = Statement(
                fact, None, tensor_text, shown_value=layer_text, is_shown_by_tensors=True
            )
            yield Contradiction(fact, (config_statement, tensor_statement))


def find_size_mismatches(
    family: Family, config: Json, source: str, tensors: ModelTensors
) -> Iterator[Contradiction]:
    """Yield per-layer sizes that the shapes of the layer's tensors contradict."""
    by_axis = {item.axis: item for item in family.layer_sizes}
    common_sizes = {**family.constants, **read_sizes(family, config)}
    total = tensors.matched.count_indices().get("i", 0)
    reported_facts: set[str] = set()
    for (name, values), keys in tensors.matched.keys.items():
        tensor, leaf = family.tensors[name], tensors.layout.leaves[name]
        groups = [group for group in leaf.dims if not by_axis.keys().isdisjoint(group)]
        if not groups or leaf.part is not None or tensor.indices[-1:] != ("i",):
            continue
        sizes = {**common_sizes, **read_layer_sizes(family, config, values[-1], total)}
        for key in keys.values():
            for group in groups:
                dim = leaf.dims.index(group)
                shape = tensors.shapes.get(key, ())
                if dim >= len(shape) or not all(axis in sizes for axis in group):
                    continue
                expected_size = math.prod(sizes[axis] for axis in group)
                fact = by_axis[next(axis for axis in group if axis in by_axis)].fact
                if shape[dim] != expected_size and fact not in reported_facts:
                    reported_facts.add(fact)
                    other_axes = [
                        family.describe_size(axis) for axis in group if axis not in by_axis
                    ]
                    factors_text = f" (times {', '.join(other_axes)})" if other_axes else ""
                    expected_text = f"{expected_size:,} in layer {values[-1]}{factors_text}"
                    item = Statement(fact, expected_size, source, shown_value=expected_text)
                    tensor_text = f"the tensors (`{key}` of shape {list(shape)})"
                    yield Contradiction(
                        fact,
                        (item, Statement(fact, shape[dim], tensor_text, is_shown_by_tensors=True)),
                    )


def find_wrong_list_lengths(
    config: Json, source: str, family: Family | None, prefix: str = ""
) -> Iterator[Contradiction]:
    """Yield per-layer lists of a config.json whose length is not the number of layers.

    Lists of sizes are those that *family* declares. If it declares a field with the number of MTP
    layers, lists may include them.
    """
    layer_count = config.get("num_hidden_layers")
    mtp_count = family.listed_mtp_count if family is not None else ""
    mtp_layer_count = config.get(mtp_count) if mtp_count else None
    sizes = family.layer_sizes if family is not None else ()
    listed_sizes = {size.listed.removeprefix(prefix) for size in sizes if size.listed}
    for name in (*PER_LAYER_LISTS, *sorted(listed_sizes)):
        per_layer_values = config.get(name)
        if (
            isinstance(per_layer_values, list)
            and isinstance(layer_count, int)
            and not isinstance(layer_count, bool)
            and len(per_layer_values) - layer_count not in (0, mtp_layer_count)
        ):
            fact = f"{prefix}num_hidden_layers"
            entries = Statement(fact, len(per_layer_values), source, local_key=f"{prefix}{name}")
            yield Contradiction(fact, (Statement(fact, layer_count, source), entries))
    for key, inner in config.items():
        if isinstance(inner, Mapping):
            yield from find_wrong_list_lengths(inner, source, family, f"{prefix}{key}.")


def _find_layers_of_kind(layer_kind: LayerKind, config: Json, total: int) -> frozenset[int] | None:
    """Return the numbers of all *layer_kind* layers, or None if the config does not state them."""
    values = {
        name: get_value_or_default(config, name)
        for name in (*layer_kind.facts, layer_kind.but)
        if name
    }
    if any(values[name] is None for name in layer_kind.facts if name not in layer_kind.when):
        return None
    if not all(sign == values[name] for name, sign in layer_kind.when.items()):
        return frozenset()
    layers = set(range(total))
    if layer_kind.kinds:
        listed = values[str(layer_kind.kinds[0])]
        if not isinstance(listed, list):
            return None
        layers &= {layer for layer, item in enumerate(listed) if item in layer_kind.kinds[1:]}
    period, offset = layer_kind.every, layer_kind.offset
    for name in filter(None, (layer_kind.first, layer_kind.after, layer_kind.last, offset, period)):
        count = values[name]
        if not isinstance(count, int):
            return None
        if name == layer_kind.first:
            layers &= set(range(min(count, total)))
        elif name == layer_kind.after:
            layers -= set(range(min(count, total)))
        elif name == layer_kind.last:
            layers &= set(range(min(count + 1, total) if count >= 0 else total))
        elif name == period:
            start = values[offset] if offset else -1
            if not isinstance(start, int):
                return None
            layers = {layer for layer in layers if count > 0 and (layer - start) % count == 0}
    if layer_kind.numbers:
        numbers = values[layer_kind.numbers]
        if isinstance(numbers, str):
            numbers = [int(number) for number in numbers.split(",") if number.strip().isdigit()]
        if not isinstance(numbers, list):
            return None
        layers &= {layer - layer_kind.start for layer in numbers if isinstance(layer, int)}
    excluded = values.get(layer_kind.but)
    return frozenset(layers - {*excluded} if isinstance(excluded, list) else layers)


def _find_example_key(family: Family, matched: MatchedKeys, variant: str, layer: int) -> str:
    """Return the key of a tensor in *layer* that only layers of *variant* contain."""
    for (name, values), keys in matched.keys.items():
        if family.tensors[name].variant == variant and values[-1:] == (layer,):
            return next(iter(keys.values()))
    return "their names"
