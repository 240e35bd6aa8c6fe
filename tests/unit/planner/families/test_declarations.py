"""Scales beside weights, layers that predict further tokens, and what repeats other tensors."""

from dataclasses import replace

import pytest

from ckptctl.errors import MappingError, MissingTensorsError
from ckptctl.families import family
from ckptctl.planner.families.declarations import BLOCK_AXES, Companion
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.mapped import compose_tensors
from ckptctl.planner.mapping.source import ModelFacts
from ckptctl.planner.mapping.tensors import map_tensors
from tests.contract.tables import copies, mapped, stored_shapes, tiny

V3 = family("deepseek_v3")
MTP = replace(V3, tiny={**V3.tiny, "j": 2})
RENAMED = {
    "embed_tokens": "embed",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "wq",
    "q_a_proj": "wq_a",
    "q_a_layernorm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_a_proj_with_mqa": "wkv_a",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "wkv_b",
    "o_proj": "wo",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "lm_head": "head",
    "self_attn": "attn",
    "mlp": "ffn",
    "weight_scale_inv": "scale",
    "e_score_correction_bias": "bias",
}
"""The names of DeepSeek-V3's ``inference/convert.py``."""


def natively(key):
    parts = key.removeprefix("model.").split(".")
    return ".".join(RENAMED.get(part, part) for part in parts)


def quantized_hf(family=V3):
    """DeepSeek-V3 as on the Hub: every matrix has scales but embedding, head, router, eh_proj."""
    shapes = tiny(family, "hf")
    plain = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "eh_proj.weight")
    scaled = [key for key, shape in shapes.items() if len(shape) == 2 and not key.endswith(plain)]
    return shapes | {f"{key}_scale_inv": (1, 1) for key in scaled}


def renamed(found):
    assert all(tensor.is_rename for tensor in compose_tensors(found.tensors).values())
    return {item.sources[0].key: item.targets[0].key for item in found.tensors}


def test_scales_are_renamed_with_weights_for_deepseek():
    shapes = quantized_hf()
    found = renamed(mapped(V3, "hf", "deepseek", shapes))
    assert found == {key: natively(key) for key in shapes}
    assert sum(key.endswith(".scale") for key in found.values()) == 27
    back = mapped(V3, "deepseek", "hf", {natively(key): s for key, s in shapes.items()})
    assert renamed(back) == {new: old for old, new in found.items()}


def test_scales_of_interleaved_matrix_follow_it():
    sparse = family("deepseek_v32")
    shapes = quantized_hf(sparse)
    found = renamed(mapped(sparse, "hf", "deepseek", shapes))
    assert found.keys() == shapes.keys()
    scale = "self_attn.kv_b_proj.weight_scale_inv"
    assert found[f"model.layers.1.{scale}"] == "layers.1.attn.wkv_b.scale"
    with pytest.raises(MappingError, match="no place"):
        mapped(sparse, "hf", "mlx", shapes)
    rest = {key: shape for key, shape in shapes.items() if key != f"model.layers.1.{scale}"}
    with pytest.raises(MissingTensorsError) as caught:
        mapped(sparse, "hf", "hf", rest)
    assert scale in str(caught.value.why)


def test_scales_come_right_after_their_weight():
    keys = list(stored_shapes(mapped(V3, "hf", "deepseek", quantized_hf()).tensors))
    assert keys.index("layers.0.attn.wo.scale") == keys.index("layers.0.attn.wo.weight") + 1


@pytest.mark.parametrize("target", ["hf-v5", "torchtitan@0.2", "torchtitan@0.3"])
def test_layouts_without_scales_hint_at_dequantize(target):
    with pytest.raises(MappingError, match="no place for 27 tensors") as caught:
        mapped(V3, "hf", target, quantized_hf())
    assert caught.value.hint == "dequantize them with `--dequantize bf16`"


def test_missing_scale_of_one_layer_is_an_error():
    shapes = quantized_hf()
    lost = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    del shapes[lost]
    with pytest.raises(MissingTensorsError, match="is missing a tensor") as caught:
        mapped(V3, "hf", "deepseek", shapes)
    assert lost in str(caught.value.where)


def test_ranks_divide_scales_like_weights():
    split = {
        name: t.split_axis for name, t in V3.tensors.items() if t.scaled_weight and "{i}" in name
    }
    down = ("q", "q_b", "kv_b_k", "w1", "w3", "shared_w1", "shared_w3")
    assert {n.split(".")[0] for n, axis in split.items() if axis == BLOCK_AXES[0]} == {
        f"{name}_scale" for name in down
    }
    across = ("o", "w2", "shared_w2")
    assert {n.split(".")[0] for n, axis in split.items() if axis == BLOCK_AXES[1]} == {
        f"{name}_scale" for name in across
    }
    assert split["expert_w2_scale.{i}"] == "x"
    assert split["kv_a_scale.{i}"] is split["router_scale.{i}"] is None


TABLE = """
logical  axes     one           two           three
plain    (h e) d  a.weight      b.weight      c.weight
turned   (r p) d  f.weight      g.weight (p r) d  h.weight
fused    d f      k.weight#0    l.weight      m.weight
other    d f      k.weight#1    n.weight      o.weight
vector   d        p.weight      q.weight      r.weight
named    d f      s             t             u
"""


