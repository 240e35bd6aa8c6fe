"""Inkling: short convolutions, logits of relative positions, experts; patches and sound.

Files alternate rows of gates and of up projections. transformers 5 has them one after the other in
memory (``hf-v5``), and those of shared experts in two tensors. Layers with a window may have other
heads. Vision layers double their size from layer to layer, and all but the last have a norm.

mlx-vlm adds tensors that files do not have. Sources: transformers' ``modeling_inkling.py`` and
``conversion_mapping.py`` (``inkling_mm_model``).
"""

from ckptctl.planner.layouts import Demand, Family, LayerKind

from . import _proofs

ENDS = """
logical     axes  hf: model.llm.     hf-v5: model.language_model.
embed       v d   embed.weight       embed_tokens.weight
embed_norm  d     embed_norm.weight  embed_tokens.embed_norm.weight
norm        d     norm.weight        norm.weight
"""

OUTPUT = """
logical  axes  hf                        hf-v5
output   v d   model.llm.unembed.weight  lm_head.weight
"""

LAYER = """
logical             axes         hf: model.llm.layers.{i}.            hf-v5: model.language_model.layers.{i}.
norm_1              d            attn_norm.weight                     input_layernorm.weight
q                   qd d         attn.wq_du.weight                    self_attn.q_proj.weight
k                   kd d         attn.wk_dv.weight                    self_attn.k_proj.weight
v                   kd d         attn.wv_dv.weight                    self_attn.v_proj.weight
r                   rd d         attn.wr_du.weight                    self_attn.r_proj.weight
o                   d qd         attn.wo_ud.weight                    self_attn.o_proj.weight
k_conv              kd one taps  attn.k_sconv.weight                  self_attn.k_sconv.conv1d.weight
v_conv              kd one taps  attn.v_sconv.weight                  self_attn.v_sconv.conv1d.weight
q_norm              e            attn.q_norm.weight                   self_attn.q_norm.weight
k_norm              e            attn.k_norm.weight                   self_attn.k_norm.weight
relative            dr extent    attn.rel_logits_proj.proj            self_attn.rel_logits_proj.proj
conv_1              d one taps   attn_sconv.weight                    attn_sconv.conv1d.weight
conv_2              d one taps   mlp_sconv.weight                     mlp_sconv.conv1d.weight
norm_2@dense        d            mlp_norm.weight                      post_attention_layernorm.weight
norm_2_moe@moe      d            mlp_norm.weight                      post_attention_layernorm.weight
scale@dense         one          mlp.global_scale                     mlp.global_scale
w1@dense            f d          mlp.w13_dn.weight#0/f                mlp.gate_proj.weight
w3@dense            f d          mlp.w13_dn.weight#1/f                mlp.up_proj.weight
w2@dense            d f          mlp.w2_md.weight                     mlp.down_proj.weight
router@moe          xs d         mlp.gate.weight                      mlp.gate.weight
router_scale@moe    one          mlp.gate.global_scale                mlp.gate.global_scale
router_bias@moe     x            mlp.gate.bias                        mlp.gate.e_score_correction_bias
expert_w13@moe      x (m c) d    mlp.experts.w13_weight               mlp.experts.gate_up_proj x (c m) d
expert_w2@moe       x d m        mlp.experts.w2_weight                mlp.experts.down_proj
shared_w13@moe      s (m c) d    mlp.shared_experts.shared_w13_weight  mlp.shared_experts.{c=gate_proj|up_proj} s m d
shared_w2@moe       s d m        mlp.shared_experts.shared_w2_weight  mlp.shared_experts.down_proj
"""  # noqa: E501

TOWERS = """
logical      axes  hf: model.                hf-v5: model.
audio_embed  an d  audio.encoder.weight      audio_tower.embed_audio_tokens.embed_audio_tokens.weight
audio_norm   d     audio.final_norm.weight   audio_tower.norm.weight
vision_norm  d     visual.final_norm.weight  vision_tower.final_norm.weight
"""  # noqa: E501

LAYER_NUMBERS = range(64)
"""Numbers of vision layers that a file may have. By default, transformers' models have 24."""

VISION_LAYERS = tuple(
    "logical  axes  hf: model.visual.layers."
    f"{{u={'|'.join(f'{word}_{n}' for n in LAYER_NUMBERS)}}}."
    f"  hf-v5: model.vision_tower.encoder_layers.{{u}}.\n{row}"
    for word, row in (
        ("linear", "vision_w            wo wi  weight  projection.weight"),
        ("norm", "vision_layer_norm?  wo     weight  layer_norm.weight"),
    )
)

FAMILY = Family(
    name="inkling",
    title="Inkling",
    layouts=("hf", "hf-v5"),
    tables=(TOWERS, *VISION_LAYERS, ENDS, LAYER, OUTPUT),
    architecture="InklingForConditionalGeneration",
    constants={"one": 1, "c": 2},
    variants=(("dense", "moe"),),
    pinned=("router_bias", "router_scale", "k_conv", "v_conv", "conv_1", "conv_2"),
    demands=(Demand(("vision_layer_norm",), index="u", but_last="1"),),
    kinds=(LayerKind("moe", kinds=("text_config.mlp_layer_types", "sparse")),),
    free=("qd", "kd", "rd", "extent", "wo", "wi"),
    formulas=(("xs", "text_config.n_routed_experts + text_config.n_shared_experts"),),
    sizes={
        "v": ("text_config.vocab_size", ""),
        "d": ("text_config.hidden_size", ""),
        "e": ("text_config.head_dim", ""),
        "f": ("text_config.intermediate_size", ""),
        "m": ("text_config.moe_intermediate_size", ""),
        "x": ("text_config.n_routed_experts", ""),
        "s": ("text_config.n_shared_experts", ""),
        "dr": ("text_config.d_rel", ""),
        "taps": ("text_config.conv_kernel_size", ""),
        "i": ("text_config.num_hidden_layers", ""),
        "u": ("vision_config.n_layers|num_hidden_layers", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5"),
    unquantized=("router",),
    config_signs=({"model_type": "inkling_mm_model"},),
    tiny=dict(v=24, d=16, e=4, f=12, m=6, x=4, s=2, xs=6, dr=5, taps=3, an=14, i=2, u=3)
    | dict(qd=18, kd=8, rd=20, extent=9, wo=10, wi=15),
)
