"""DeepSeek-V4.1: DeepSeek-V4's layers, shared compressed tokens, n-gram memory, vision, DSpark.

Only the layers in ``kv_source_layer_ids`` compress tokens, and only those in
``index_source_layer_ids`` select from them. The layers in ``engram_layer_ids`` have a table of
n-grams. The MTP layers have a number of experts of their own. On the Hub, experts are packed, two
numbers in a byte (``ed``, ``em``).

mlx-vlm reads published models, and its own (``mlx``), which have no MTP layers. mlx-lm has no
tower and other names. Sources: the names and shapes that ATOM's ``deepseek_v41/weights.py``
requires of the published files, mlx-vlm's ``models/deepseek_v41``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Demand, Family, Tie

from . import _proofs, deepseek_v4

ENDS = """
logical        axes  hf             mlx
embed          v d   embed.weight   language_model.embed_tokens.weight
image_start    d     image_start    image_start
image_end      d     image_end      image_end
image_newline  d     image_newline  image_newline
"""

AFTER = """
logical  axes  hf           mlx
norm     d     norm.weight  language_model.norm.weight
output   v d   head.weight  language_model.head.weight
"""

COMPRESSED = """
comp_kv?comp        e d         attn.compressor.wkv.weight
comp_gate?pool      e d         attn.compressor.wgate.weight
comp_norm?comp      e           attn.compressor.norm.weight
index_k?comp        ie e        attn.indexer.wk.weight
index_k_norm?comp   ie          attn.indexer.k_norm.weight
index_q?index       (ih ie) ql  attn.indexer.wq_b.weight
index_heads?index   ih d        attn.indexer.weights_proj.weight
"""

ROUTED = """
router_bias         x           ffn.gate.bias
router_bias_vl      x           ffn.gate.bias_vl
"""

ENGRAM = """
engram_embed?engram  er eh      engram.embed.weight
engram_kv?engram     hw en      engram.wkv.weight
engram_k?engram      hm d       engram.k_weight
engram_q?engram      hm d       engram.q_weight
"""

DRAFT = """
markov_embed?       v mr        markov_head.embed.weight
markov_head?        v mr        markov_head.head.weight
confidence?         one cr      confidence_head.proj.weight
mtp_norm?           d           norm.weight
main_proj?          d dt        main_proj.weight
main_norm?          d           main_norm.weight
"""

VISION = """
logical            axes   hf, mlx
vision_patch       vd vp  vision.patch_embed.proj.weight
vision_patch_bias  vd     vision.patch_embed.proj.bias
vision_norm        vd     vision.norm.weight
aligner_w1         d va   aligner.w1.weight
aligner_w1_bias    d      aligner.w1.bias
aligner_w2         d dw   aligner.w2.weight
aligner_w2_bias    d      aligner.w2.bias
"""

VISION_LAYER = """
logical        axes    hf, mlx: vision.blocks.{u}.
vision_norm_1  vd      norm1.weight
vision_norm_2  vd      norm2.weight
vision_q       vw vd   attn.wqkv.weight#0
vision_k       vw vd   attn.wqkv.weight#1
vision_v       vw vd   attn.wqkv.weight#2
vision_q_bias  vw      attn.wqkv.bias#0
vision_k_bias  vw      attn.wqkv.bias#1
vision_v_bias  vw      attn.wqkv.bias#2
vision_o       vd vw   attn.wo.weight
vision_o_bias  vd      attn.wo.bias
vision_w13     vg vd   mlp.w1.weight
vision_w2      vd vi   mlp.w2.weight
"""

AT_MLX = "hf: layers.", "mlx: language_model.layers."
AT_MLX_STACKS = "mlx: language_model.model.", "mlx: language_model."
LAYER = deepseek_v4.LAYER + COMPRESSED + ROUTED + deepseek_v4.EXPERTS + ENGRAM
DRAFT_EXPERTS = (ROUTED + deepseek_v4.EXPERTS).replace(" x ", " dx ").replace("{x}", "{dx}")

FAMILY: Family = replace(
    deepseek_v4.FAMILY,
    name="deepseek_v41",
    title="DeepSeek-V4.1",
    layouts=("hf", "mlx"),
    tables=(
        ENDS,
        LAYER,
        LAYER.replace(*AT_MLX),
        deepseek_v4.MLX_STACKS.replace(*AT_MLX_STACKS),
        AFTER,
        deepseek_v4.LAYER.replace(*deepseek_v4.IN_MTP_LAYER) + DRAFT_EXPERTS + DRAFT,
        VISION,
        VISION_LAYER,
    ),
    architecture="DeepseekV41ForCausalLM",
    ties=(Tie("output", of="embed"),),
    variants=(),
    demands=(
        Demand(("comp",), numbers="text_config.kv_source_layer_ids"),
        Demand(
            ("pool",),
            numbers="text_config.kv_source_layer_ids",
            kinds=("text_config.compress_ratios", 2),
        ),
        Demand(("index",), numbers="text_config.index_source_layer_ids"),
        Demand(("engram",), numbers="text_config.engram_layer_ids"),
        Demand(("main_proj", "main_norm"), index="j", first="1"),
        Demand(("markov_embed", "markov_head", "confidence", "mtp_norm"), index="j", last="1"),
    ),
    free=("down", "across", "ed", "em", "er"),
    pinned=(*deepseek_v4.IN_FLOAT32, "router_bias_vl"),
    unquantized=(
        *("comp_kv", "comp_gate", "index_k", "engram_embed", "engram_k", "engram_q"),
        *("router", "confidence", "main_proj", "markov_embed", "markov_head"),
    ),
    formulas=(
        ("hd", "text_config.hc_mult * text_config.hidden_size"),
        ("hw", "text_config.hc_mult * text_config.hidden_size + text_config.hidden_size"),
        ("hx", "text_config.hc_mult * text_config.hc_mult + 2 * text_config.hc_mult"),
        ("s", "text_config.n_shared_experts * text_config.moe_intermediate_size"),
        ("cr", "text_config.hidden_size + text_config.dspark_markov_rank"),
        ("dt", "text_config.hidden_size * len(text_config.dspark_target_layer_ids)"),
        ("dw", "text_config.hidden_size"),
        ("vw", "vision_config.hidden_size"),
        ("vg", "2 * vision_config.intermediate_size"),
        ("vp", "3 * vision_config.patch_size * vision_config.patch_size"),
        (
            "va",
            "vision_config.hidden_size * vision_config.downsample_ratio"
            " * vision_config.downsample_ratio",
        ),
    ),
    sizes={
        **{
            axis: (f"text_config.{names[0]}", "")
            for axis, names in deepseek_v4.FAMILY.sizes.items()
            if axis != "t"
        },
        "dx": ("text_config.dspark_n_routed_experts", ""),
        "mr": ("text_config.dspark_markov_rank", ""),
        "eh": ("text_config.engram_head_dim", ""),
        "j": ("text_config.num_nextn_predict_layers", ""),
        "vd": ("vision_config.hidden_size", ""),
        "vi": ("vision_config.intermediate_size", ""),
        "u": ("vision_config.num_hidden_layers", ""),
    },
    proofs=_proofs.get_proofs("hf", "mlx", hf=_proofs.MLX_VLM, mlx=_proofs.MLX_VLM),
    sources={},
    config_signs=({"model_type": "deepseek_v41"},),
    tiny={
        **{
            axis: size
            for axis, size in deepseek_v4.FAMILY.tiny.items()
            if axis not in ("t", "ia", "iw", "ca", "cw", "dd")
        },
        **dict(dx=3, mr=21, eh=23, er=25, hw=26, en=27, cr=29, dt=31, dw=33, u=2),
        **dict(vd=34, vw=35, vg=36, vi=37, vp=38, va=39),
    },
)