def test_only_complete_matrices_in_order_have_scales():
    ends = {name: (".weight", f".{name}_scale") for name in ("one", "two", "three")}
    made = Family("x", "X", ("one", "two", "three"), (TABLE,), "X", companions=(Companion(ends),))
    found = {
        name: {layout: leaf.key.text for layout, leaf in tensor.leaves.items()}
        for name, tensor in made.tensors.items()
        if tensor.scaled_weight
    }
    assert found == {
        "plain_scale": {"one": "a.one_scale", "two": "b.two_scale", "three": "c.three_scale"},
        "turned_scale": {"one": "f.one_scale", "three": "h.three_scale"},
    }
    assert {"one_scale", "two_scale", "three_scale"} <= made.key_parts


def test_mtp_layers_are_numbered_after_layers_on_disk():
    found = mapped(MTP, "hf", "torchtitan@0.3", tiny(MTP, "hf"))
    assert stored_shapes(found.tensors) == tiny(MTP, "torchtitan@0.3")
    names = {item.sources[0].key: item.targets[0].key for item in found.tensors}
    assert names["model.layers.1.self_attn.o_proj.weight"] == "layers.1.attention.wo.weight"
    assert names["model.layers.2.self_attn.o_proj.weight"] == "mtp_layers.0.attention.wo.weight"
    assert names["model.layers.3.shared_head.norm.weight"] == "mtp_layers.1.mtp_norm.weight"
    back = mapped(MTP, "torchtitan@0.3", "hf", stored_shapes(found.tensors))
    assert stored_shapes(back.tensors) == tiny(MTP, "hf")


def test_mtp_scales_are_numbered_with_their_layers():
    shapes = quantized_hf(MTP)
    assert "model.layers.3.mlp.experts.0.up_proj.weight_scale_inv" in shapes
    same = mapped(MTP, "hf", "hf", shapes)
    assert stored_shapes(same.tensors) == shapes


@pytest.mark.parametrize("target", ["hf-v5", "deepseek", "torchtitan@0.2"])
def test_layouts_without_mtp_layers_refuse_them(target):
    with pytest.raises(MappingError, match="no place") as caught:
        mapped(MTP, "hf", target, tiny(MTP, "hf"))
    assert "--exclude" in caught.value.hint
    assert "--dequantize" not in caught.value.hint


def test_missing_mtp_tensor_is_an_error():
    shapes = tiny(MTP, "hf")
    lost = "model.layers.3.mlp.experts.2.up_proj.weight"
    del shapes[lost]
    with pytest.raises(MissingTensorsError, match="is missing a tensor") as caught:
        mapped(MTP, "hf", "torchtitan@0.3", shapes)
    assert lost in str(caught.value.where)


def test_mtp_embedding_and_head_must_repeat_model():
    shapes = tiny(MTP, "hf")
    repeated = {
        "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight": "lm_head.weight",
    }
    shapes |= {copy: shapes[kept] for copy, kept in repeated.items()}
    found = mapped(MTP, "hf", "torchtitan@0.3", shapes)
    assert copies(found) == repeated
    assert found.dropped_keys.keys() == repeated.keys()
    assert stored_shapes(found.tensors) == tiny(MTP, "torchtitan@0.3")
    assert stored_shapes(mapped(MTP, "hf", "hf", shapes).tensors) == shapes


def test_mtp_head_is_compared_with_tied_embedding():
    shapes = tiny(MTP, "hf", tied=True)
    copy = "model.layers.2.shared_head.head.weight"
    shapes |= {copy: shapes["model.embed_tokens.weight"]}
    found = map_tensors(MTP, "hf", "torchtitan@0.3", shapes, ModelFacts(sizes=MTP.tiny, tied=True))
    assert copies(found) == {copy: "model.embed_tokens.weight"}


def test_mxfp4_experts_of_gpt_oss_keep_their_bytes():
    gpt = replace(family("gpt_oss"), quantized=(), variants=(("mxfp4",),))
    found = mapped(gpt, "hf", "openai", tiny(gpt, "hf"))
    assert stored_shapes(found.tensors).keys() >= {
        f"block.0.mlp.mlp{n}_weight.{end}" for n in (1, 2) for end in ("blocks", "scales")
    }
    composed = compose_tensors(found.tensors)
    moved = [item for key, item in composed.items() if key.endswith(("blocks", "scales"))]
    assert len(moved) == 8 and all(item.is_rename for item in moved)


def test_mxfp4_experts_of_gpt_oss_are_refused_by_torchtitan():
    gpt = replace(family("gpt_oss"), variants=(("mxfp4",),))
    shapes = tiny(replace(gpt, quantized=()), "hf")
    with pytest.raises(MappingError, match="no place for 8 tensors") as caught:
        mapped(gpt, "hf", "torchtitan@0.3", shapes)
    assert caught.value.hint == "dequantize them with `--dequantize bf16`"


def test_quantized_and_plain_gpt_oss_layer_is_refused():
    gpt = family("gpt_oss")
    shapes = tiny(gpt, "hf") | tiny(replace(gpt, quantized=(), variants=(("mxfp4",),)), "hf")
    with pytest.raises(MappingError, match="two kinds"):
        mapped(gpt, "hf", "openai", shapes)
