"""What the adapters of every model family have to satisfy, in every layout that has them."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from ckptctl import families
from ckptctl.errors import UsageError
from ckptctl.planner.mapping.adapters import (
    UNFUSED,
    derive_unfused_adapters,
    derive_unfused_model,
    has_adapter_factors,
)
from ckptctl.planner.mapping.detect import detect_layouts
from tests.contract.tables import copies, direct, mapped, moved, numbered, tiny
from tests.sweeps import one_in

ADAPTERS = families.build_adapter_families(families.load_families().values())
PAIRS = [
    (name, *pair)
    for name, family in ADAPTERS.items()
    for pair in itertools.permutations(family.layouts, 2)
]
BASES = [
    (name, layout) for name, base in families.load_families().items() for layout in base.layouts
]


def factors(name, layout):
    """Shapes of factors and magnitudes of every linear layer, without copies of whole tensors."""
    family = ADAPTERS[name]
    kept = {
        leaf.key.text
        for logical, leaf in family.get_layout(layout).leaves.items()
        if logical.partition(".")[0].endswith(("-lora_a", "-lora_b", "-magnitude"))
    }
    table = family.get_layout(layout).table
    shapes = tiny(family, layout, optional=True)
    return {
        key: shape
        for key, shape in shapes.items()
        if any(stored.template.text in kept for stored, _ in table.iterate_matches(key))
    }


def shared(name, source, target):
    """Those of *source* that *target* has a place for, too."""
    family = ADAPTERS[name]
    leaves = family.get_layout(target).leaves
    table = family.get_layout(source).table
    return {
        key: shape
        for key, shape in factors(name, source).items()
        if all(
            tensor.name in leaves for s, _ in table.iterate_matches(key) for tensor, _ in s.parts
        )
    }


def test_llama3_lora_has_all_adapter_layouts():
    assert {"llama3-lora", "qwen2-lora", "phi3-lora", "mixtral-lora"} <= ADAPTERS.keys()
    assert ADAPTERS["llama3-lora"].layouts == (
        "peft",
        "torchtune",
        "torchtitan@0.3",
        "mcore",
        "mcore-canonical",
    )
    assert families.family("llama3-lora") is ADAPTERS["llama3-lora"]


def test_unsupported_adapter_layout_is_refused_with_reason():
    with pytest.raises(UsageError, match="`deepseek_v3-lora` has no layout `deepseek`") as raised:
        ADAPTERS["deepseek_v3-lora"].get_layout("deepseek")
    assert raised.value.why.startswith(
        "no known program writes adapters with the keys of this layout"
    )


@pytest.mark.parametrize("name", one_in(3, ADAPTERS))
def test_adapter_family_and_layout_are_detected_from_keys(name):
    for layout in ADAPTERS[name].layouts:
        shapes = factors(name, layout)
        if shapes:
            found = detect_layouts(shapes, ADAPTERS)
            assert has_adapter_factors(shapes) and all(c.is_exact for c in found)
            assert any(c.family == name and layout in (c.layout, *c.alike) for c in found)


@pytest.mark.parametrize(("name", "source", "target"), one_in(11, direct(PAIRS, ADAPTERS)))
def test_adapter_round_trip_preserves_values(name, source, target):
    shapes = shared(name, source, target)
    there = mapped(ADAPTERS[name], source, target, shapes)
    values = numbered(shapes)
    for other, kept in copies(there).items():
        values[other] = values[kept]
    found = moved(there, values)
    assert all((array >= 0).all() for array in found.values())
    back = mapped(ADAPTERS[name], target, source, {k: v.shape for k, v in found.items()})
    again = moved(back, found)
    assert again.keys() == values.keys()
    assert all((array == values[key]).all() for key, array in again.items())


@pytest.mark.parametrize(("name", "source", "target"), one_in(11, direct(PAIRS, ADAPTERS)))
def test_mapped_adapter_product_equals_mapped_weight_delta(name, source, target):
    """By numpy: the product of the mapped factors is the product, mapped as the weight is."""
    base = families.family(name.removesuffix("-lora"))
    plain = {"peft": "hf", "peft-v5": "hf-v5", "mcore-canonical": "mcore"}
    before, after = plain.get(source, source), plain.get(target, target)
    rng = np.random.default_rng(0)
    shapes = tiny(base, before, optional=True)
    if set(base.get_layout(before).leaves) - set(base.get_layout(after).leaves):
        shapes = tiny(base, before)
    weights = mapped(base, before, after, shapes)
    adapted = untied(shared(name, source, target))
    there = mapped(ADAPTERS[name], source, target, adapted)
    values = {key: rng.integers(0, 9, shape) for key, shape in adapted.items()}
    for other, kept in copies(there).items():
        values[other] = values[kept]
    result = moved(there, values)
    prefix = "base_model.model." if source.startswith("peft") else ""
    products = {key: np.zeros(shape, int) for key, shape in shapes.items()}
    groups = base.tiny.get("k", 1)
    expected = moved(weights, products | product_of(values, prefix, products, groups))
    prefix = "base_model.model." if target.startswith("peft") else ""
    found = product_of(result, prefix, expected, groups)
    assert found
    for key, array in found.items():
        assert (array == expected[key]).all(), key


def untied(shapes):
    """Without the output layer: it may be the embedding."""
    return {key: shape for key, shape in shapes.items() if re.search(r"\.\d+\.", key)}


def product_of(values, prefix, known, groups):
    found = {k: v for k, v in megatron_products(values, groups).items() if k in known}
    for key, a in values.items():
        head = key.lower()
        if head.endswith(".lora_a.weight"):
            module = key[: -len(".lora_a.weight")]
            b = values[module + key[-len(".lora_a.weight") :].replace("A", "B").replace("_a", "_b")]
            name = module.removeprefix(prefix) + ".weight"
            if name in known:
                found[name] = b @ a
    return found


def megatron_products(values, groups):
    """Products of Megatron's factors, those of a fused layer's parts put together."""
    found = {}
    for key, a in values.items():
        module, dot, rest = key.partition(".adapter.")
        if dot and rest.endswith("linear_in.weight"):
            b = values[key.replace(".linear_in.", ".linear_out.")]
            found.setdefault(f"{module}.weight", {})[rest.rpartition("linear_in")[0]] = b @ a
    return {key: fused(parts, groups) for key, parts in found.items()}


def fused(parts, groups):
    if len(parts) == 1:
        return next(iter(parts.values()))
    names = [f"adapter_{name}." for name in ("q", "k", "v", "gate", "up")]
    steps = groups if names[0] in parts else 1
    rows = [parts[name] for name in names if name in parts]
    return np.concatenate(
        [part.reshape(steps, -1, part.shape[1]) for part in rows], axis=1
    ).reshape(-1, rows[0].shape[1])


@pytest.mark.parametrize(("name", "layout"), one_in(4, BASES))
def test_unfused_adapter_dims_match_model_weights(name, layout):
    base = families.load_families()[name]
    model = derive_unfused_model(base, layout).get_layout(UNFUSED)
    adapter = (
        derive_unfused_adapters(base, layout).get_layout(UNFUSED)
        if f"{name}-lora" in ADAPTERS
        else None
    )
    assert set(model.leaves) == set(base.get_layout(layout).leaves)
    for logical, leaf in adapter.leaves.items() if adapter else ():
        head, dot, rest = logical.partition(".")
        weight = model.leaves[head.rsplit("-", 1)[0] + dot + rest]
        if head.endswith("-lora_b"):
            assert leaf.dims == (weight.dims[0], ("R",))
        if head.endswith("-lora_a"):
            assert leaf.dims == (("R",), weight.dims[1])
