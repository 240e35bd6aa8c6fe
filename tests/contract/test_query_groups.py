"""``linear_qkv`` holds for each query group its queries, their gates, its key, its value."""

import numpy as np
import pytest

from ckptctl.planner.mapping.matching import format_key
from ckptctl.planner.mapping.numbering import compute_numbering
from tests.contract.tables import (
    FAMILIES,
    mapped,
    moved,
    numbered,
    tiny,
    tiny_lists,
    tiny_sizes,
)

GROUPED = [
    name
    for name, family in FAMILIES.items()
    if "mcore" in family.layouts
    and (query := family.get_layout("mcore").leaves.get("q.{i}"))
    and query.interleave_axis
]


def together(arrays, family, layer):
    """What a family's hf tensors are in Megatron-Core, by numpy alone."""
    sizes, leaves = tiny_sizes(family), family.get_layout("hf").leaves
    groups, each = sizes["k"], sizes["h"] // sizes["k"] * sizes["e"]
    gates = sizes.get("g", 1)
    keys = [leaves[f"{part}.{{i}}"].key.text.format(i=layer) for part in "qkv"]
    if keys[0] == keys[1]:
        heads = np.cumsum([sizes["h"] * sizes["e"], groups * sizes["e"]])
        parts = np.split(arrays[keys[0]], heads)
    else:
        parts = [arrays[key] for key in keys]
    rows = zip(parts, (gates * each, sizes["e"], sizes["e"]), strict=True)
    columns = parts[0].shape[1]
    heads = parts[0].reshape(groups, -1, gates, sizes["e"], columns)
    parts[0][:] = heads.swapaxes(1, 2).reshape(parts[0].shape)
    blocks = [part.reshape(groups, height, columns) for part, height in rows]
    return np.concatenate(blocks, axis=1).reshape(-1, columns)


@pytest.mark.parametrize("name", GROUPED)
def test_linear_qkv_interleaves_queries_keys_and_values_per_group(name):
    family = FAMILIES[name]
    filled, hf = {fill.tensor for fill in family.fills}, family.get_layout("hf")
    shapes = tiny(family, "hf") | {
        key: shape
        for key, shape in (tiny(family, "hf", optional=True) if filled else {}).items()
        for stored, _ in hf.iterate_matches(key)
        if stored.parts[0][0].name.partition(".")[0] in filled
    }
    values = numbered(shapes)
    found = moved(mapped(family, "hf", "mcore", shapes), values)
    sizes = tiny_sizes(family)
    numbering = compute_numbering(family, "mcore", sizes, tiny_lists(family, sizes))
    place = family.get_layout("mcore"), family.tensors["q.{i}"]
    keys = {i: format_key(*place, (i,), (), numbering) for i in range(family.tiny["i"])}
    layers = [i for i, key in keys.items() if key in found]
    assert layers
    for layer in layers:
        assert (found[keys[layer]] == together(values, family, layer)).all()


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe"])
def test_vision_qkv_interleaves_parts_per_head(name):
    """``merge_qkv_weights`` of Megatron-Bridge, with a query group for each head."""
    family = FAMILIES[name]
    shapes, heads = tiny(family, "hf"), tiny_sizes(family)["vh"]
    values = numbered(shapes)
    found = moved(mapped(family, "hf", "mcore", shapes), values)
    for suffix in ("weight", "bias"):
        parts = np.split(values[f"model.visual.blocks.0.attn.qkv.{suffix}"], 3)
        by_head = [part.reshape(heads, -1, *part.shape[1:]) for part in parts]
        expected = np.concatenate(by_head, axis=1).reshape(-1, *parts[0].shape[1:])
        key = f"vision_model.decoder.layers.0.self_attention.linear_qkv.{suffix}"
        assert (found[key] == expected).all()
