"""GLM-5.3 Flash: Kimi delta attention, every fourth layer indexed latent attention; experts.

Hyper-connections join all parts of a layer, and a vision tower precedes the model. Layers of latent
attention without an indexer reuse the tokens of the layer before. MTP layers, which have no
hyper-connections, are numbered after all others.

transformers 5 has packed experts and one convolution in memory (``hf-v5``), and no MTP layers.
mlx-vlm fuses projections with the same input, splits the projection of the latent to keys and
values, and transposes the keys' part. Outputs of both kinds of attention have other sizes (``oa``).

Sources: transformers' ``modeling_glm5_next.py`` and ``conversion_mapping.py``, mlx-vlm's
``models/glm5_next`` and ``speculative/drafters/glm5_next_mtp`` for MTP layers.
"""

from ckptctl.planner.layouts import SIZES, Demand, Drop, Family, LayerKind, Shift, Tie

from . import _proofs, glm4v, qwen2_moe, qwen3_5, qwen3_5_text

VISION = """
logical            axes            hf: model.visual.
vision_patch       vd vc vt ph pw  patch_embed.proj.weight
vision_patch_bias  vd              patch_embed.proj.bias
vision_post        vd              post_layernorm.weight
"""

VISION_LAYER = """
logical                axes   hf: model.visual.blocks.{u}.
vision_q               va vd  attn.qkv.weight#0
vision_k               va vd  attn.qkv.weight#1
vision_v               va vd  attn.qkv.weight#2
vision_q_bias?vision   va     attn.qkv.bias#0
vision_k_bias?vision   va     attn.qkv.bias#1
vision_v_bias?vision   va     attn.qkv.bias#2
vision_q_norm          ve     attn.q_norm.weight
vision_k_norm          ve     attn.k_norm.weight
vision_o               vd va  attn.proj.weight
vision_o_bias?vision   vd     attn.proj.bias
vision_w1              vf vd  mlp.gate_proj.weight
vision_w1_bias?vision  vf     mlp.gate_proj.bias
vision_w3              vf vd  mlp.up_proj.weight
vision_w3_bias?vision  vf     mlp.up_proj.bias
vision_w2              vd vf  mlp.down_proj.weight
vision_w2_bias?vision  vd     mlp.down_proj.bias
vision_norm_1          vd     norm1.weight
vision_norm_2          vd     norm2.weight
"""

NORMS = """
logical  axes  hf: model.language_model.layers.{i}.
norm_1   d     input_layernorm.weight
norm_2   d     post_attention_layernorm.weight
"""

CONNECTIONS = """
logical        axes   hf: model.language_model.layers.{i}.  hf-v5: model.language_model.layers.{i}.
attn_hc        hx hd  hc_attn_fn                            attn_hc.fn
attn_hc_base   hx     hc_attn_base                          attn_hc.base
attn_hc_scale  hs     hc_attn_scale                         attn_hc.scale
ffn_hc         hx hd  hc_ffn_fn                             ffn_hc.fn
ffn_hc_base    hx     hc_ffn_base                           ffn_hc.base
ffn_hc_scale   hs     hc_ffn_scale                          ffn_hc.scale
"""

DELTA = """
logical                axes              hf: model.language_model.layers.{i}.self_attn.
linear_q@linear        (lh le) d         q_proj.weight
linear_k@linear        (lh le) d         k_proj.weight
linear_v@linear        (lh le) d         v_proj.weight
linear_conv_q@linear   (lh le) one taps  q_conv1d.weight
linear_conv_k@linear   (lh le) one taps  k_conv1d.weight
linear_conv_v@linear   (lh le) one taps  v_conv1d.weight
linear_f_a@linear      lr d              f_a_proj.weight
linear_f_b@linear      (lh le) lr        f_b_proj.weight
linear_b@linear        lh d              b_proj.weight
linear_g_a@linear      lr d              g_a_proj.weight
linear_g_b@linear      (lh le) lr        g_b_proj.weight
linear_dt_bias@linear  (lh le)           dt_bias
linear_a_log@linear    lh                A_log
linear_norm@linear     le                o_norm.weight
"""

DELTA_V5 = """
logical         hf-v5: model.language_model.layers.{i}.self_attn.
linear_conv_q   conv1d.weight#0
linear_conv_k   conv1d.weight#1
linear_conv_v   conv1d.weight#2
linear_f_a      forget_gate.f_a_proj.weight
linear_f_b      forget_gate.f_b_proj.weight
linear_dt_bias  forget_gate.dt_bias
linear_a_log    forget_gate.A_log
"""

