"""Step 3.7 Flash: Step 3.5 with the Perception Encoder, whose patches two convolutions merge.

``hf-v5`` has in-memory names of transformers 5. The tower rotates neighboring pairs in the files
and in mlx-vlm, halves in memory.

Sources: as for ``step3p5``, and mlx-vlm's ``models/step3p7``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import CHOSEN, Demand, Family

from . import _proofs, qwen3_5_text, step3p5

VISION = """
logical          axes         hf: vision_model.                  hf-v5: model.vision_model.              mlx: vision_model.
vision_patch     vd vc ph pw  conv1.weight                       embeddings.patch_embedding.weight       conv1.weight vd ph pw vc
vision_position  vp vd        positional_embedding               embeddings.position_embedding.weight    positional_embedding
vision_pre       vd           ln_pre.weight                      pre_layernorm.weight                    ln_pre.weight
vision_pre_bias  vd           ln_pre.bias                        pre_layernorm.bias                      ln_pre.bias
merge_1          vx vd sh sw  vit_downsampler1.weight            downsampler1.weight                     vit_downsampler1.weight vx sh sw vd
merge_1_bias     vx           vit_downsampler1.bias              downsampler1.bias                       vit_downsampler1.bias
merge_2          vy vx sh sw  vit_downsampler2.weight            downsampler2.weight                     vit_downsampler2.weight vy sh sw vx
merge_2_bias     vy           vit_downsampler2.bias              downsampler2.bias                       vit_downsampler2.bias
"""  # noqa: E501

VISION_LAYER = """
logical             axes          hf: vision_model.transformer.resblocks.{u}.  hf-v5: model.vision_model.layers.{u}.
vision_norm_1       vd            ln_1.weight                                  layernorm_before.weight
vision_norm_1_bias  vd            ln_1.bias                                    layernorm_before.bias
vision_q            (vh vr p) vd  attn.in_proj_weight#0                        self_attn.q_proj.weight (vh p vr) vd
vision_k            (vh vr p) vd  attn.in_proj_weight#1                        self_attn.k_proj.weight (vh p vr) vd
vision_v            (vh ve) vd    attn.in_proj_weight#2                        self_attn.v_proj.weight
vision_q_bias       (vh vr p)     attn.in_proj_bias#0                          self_attn.q_proj.bias (vh p vr)
vision_k_bias       (vh vr p)     attn.in_proj_bias#1                          self_attn.k_proj.bias (vh p vr)
vision_v_bias       (vh ve)       attn.in_proj_bias#2                          self_attn.v_proj.bias
vision_o            vd (vh ve)    attn.out_proj.weight                         self_attn.out_proj.weight
vision_o_bias       vd            attn.out_proj.bias                           self_attn.out_proj.bias
vision_scale_1      vd            ls_1.gamma                                   lambda_1
vision_norm_2       vd            ln_2.weight                                  layernorm_after.weight
vision_norm_2_bias  vd            ln_2.bias                                    layernorm_after.bias
vision_w1           vf vd         mlp.c_fc.weight                              mlp.fc1.weight
vision_w1_bias      vf            mlp.c_fc.bias                                mlp.fc1.bias
vision_w2           vd vf         mlp.c_proj.weight                            mlp.fc2.weight
vision_w2_bias      vd            mlp.c_proj.bias                              mlp.fc2.bias
vision_scale_2      vd            ls_2.gamma                                   lambda_2
"""  # noqa: E501

MLX_QKV = """
logical        mlx: vision_model.transformer.{u}.
vision_q       attn.in_proj.weight#0
vision_k       attn.in_proj.weight#1
vision_v       attn.in_proj.weight#2
vision_q_bias  attn.in_proj.bias#0
vision_k_bias  attn.in_proj.bias#1
vision_v_bias  attn.in_proj.bias#2
"""

PROJECTOR = """
logical          axes  hf, mlx: vit_large_projector.  hf-v5: model.multi_modal_projector.
projector        d vy  weight                         weight
projector_bias?  d     bias                           bias
"""

FAMILY: Family = replace(
    step3p5.FAMILY,
    name="step3p7",
    title="Step 3.7 Flash",
    tables=(
        VISION,
        VISION_LAYER,
        MLX_QKV,
        PROJECTOR,
        "logical  axes  hf: model." + qwen3_5_text.EMBED + qwen3_5_text.NORM,
        "logical  axes  hf-v5: model.language_model." + qwen3_5_text.EMBED + qwen3_5_text.NORM,
        "logical  axes  hf: model.layers.{i}." + step3p5.ATTENTION + step3p5.FEED_FORWARD,
        "logical  axes  hf-v5: model.language_model.layers.{i}."
        + step3p5.ATTENTION
        + step3p5.FEED_FORWARD,
        "logical  hf-v5: model.language_model.layers.{i}." + step3p5.V5,
        "logical  mlx: language_model.model.layers.{i}." + step3p5.MLX,
        step3p5.MTP,
        qwen3_5_text.OUTPUT,
        "logical  axes  hf-v5\noutput  v d  lm_head.weight",
        step3p5.MLX_NORM.replace(*qwen3_5_text.AT_MLX),
    ),
    prefixes={
        "mlx": {
            "vision_model.transformer.resblocks.": "vision_model.transformer.",
            "model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
        }
    },
    architecture="Step3p7ForConditionalGeneration",
    constants={"p": 2},
    composite={"ve": ("vr", "p")},
    demands=(Demand(("projector_bias",), {"projector_bias": CHOSEN}),),
    kinds=tuple(kind.with_prefix("text_config") for kind in step3p5.FAMILY.kinds),
    layer_sizes=(
        replace(
            step3p5.HEADS.with_prefix("text_config"),
            other="text_config.num_sliding_attention_heads"
            "|text_config.attention_other_setting.num_attention_heads",
        ),
    ),
    formulas=(
        ("dd", "2 * text_config.hidden_size"),
        ("vx", "2 * vision_config.hidden_size"),
        ("vy", "4 * vision_config.hidden_size"),
    ),
    sizes={
        **{a: (f"text_config.{n[0]}", "") for a, n in step3p5.FAMILY.sizes.items()},
        "vd": ("vision_config.hidden_size|width", ""),
        "vh": ("vision_config.num_attention_heads|heads", ""),
        "vf": ("vision_config.intermediate_size", ""),
        "vc": ("vision_config.num_channels", ""),
        "ph": ("vision_config.patch_size", ""),
        "pw": ("vision_config.patch_size", ""),
        "u": ("vision_config.num_hidden_layers|layers", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", mlx=_proofs.MLX_VLM),
    config_signs=({"model_type": "step3p7"},),
    tiny=dict(
        step3p5.FAMILY.tiny,
        vd=16,
        vf=18,
        vh=2,
        ve=8,
        vc=3,
        ph=3,
        pw=3,
        vp=9,
        sh=3,
        sw=3,
        vx=32,
        vy=64,
        u=2,
    ),
)
