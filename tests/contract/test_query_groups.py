"""``linear_qkv`` holds for each query group its queries, their gates, its key, its value."""

import numpy as np
import pytest

from tests.contract.tables import FAMILIES, mapped, moved, numbered, tiny, tiny_sizes

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
    shapes = tiny(family, "hf")
    values = numbered(shapes)
    found = moved(mapped(family, "hf", "mcore", shapes), values)
    key = family.get_layout("mcore").leaves["q.{i}"].key.text
    layers = [i for i in range(family.tiny["i"]) if key.format(i=i) in found]
    assert layers
    for layer in layers:
        assert (found[key.format(i=layer)] == together(values, family, layer)).all()


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