FULL = """
logical                   axes        hf: model.language_model.layers.{i}.self_attn.
q_a@full                  ql d        q_a_proj.weight
q_a_bias@full?attention   ql          q_a_proj.bias
q_a_norm@full             ql          q_a_layernorm.weight
q_b@full                  (h qk) ql   q_b_proj.weight
kv_a@full                 kr d        kv_a_proj_with_mqa.weight
kv_a_bias@full?attention  kr          kv_a_proj_with_mqa.bias
kv_a_norm@full            kl          kv_a_layernorm.weight
kv_b_k@full               (h kn) kl   kv_b_proj.weight#0/h
kv_b_v@full               (h ov) kl   kv_b_proj.weight#1/h
o                         d oa        o_proj.weight
o_bias@full?attention     d           o_proj.bias
"""

INDEXER = """
logical                       axes        hf: model.language_model.layers.{i}.self_attn.indexer.
index_q@full?index            (ih ie) ql  wq_b.weight
index_k@full?index            ie d        wk.weight
index_k_norm@full?index       ie          k_norm.weight
index_k_norm_bias@full?index  ie          k_norm.bias
index_heads@full?index        ih d        weights_proj.weight
index_place@full?index        ik ie       index_kpool_compress_ape
index_gate@full?index         ie d        index_kpool_compress_gate
"""

EXPERTS = """
router@moe       x d    mlp.gate.weight
router_bias@moe  x      mlp.gate.e_score_correction_bias
expert_w1@moe    x m d  mlp.experts.{x}.gate_proj.weight
expert_w3@moe    x m d  mlp.experts.{x}.up_proj.weight
expert_w2@moe    x d m  mlp.experts.{x}.down_proj.weight
shared_w1@moe    s d    mlp.shared_experts.gate_proj.weight
shared_w3@moe    s d    mlp.shared_experts.up_proj.weight
shared_w2@moe    d s    mlp.shared_experts.down_proj.weight
"""

FEED_FORWARD = """
logical          axes   hf: model.language_model.layers.{i}.
w1@dense         f d    mlp.gate_proj.weight
w3@dense         f d    mlp.up_proj.weight
w2@dense         d f    mlp.down_proj.weight
"""

MTP = """
logical   axes  hf: model.language_model.layers.{j}.
enorm     d     enorm.weight
hnorm     d     hnorm.weight
eh_proj   d dd  eh_proj.weight
mtp_norm  d     shared_head.norm.weight
"""

MLX = """
logical         mlx: language_model.model.layers.{i}.
linear_q        self_attn.qkv_proj.weight#0
linear_k        self_attn.qkv_proj.weight#1
linear_v        self_attn.qkv_proj.weight#2
linear_conv_q   self_attn.qkv_conv.conv.weight#0 (lh le) taps one
linear_conv_k   self_attn.qkv_conv.conv.weight#1 (lh le) taps one
linear_conv_v   self_attn.qkv_conv.conv.weight#2 (lh le) taps one
linear_f_a      self_attn.fbg_a_proj.weight#0
linear_b        self_attn.fbg_a_proj.weight#1
linear_g_a      self_attn.fbg_a_proj.weight#2
linear_f_b      self_attn.f_b_proj.weight
linear_dt_bias  self_attn.dt_bias
linear_a_log    self_attn.A_log
q_a             self_attn.qkv_a_proj.weight#0
kv_a            self_attn.qkv_a_proj.weight#1
q_a_bias        self_attn.qkv_a_proj.bias#0
kv_a_bias       self_attn.qkv_a_proj.bias#1
kv_b_k          self_attn.embed_q.weight h kl kn
kv_b_v          self_attn.unembed_out.weight h ov kl
w1              mlp.gate_up_proj.weight#0
w3              mlp.gate_up_proj.weight#1
shared_w1       mlp.shared_experts.gate_up_proj.weight#0
shared_w3       mlp.shared_experts.gate_up_proj.weight#1
"""

AT_TEXT = "hf-v5: model.", "hf-v5: model.language_model."

BOTH = "hf:", "hf, hf-v5:"

IN_MTP = "{i}", "{j}"

ALL_INDEXED = {
    "text_config.indexer_types": None,
    "text_config.index_topk_freq": None,
    "text_config.index_topk_pattern": None,
}

REPEATED = (
    Drop(
        "hf",
        "model.language_model.layers.{j}.embed_tokens.weight",
        "copy of the embedding",
        same_as="embed",
    ),
    Drop(
        "hf",
        "model.language_model.layers.{j}.shared_head.head.weight",
        "copy of the output head",
        same_as="output",
    ),
)

