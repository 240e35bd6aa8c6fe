"""ERNIE 4.5 21B-A3B, 300B-A47B: the first layers dense, experts with a correction bias, MTP layer.

In the MTP layer, the input of ``mtp_fc`` is the embedding, then the hidden state. mlx-lm ignores
the correction bias, so there is no layout ``mlx``.

Sources: transformers' ``modeling_ernie4_5_moe.py`` and ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5, without the MTP layer), vLLM's ``ernie_mtp.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, LayerKind

from . import _hf, _proofs, granitemoe, qwen2_moe

SHARED = """
w1_bias@dense?mlp       f      mlp.gate_proj.bias
w3_bias@dense?mlp       f      mlp.up_proj.bias
w2_bias@dense?mlp       d      mlp.down_proj.bias
router_bias@moe         one x  mlp.moe_statics.e_score_correction_bias
shared_w1@moe           s d    mlp.shared_experts.gate_proj.weight
shared_w3@moe           s d    mlp.shared_experts.up_proj.weight
shared_w2@moe           d s    mlp.shared_experts.down_proj.weight
shared_w1_bias@moe?mlp  s      mlp.shared_experts.gate_proj.bias
shared_w3_bias@moe?mlp  s      mlp.shared_experts.up_proj.bias
shared_w2_bias@moe?mlp  d      mlp.shared_experts.down_proj.bias
"""

V5 = """
logical      hf-v5: model.layers.{i}.
router_bias  mlp.gate.moe_statics.e_score_correction_bias
"""

MTP = """
logical              axes     hf: model.                                        hf-v5: model.
mtp_fc?mtp           d dd     mtp_linear_proj.0.weight                          -
mtp_embed_norm?mtp   d        mtp_emb_norm.0.weight                             -
mtp_hidden_norm?mtp  d        mtp_hidden_norm.0.weight                          -
mtp_q?mtp            (h e) d  mtp_block.0.self_attn.q_proj.weight               -
mtp_k?mtp            (k e) d  mtp_block.0.self_attn.k_proj.weight               -
mtp_v?mtp            (k e) d  mtp_block.0.self_attn.v_proj.weight               -
mtp_o?mtp            d (h e)  mtp_block.0.self_attn.o_proj.weight               -
mtp_w1?mtp           f d      mtp_block.0.mlp.gate_proj.weight                  -
mtp_w3?mtp           f d      mtp_block.0.mlp.up_proj.weight                    -
mtp_w2?mtp           d f      mtp_block.0.mlp.down_proj.weight                  -
mtp_norm_1?mtp       d        mtp_block.0.input_layernorm.weight                -
mtp_norm_2?mtp       d        mtp_block.0.post_attention_layernorm.weight       -
"""

FAMILY: Family = replace(
    granitemoe.FAMILY,
    name="ernie4_5_moe",
    title="ERNIE 4.5 MoE",
    layouts=("hf", "hf-v5"),
    tables=(
        _hf.BEFORE,
        qwen2_moe.LAYER + qwen2_moe.FEED_FORWARD + granitemoe.NORMS + SHARED,
        qwen2_moe.PACKED,
        V5,
        MTP,
        _hf.AFTER,
    ),
    architecture="Ernie4_5_MoeForCausalLM",
    tied=True,
    variants=(("dense", "moe"),),
    constants={"one": 1},
    pinned=("router_bias",),
    shown_by=("router",),
    kinds=(
        LayerKind(
            "moe",
            after="moe_layer_start_index",
            every="moe_layer_interval",
            last="moe_layer_end_index",
        ),
    ),
    formulas=(
        ("s", "moe_num_shared_experts * moe_intermediate_size"),
        ("dd", "2 * hidden_size"),
    ),
    sizes=dict(granitemoe.FAMILY.sizes)
    | {
        "f": ("intermediate_size", ""),
        "x": ("moe_num_experts", ""),
        "m": ("moe_intermediate_size", ""),
    },
    stack_schemes=(),
    proofs=_proofs.get_proofs("hf", "hf-v5"),
    config_signs=({"model_type": "ernie4_5_moe"},),
    tiny=dict(granitemoe.FAMILY.tiny) | {"f": 12, "s": 14, "dd": 40},
)
