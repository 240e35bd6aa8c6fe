"""Axes that are made of others: query heads are key/value heads times the queries of each."""

import pytest

from ckptctl.errors import MappingError
from ckptctl.families import family
from ckptctl.planner.axes import AxisSizes
from ckptctl.planner.mapping.preview import KeyRouter
from ckptctl.planner.mapping.source import ModelFacts
from ckptctl.planner.mapping.tensors import MappingOptions, map_tensors
from ckptctl.planner.model_parallel import compute_unrepeated_sizes

D, H, K, E = 32, 8, 2, 6
QUERIES = "model.layers.0.self_attn.q_proj.weight"


def queries(sizes):
    return map_tensors(
        family("llama2"),
        "hf",
        "meta",
        {QUERIES: (H * E, D)},
        ModelFacts(sizes=sizes),
        MappingOptions(partial=True),
    ).tensors[0]


def test_head_count_suffices_without_kv_head_count():
    """Without any number of key/value heads, rotary pairs are still reordered inside each head."""
    found = queries({"h": H})
    ((_, tensor),) = found.targets
    assert sorted(axis.size for axis in tensor.parts[0].axes) == sorted([H, 2, E // 2, D])
    assert queries({"h": H, "k": K}) == found


def test_indivisible_head_count_is_an_error():
    with pytest.raises(MappingError, match=r"`num_attention_heads`.* = 7 conflicts with"):
        queries({"h": 7, "k": 2})


def test_composite_sizes_are_named_by_config_keys():
    llama = family("llama2")
    assert "num_key_value_heads" in llama.describe_size("k")
    assert "num_attention_heads" in llama.describe_size("q")
    assert "head_dim" in llama.describe_size("r")
    with pytest.raises(MappingError, match="without `num_attention_heads`"):
        queries({"k": K})


def test_formulas_use_product_without_its_parts():
    qwen = family("qwen2")
    router = KeyRouter(
        qwen, qwen.get_layout("hf"), qwen.get_layout("gguf"), {"h": H, "e": E}, tied=False
    )
    found = {
        name: router.find_route(f"model.layers.0.self_attn.{name}_proj.weight") for name in "qk"
    }
    rows = {name: found[name].arrivals[0].shape[0] for name in "qk"}
    assert (rows["q"].text, rows["q"].number) == ("h*e", H * E)
    assert (rows["k"].text, rows["k"].number) == ("k*e", None)


def test_uncounting_repeated_kv_heads_keeps_query_heads():
    """Four ranks hold the two key/value heads twice: it is four queries a head, not two."""
    stored = AxisSizes({"h": 8, "k": 4, "q": 2, "e": 6}, {("k", "q"): 8, ("q", "r"): 6})
    found = compute_unrepeated_sizes(family("llama2"), stored, 2)
    assert found.axes == {"h": 8, "k": 2, "q": 4, "e": 6}
    assert found.products == {("k", "q"): 8, ("q", "r"): 12}
