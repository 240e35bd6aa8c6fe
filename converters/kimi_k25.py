"""Kimi K2.5, K2.6 and K2.7: DeepSeek-V3's text model with the MoonViT vision tower.

========  ======================================================================================
layout    where it is found
========  ======================================================================================
hf        on the Hub; transformers 5 reads it
hf-v5     in-memory names of transformers 5
hf-fresh  saved by transformers 5; no other program reads it
mcore     Megatron-Bridge, whose vision tower is the one of Kimi's own code
========  ======================================================================================

The vision tower rotates neighboring pairs in the files and in torchtitan, halves in memory. Text
models rotate neighboring pairs everywhere.

Sources: transformers' ``modeling_kimi_k25.py`` and ``conversion_mapping.py`` (``kimi_k25``), which
saves layers of the text model as ``blocks``; torchtitan's ``models/kimi_k2_7``, vLLM's
``kimi_k25.py``; Megatron-Bridge's ``kimi_k25_vl_bridge.py`` (0.6).
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, Tie

from . import _megatron, _proofs, deepseek_v2, deepseek_v3, qwen2_moe

ENDS = """
logical  axes  hf, hf-fresh                              hf-v5                                     torchtitan@0.3
embed    v d   language_model.model.embed_tokens.weight  model.language_model.embed_tokens.weight  tok_embeddings.weight
"""  # noqa: E501

AFTER = """
logical  axes  hf, hf-fresh                      hf-v5                             torchtitan@0.3
norm     d     language_model.model.norm.weight  model.language_model.norm.weight  norm.weight
output   v d   language_model.lm_head.weight     lm_head.weight                    lm_head.weight
"""

PATCHES = """
logical            axes         hf, mcore: vision_tower.      hf-v5: model.vision_tower.               hf-fresh: vision_tower.          torchtitan@0.3: vision_encoder.
vision_patch       wd vc ph pw  patch_embed.proj.weight       patch_embed.proj.weight                  encoder.patch_embed.proj.weight  patch_embed.weight wd (vc ph pw)
vision_patch_bias  wd           patch_embed.proj.bias         patch_embed.proj.bias                    encoder.patch_embed.proj.bias    patch_embed.bias
vision_position    gh gw wd     patch_embed.pos_emb.weight    patch_embed.pos_emb.position_embeddings  patch_embed.pos_emb.weight       pos_embed
vision_norm        wd           encoder.final_layernorm.weight  final_layernorm.weight                 encoder.final_layernorm.weight   final_norm.weight
vision_norm_bias   wd           encoder.final_layernorm.bias  final_layernorm.bias                     encoder.final_layernorm.bias     final_norm.bias
"""  # noqa: E501

VISION_LAYER = """
logical             axes          hf, hf-fresh, mcore: vision_tower.encoder.blocks.{j}.  hf-v5: model.vision_tower.layers.{j}.  torchtitan@0.3: vision_encoder.layers.{j}.
vision_norm_1       wd            norm0.weight                                    norm1.weight                           norm1.weight
vision_norm_1_bias  wd            norm0.bias                                      norm1.bias                             norm1.bias
vision_q            (vh vr p) wd  wqkv.weight#0                                   attn.q_proj.weight (vh p vr) wd        attn.wq.weight
vision_k            (vh vr p) wd  wqkv.weight#1                                   attn.k_proj.weight (vh p vr) wd        attn.wk.weight
vision_v            (vh ve) wd    wqkv.weight#2                                   attn.v_proj.weight                     attn.wv.weight
vision_q_bias       (vh vr p)     wqkv.bias#0                                     attn.q_proj.bias (vh p vr)             attn.wq.bias
vision_k_bias       (vh vr p)     wqkv.bias#1                                     attn.k_proj.bias (vh p vr)             attn.wk.bias
vision_v_bias       (vh ve)       wqkv.bias#2                                     attn.v_proj.bias                       attn.wv.bias
vision_o            wd (vh ve)    wo.weight                                       attn.proj.weight                       attn.proj.weight
vision_o_bias       wd            wo.bias                                         attn.proj.bias                         attn.proj.bias
vision_norm_2       wd            norm1.weight                                    norm2.weight                           norm2.weight
vision_norm_2_bias  wd            norm1.bias                                      norm2.bias                             norm2.bias
vision_w1           vf wd         mlp.fc0.weight                                  mlp.fc1.weight                         mlp.linear_fc1.weight
vision_w1_bias      vf            mlp.fc0.bias                                    mlp.fc1.bias                           mlp.linear_fc1.bias
vision_w2           wd vf         mlp.fc1.weight                                  mlp.fc2.weight                         mlp.linear_fc2.weight
vision_w2_bias      wd            mlp.fc1.bias                                    mlp.fc2.bias                           mlp.linear_fc2.bias
"""  # noqa: E501

PROJECTOR = """
logical              axes  hf, mcore: mm_projector.  hf-v5: model.mm_projector.  hf-fresh                            torchtitan@0.3: vision_encoder.projector.
projector_norm       wd    pre_norm.weight    pre_norm.weight             model.mm_projector.pre_norm.weight  pre_norm.weight
projector_norm_bias  wd    pre_norm.bias      pre_norm.bias               model.mm_projector.pre_norm.bias    pre_norm.bias
projector_w1         vo u  proj.0.weight      in_proj.weight              mm_projector.proj.0.weight          linear_1.weight
projector_w1_bias    vo    proj.0.bias        in_proj.bias                mm_projector.proj.0.bias            linear_1.bias
projector_w2         d vo  proj.2.weight      out_proj.weight             mm_projector.proj.2.weight          linear_2.weight
projector_w2_bias    d     proj.2.bias        out_proj.bias               mm_projector.proj.2.bias            linear_2.bias
"""  # noqa: E501

PLAIN = "hf, hf-v5: model.layers."
TEXT = deepseek_v2.LAYER + deepseek_v3.CORRECTION.partition("{i}.\n")[2]

MCORE = _megatron.put_under(
    "language_model.",
    *qwen2_moe.MCORE_ENDS,
    deepseek_v2.MCORE,
    qwen2_moe.MCORE_FEED_FORWARD,
    qwen2_moe.MCORE_SHARED,
    deepseek_v3.MCORE_CORRECTION,
)

FAMILY: Family = replace(
    deepseek_v3.FAMILY,
    name="kimi_k25",
    title="Kimi K2.5, K2.6, K2.7",
    aliases=("kimi_k2_5", "kimi_k2_6", "kimi_k2_7"),
    layouts=("hf", "hf-v5", "hf-fresh", "torchtitan@0.3", "mcore"),
    tables=(
        PATCHES,
        VISION_LAYER,
        PROJECTOR,
        ENDS,
        TEXT.replace(PLAIN, "hf: language_model.model.layers."),
        TEXT.replace(PLAIN, "hf-fresh: language_model.model.blocks."),
        TEXT.replace(PLAIN, "hf-v5: model.language_model.layers."),
        qwen2_moe.PACKED.replace("model.", "model.language_model."),
        deepseek_v3.TITAN.replace("torchtitan@0.2, ", ""),
        AFTER,
        *MCORE,
    ),
    like={},
    architecture="Kimi_K25ForConditionalGeneration",
    drops=(),
    ties=(Tie("output", of="embed", stored_in=("hf-v5", "torchtitan@0.3")),),
    constants={"p": 2},
    composite={"ve": ("vr", "p")},
    companions=(),
    free=(),
    shifts=(),
    sizes={
        **{axis: ("text_config." + n[0], "") for axis, n in deepseek_v2.FAMILY.sizes.items()},
        "wd": ("vision_config.hidden_size|vt_hidden_size", ""),
        "vf": ("vision_config.intermediate_size|vt_intermediate_size", ""),
        "vh": ("vision_config.num_attention_heads|vt_num_attention_heads", ""),
        "ph": ("vision_config.patch_size", ""),
        "pw": ("vision_config.patch_size", ""),
        "gh": ("vision_config.pos_emb_height|init_pos_emb_height", ""),
        "gw": ("vision_config.pos_emb_width|init_pos_emb_width", ""),
        "j": ("vision_config.num_hidden_layers|vt_num_hidden_layers", ""),
    },
    formulas=(
        ("qk", "text_config.qk_nope_head_dim + text_config.qk_rope_head_dim"),
        ("kr", "text_config.kv_lora_rank + text_config.qk_rope_head_dim"),
        ("kv", "text_config.qk_nope_head_dim + text_config.v_head_dim"),
        ("wd", "projection_hidden_size"),
        ("s", "text_config.n_shared_experts * text_config.moe_intermediate_size"),
    ),
    kinds=tuple(kind.with_prefix("text_config") for kind in deepseek_v2.FAMILY.kinds),
    proofs=_proofs.get_proofs("hf", "hf-v5", "hf-fresh", "torchtitan@0.3"),
    sources={"mcore": "Megatron-Bridge"},
    config_signs=({"model_type": "kimi_k25"},),
    megatron=_megatron.KIMI_K25,
    tiny=dict(
        deepseek_v2.FAMILY.tiny,
        wd=20,
        vf=14,
        vh=2,
        ve=10,
        vc=3,
        ph=2,
        pw=5,
        gh=7,
        gw=9,
        u=80,
        vo=18,
        j=2,
    ),
)
