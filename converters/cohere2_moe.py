"""Cohere's models with experts: parallel attention and feed-forward, the first layers dense.

Source: transformers' ``modeling_cohere2_moe.py`` and ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5).
"""

from dataclasses import replace

from ckptctl.planner.layouts import CHOSEN, Demand, Family, LayerKind, Tie

from . import _hf, _proofs, cohere2, qwen2_moe

SHARED = """
shared_w1@moe?shared  s d  mlp.shared_experts.gate_proj.weight
shared_w3@moe?shared  s d  mlp.shared_experts.up_proj.weight
shared_w2@moe?shared  d s  mlp.shared_experts.down_proj.weight
"""

FAMILY: Family = replace(
    cohere2.FAMILY,
    name="cohere2_moe",
    title="Command A with experts",
    aliases=(),
    layouts=("hf", "hf-v5"),
    tables=(
        _hf.BEFORE,
        cohere2.ATTENTION + qwen2_moe.FEED_FORWARD + SHARED,
        _hf.AFTER,
        qwen2_moe.PACKED,
    ),
    like={"hf-v5": "hf"},
    architecture="Cohere2MoeForCausalLM",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    variants=(("dense", "moe"),),
    demands=(Demand(("shared",), {"num_shared_experts": CHOSEN}),),
    kinds=(
        LayerKind("dense", kinds=("mlp_layer_types", "dense")),
        LayerKind("dense", first="first_k_dense_replace"),
    ),
    formulas=(("s", "num_shared_experts * intermediate_size"),),
    sizes=dict(cohere2.FAMILY.sizes)
    | {
        "f": ("prefix_dense_intermediate_size|intermediate_size", ""),
        "x": ("num_experts", ""),
        "m": ("intermediate_size", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5"),
    config_signs=({"model_type": "cohere2_moe"},),
    tiny=dict(cohere2.FAMILY.tiny) | {"x": 3, "m": 10, "s": 14},
)