FAMILY = Family(
    name="glm5_next",
    title="GLM-5.3 Flash",
    aliases=("glm5_3_flash",),
    layouts=("hf", "hf-v5", "mlx"),
    tables=(
        VISION.replace(*BOTH),
        glm4v.MERGER.replace(*BOTH),
        VISION_LAYER.replace(*BOTH),
        "logical  axes  hf, hf-v5: model.language_model." + qwen3_5_text.EMBED,
        NORMS.replace(*BOTH),
        CONNECTIONS,
        DELTA.replace(*BOTH),
        DELTA_V5,
        FULL.replace(*BOTH),
        INDEXER.replace(*BOTH),
        FEED_FORWARD.replace(*BOTH) + EXPERTS,
        qwen2_moe.PACKED.replace(*AT_TEXT),
        MTP,
        NORMS.replace(*IN_MTP),
        FULL.replace(*IN_MTP),
        INDEXER.replace(*IN_MTP).replace("?index", "?next"),
        "logical  axes  hf: model.language_model.layers.{j}." + EXPERTS,
        "logical  axes  hf, hf-v5: model.language_model." + qwen3_5_text.NORM,
        qwen3_5_text.OUTPUT.replace("hf", "hf, hf-v5"),
        glm4v.MLX,
        qwen3_5.MLX_PATCH,
        MLX,
        qwen2_moe.MLX.replace(*qwen3_5_text.AT_MLX),
    ),
    like={"mlx": "hf-v5"},
    prefixes=glm4v.PREFIXES,
    architecture="Glm5NextForConditionalGeneration",
    drops=REPEATED,
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    variants=(("linear", "full"), ("dense", "moe")),
    constants={"one": 1, "hs": 3},
    free=("oa",),
    pinned=(
        *("router_bias", "linear_a_log", "linear_dt_bias", "attn_hc", "attn_hc_base"),
        *("attn_hc_scale", "ffn_hc", "ffn_hc_base", "ffn_hc_scale"),
    ),
    unquantized=("eh_proj",),
    demands=(
        Demand(("index",), kinds=("text_config.indexer_types", "full")),
        Demand(("index",), ALL_INDEXED),
    ),
    kinds=(
        LayerKind("linear", kinds=("text_config.layer_types", "linear_attention")),
        LayerKind("dense", kinds=("text_config.mlp_layer_types", "dense")),
        LayerKind("dense", first="text_config.first_k_dense_replace"),
    ),
    shifts=(Shift("hf", index="j", into="i"),),
    formulas=(
        *(pair for pair in glm4v.FORMULAS if pair[0] != "vm"),
        ("qk", "text_config.qk_nope_head_dim + text_config.qk_rope_head_dim"),
        ("kr", "text_config.kv_lora_rank + text_config.qk_rope_head_dim"),
        ("s", "text_config.n_shared_experts * text_config.moe_intermediate_size"),
        ("hd", "text_config.hc_mult * text_config.hidden_size"),
        ("hx", "2 * text_config.hc_mult + text_config.hc_mult * text_config.hc_mult"),
        ("lr", "text_config.linear_head_dim"),
        ("dd", "2 * text_config.hidden_size"),
    ),
    sizes={
        **{axis: (f"text_config.{SIZES[axis][0]}", "") for axis in "vdfhi"},
        "x": ("text_config.n_routed_experts", ""),
        "m": ("text_config.moe_intermediate_size", ""),
        "ql": ("text_config.q_lora_rank", ""),
        "kl": ("text_config.kv_lora_rank", ""),
        "kn": ("text_config.qk_nope_head_dim", ""),
        "ov": ("text_config.v_head_dim", ""),
        "ih": ("text_config.index_n_heads", ""),
        "ie": ("text_config.index_head_dim", ""),
        "ik": ("text_config.index_kpool", ""),
        "lh": ("text_config.linear_num_heads|text_config.linear_attn_config.num_heads", ""),
        "le": ("text_config.linear_head_dim|text_config.linear_attn_config.head_dim", ""),
        "taps": (
            "text_config.linear_conv_kernel_dim"
            "|text_config.linear_attn_config.short_conv_kernel_size",
            "",
        ),
        **glm4v.SIZES,
        "vf": ("vision_config.intermediate_size", ""),
        "vm": ("vision_config.projection_intermediate_size", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", mlx=_proofs.MLX_VLM),
    config_signs=({"model_type": "glm5_next"},),
    tiny={
        "v": 24,
        "d": 16,
        "f": 12,
        "h": 4,
        "x": 3,
        "m": 6,
        "s": 8,
        "i": 4,
        "oa": 15,
        "ql": 13,
        "qk": 6,
        "kl": 5,
        "kr": 7,
        "kn": 9,
        "ov": 11,
        "ih": 3,
        "ie": 10,
        "ik": 23,
        "lh": 2,
        "le": 18,
        "lr": 17,
        "taps": 19,
        "hx": 21,
        "hd": 32,
        "hs": 3,
        "dd": 33,
        **glm4v.TINY,
        "ve": 20,
    },
)
