"""Kimi K3: Kimi Linear's layers with experts in a latent space, attention to residuals, MoonViT.

Published files pad ``A_log`` to more entries than heads. mlx-lm and mlx-vlm read only the first
ones, so it is copied unchanged. They concatenate the projections and convolutions of delta
attention, split the projection of the latent to keys and values, and transpose the keys' part.
mlx-lm reads the folders of mlx-vlm without the vision tower.

transformers has no such model. Sources: the keys and shapes of the published files, mlx-lm's
``kimi_k3.py``, mlx-vlm's ``models/kimi_k3``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import PRESENT, Demand, Family, LayerKind, Tie

from . import _proofs, kimi_linear

PATCHES = """
logical          axes         hf: vision_tower.               mlx: vision_tower.
vision_patch     wd vc ph pw  patch_embed.proj.weight         patch_embed.proj.weight wd ph pw vc
vision_position  gh gw wd     patch_embed.pos_emb.weight      patch_embed.pos_emb.weight
vision_norm      wd           encoder.final_layernorm.weight  encoder.final_layernorm.weight
"""

VISION_LAYER = """
logical        axes   hf, mlx: vision_tower.encoder.blocks.{u}.
vision_norm_1  wd     norm0.weight
vision_q       wa wd  wqkv.weight#0
vision_k       wa wd  wqkv.weight#1
vision_v       wa wd  wqkv.weight#2
vision_o       wd wa  wo.weight
vision_norm_2  wd     norm1.weight
vision_w1      vf wd  mlp.fc0.weight
vision_w2      wd vf  mlp.fc1.weight
"""

PROJECTOR = """
logical         axes   hf, mlx: mm_projector.
projector_w1    vo vi  proj.0.weight
projector_w2    d vo   proj.2.weight
projector_norm  d      post_norm.weight
"""

ENDS = """
logical            axes  hf, mlx: language_model.
embed              v d   model.embed_tokens.weight
norm               d     model.norm.weight
output_mix?mix       one d  model.output_attn_res_proj.weight
output_mix_norm?mix  d      model.output_attn_res_norm.weight
output               v d    lm_head.weight
"""

ATTENTION = """
logical                axes              hf: language_model.model.layers.{i}.self_attn.  mlx: language_model.model.layers.{i}.self_attn.
linear_q@linear        (lh le) d         q_proj.weight                   qkv_proj.weight#0
linear_k@linear        (lh le) d         k_proj.weight                   qkv_proj.weight#1
linear_v@linear        (lh le) d         v_proj.weight                   qkv_proj.weight#2
linear_conv_q@linear   (lh le) one taps  q_conv1d.weight                 qkv_conv.conv.weight#0 (lh le) taps one
linear_conv_k@linear   (lh le) one taps  k_conv1d.weight                 qkv_conv.conv.weight#1 (lh le) taps one
linear_conv_v@linear   (lh le) one taps  v_conv1d.weight                 qkv_conv.conv.weight#2 (lh le) taps one
linear_b@linear        lh d              b_proj.weight                   b_proj.weight
linear_f_a@linear      lr d              f_a_proj.weight                 f_a_proj.weight
linear_f_b@linear      (lh le) lr        f_b_proj.weight                 f_b_proj.weight
linear_a_log@linear    la                A_log                           A_log
linear_dt_bias@linear  (lh le)           dt_bias                         dt_bias
linear_norm@linear     le                o_norm.weight                   o_norm.weight
q_a@full               ql d              q_a_proj.weight                 q_a_proj.weight
q_a_norm@full          ql                q_a_layernorm.weight            q_a_layernorm.weight
q_b@full               (h qk) ql         q_b_proj.weight                 q_b_proj.weight
kv_a@full              kr d              kv_a_proj_with_mqa.weight       kv_a_proj_with_mqa.weight
kv_a_norm@full         kl                kv_a_layernorm.weight           kv_a_layernorm.weight
kv_b_k@full            (h kn) kl         kv_b_proj.weight#0/h            embed_q.weight h kl kn
kv_b_v@full            (h vd) kl         kv_b_proj.weight#1/h            unembed_out.weight h vd kl
gate                   ga d              g_proj.weight                   g_proj.weight
o                      d oa              o_proj.weight                   o_proj.weight
"""  # noqa: E501

LAYER = """
logical                axes    hf: language_model.model.layers.{i}.        mlx: language_model.model.layers.{i}.
norm_1                 d       input_layernorm.weight                      input_layernorm.weight
norm_2                 d       post_attention_layernorm.weight             post_attention_layernorm.weight
attention_mix?mix      one d   self_attention_res_proj.weight              self_attention_res_proj.weight
attention_mix_norm?mix  d      self_attention_res_norm.weight              self_attention_res_norm.weight
mlp_mix?mix            one d   mlp_res_proj.weight                         mlp_res_proj.weight
mlp_mix_norm?mix       d       mlp_res_norm.weight                         mlp_res_norm.weight
w1@dense               f d     mlp.gate_proj.weight                        mlp.gate_proj.weight
w3@dense               f d     mlp.up_proj.weight                          mlp.up_proj.weight
w2@dense               d f     mlp.down_proj.weight                        mlp.down_proj.weight
router@moe             x d     block_sparse_moe.gate.weight                mlp.gate.weight
router_bias@moe        x       block_sparse_moe.gate.e_score_correction_bias  mlp.e_score_correction_bias
latent_in@moe          l d     block_sparse_moe.routed_expert_down_proj.weight  mlp.routed_expert_down_proj.weight
latent_norm@moe        l       block_sparse_moe.routed_expert_norm.weight  mlp.routed_expert_norm.weight
latent_out@moe         d l     block_sparse_moe.routed_expert_up_proj.weight  mlp.routed_expert_up_proj.weight
expert_w1@moe          x m l   block_sparse_moe.experts.{x}.w1.weight      mlp.switch_mlp.gate_proj.weight
expert_w3@moe          x m l   block_sparse_moe.experts.{x}.w3.weight      mlp.switch_mlp.up_proj.weight
expert_w2@moe          x l m   block_sparse_moe.experts.{x}.w2.weight      mlp.switch_mlp.down_proj.weight
shared_w1@moe          s d     block_sparse_moe.shared_experts.gate_proj.weight  mlp.shared_experts.gate_proj.weight
shared_w3@moe          s d     block_sparse_moe.shared_experts.up_proj.weight    mlp.shared_experts.up_proj.weight
shared_w2@moe          d s     block_sparse_moe.shared_experts.down_proj.weight  mlp.shared_experts.down_proj.weight
"""  # noqa: E501

FAMILY: Family = replace(
    kimi_linear.FAMILY,
    name="kimi_k3",
    title="Kimi K3",
    layouts=("hf", "mlx"),
    tables=(PATCHES, VISION_LAYER, PROJECTOR, ENDS, ATTENTION, LAYER),
    like={"mlx": ""},
    architecture="KimiK3ForConditionalGeneration",
    ties=(Tie("output", of="embed"),),
    constants={"one": 1},
    free=("oa", "ga", "la"),
    unquantized=("attention_mix", "mlp_mix", "latent_in", "latent_out"),
    demands=(Demand(("mix",), when={"text_config.attn_res_block_size": PRESENT}),),
    kinds=(
        LayerKind("linear", numbers="text_config.linear_attn_config.kda_layers", start=1),
        LayerKind("dense", first="text_config.first_k_dense_replace"),
    ),
    formulas=(
        ("kr", "text_config.kv_lora_rank + text_config.qk_rope_head_dim"),
        ("qk", "text_config.qk_nope_head_dim + text_config.qk_rope_head_dim"),
        ("s", "text_config.num_shared_experts * text_config.moe_intermediate_size"),
        ("lr", "text_config.linear_attn_config.head_dim"),
        ("vo", "vision_config.mm_hidden_size * 4"),
        ("vi", "vision_config.mm_hidden_size * 4"),
    ),
    sizes={
        **{axis: (f"text_config.{n[0]}", "") for axis, n in kimi_linear.FAMILY.sizes.items()},
        "lh": ("text_config.linear_attn_config.num_heads", ""),
        "le": ("text_config.linear_attn_config.head_dim", ""),
        "taps": ("text_config.linear_attn_config.short_conv_kernel_size", ""),
        "ql": ("text_config.q_lora_rank", ""),
        "l": ("text_config.routed_expert_hidden_size", ""),
        "wd": ("vision_config.vt_hidden_size", ""),
        "wa": ("vision_config.qkv_hidden_size", ""),
        "vf": ("vision_config.vt_intermediate_size", ""),
        "ph": ("vision_config.patch_size", ""),
        "pw": ("vision_config.patch_size", ""),
        "gh": ("vision_config.init_pos_emb_height", ""),
        "gw": ("vision_config.init_pos_emb_width", ""),
        "u": ("vision_config.vt_num_hidden_layers", ""),
    },
    proofs=_proofs.get_proofs("hf", "mlx", hf=_proofs.MLX_VLM, mlx=_proofs.MLX_VLM),
    shown_by=None,
    config_signs=({"model_type": "kimi_k3"},),
    tiny=dict(
        kimi_linear.FAMILY.tiny,
        **dict(ql=19, qk=14, l=21, la=4, wd=22, wa=26, vf=18, vc=3, ph=2, pw=2, gh=4, gw=5, u=2),
        **dict(vo=28, vi=30),
    ),
)
