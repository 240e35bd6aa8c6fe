"""Mistral Large 4: Pixtral's vision tower, latent attention on indexed tokens, experts.

``hf`` has Mistral's names, on the Hub and in what transformers saves. ``hf-v5`` are in-memory names
of transformers 5. It has no MTP layers (``mtp_dspark``), whose tensors no source describes.

Layers may reuse the keys and values of an earlier layer (``kv_source_layers``), or the tokens of
the layer before (``indexer_types``). In layers without rotation, the projections of the latent have
other sizes (``kr``, ``kb``). Queries and keys of the vision tower are in the order of complex
rotations in Mistral's files. The text model rotates as stored.

Sources: transformers' ``modeling_mistral_large4.py`` and ``conversion_mapping.py``.
"""

from ckptctl.planner.layouts import Demand, Family, LayerKind, Tie

from . import _proofs, glm5_next, mistral3, pixtral

ENDS = """
logical  axes  hf                     hf-v5
embed    v d   tok_embeddings.weight  model.language_model.embed_tokens.weight
lerope   lr    lerope.alpha           model.language_model.rotary_emb.alpha
"""

LAYER = """
logical                  axes        hf: layers.{i}.                         hf-v5: model.language_model.layers.{i}.
norm_1                   d           attention_norm.weight                   input_layernorm.weight
q                        (h qk) d    attention.wq.weight                     self_attn.q_proj.weight
kv_a?own                 kr d        attention.wkv_a_with_mqa.weight         self_attn.kv_a_proj_with_mqa.weight
kv_a_norm?own            kl          attention.kv_a_norm.weight              self_attn.kv_a_layernorm.weight
kv_b                     kb kl       attention.wkv_b.weight                  self_attn.kv_b_proj.weight
o                        d (h ov)    attention.wo.weight                     self_attn.o_proj.weight
ssmax_scale              h           attention.ssmax_scaling.s               self_attn.softmax_scaling.scale
ssmax_bias               h           attention.ssmax_scaling.b               self_attn.softmax_scaling.bias
index_q?index            (ih ie) d   attention.indexer.wq_b.weight           self_attn.indexer.wq_b.weight
index_k?index            ie d        attention.indexer.wk.weight             self_attn.indexer.wk.weight
index_k_norm?index       ie          attention.indexer.k_norm.weight         self_attn.indexer.k_norm.weight
index_k_norm_bias?index  ie          attention.indexer.k_norm.bias           self_attn.indexer.k_norm.bias
index_q_norm?index       d           attention.indexer.q_input_norm.weight   self_attn.indexer.q_input_norm.weight
index_q_norm_bias?index  d           attention.indexer.q_input_norm.bias     self_attn.indexer.q_input_norm.bias
index_heads?index        ih d        attention.indexer.weights_proj.weight   self_attn.indexer.weights_proj.weight
index_scale?index        ih          attention.indexer.ssmax_scaling.s       self_attn.indexer.softmax_scaling.scale
index_bias?index         ih          attention.indexer.ssmax_scaling.b       self_attn.indexer.softmax_scaling.bias
norm_2                   d           ffn_norm.weight                         post_attention_layernorm.weight
w1@dense                 f d         feed_forward.w1.weight                  mlp.gate_proj.weight
w3@dense                 f d         feed_forward.w3.weight                  mlp.up_proj.weight
w2@dense                 d f         feed_forward.w2.weight                  mlp.down_proj.weight
router@moe               x d         gate.weight                             mlp.gate.weight
expert_w1@moe            x m d       experts.{x}.w1.weight                   mlp.experts.gate_up_proj#0.1
expert_w3@moe            x m d       experts.{x}.w3.weight                   mlp.experts.gate_up_proj#1.1
expert_w2@moe            x d m       experts.{x}.w2.weight                   mlp.experts.down_proj
shared_w1@moe            s d         shared_experts.w1.weight                mlp.shared_experts.gate_proj.weight
shared_w3@moe            s d         shared_experts.w3.weight                mlp.shared_experts.up_proj.weight
shared_w2@moe            d s         shared_experts.w2.weight                mlp.shared_experts.down_proj.weight
"""  # noqa: E501

AFTER = """
logical  axes  hf             hf-v5
norm     d     norm.weight    model.language_model.norm.weight
output   v d   output.weight  lm_head.weight
"""

MISTRAL = "mistral", "hf"

VISUAL = tuple(
    table.replace("  hf:", "  earlier:").replace(*MISTRAL)
    for table in (pixtral.PATCHES, pixtral.VISION, pixtral.ADAPTER, mistral3.MERGER)
)

FAMILY = Family(
    name="mistral_large4",
    title="Mistral Large 4",
    aliases=("mistral_large_4",),
    layouts=("hf", "hf-v5"),
    tables=(*VISUAL, ENDS, LAYER, AFTER),
    architecture="MistralLarge4ForConditionalGeneration",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    variants=(("dense", "moe"),),
    constants={"p": 2},
    composite={"ve": ("vr", "p")},
    free=("kr", "kb"),
    pinned=("lerope",),
    demands=(
        Demand(("own",), sources="text_config.kv_source_layers"),
        Demand(("own",), {"text_config.kv_source_layers": None}),
        Demand(("index",), kinds=("text_config.indexer_types", "full")),
        Demand(("index",), glm5_next.ALL_INDEXED),
    ),
    kinds=(
        LayerKind("dense", kinds=("text_config.mlp_layer_types", "dense")),
        LayerKind("dense", first="text_config.first_k_dense_replace"),
    ),
    formulas=(
        *pixtral.FAMILY.formulas,
        ("lr", "text_config.qk_rope_head_dim / 2"),
        ("qk", "text_config.qk_nope_head_dim + text_config.qk_rope_head_dim"),
        ("s", "text_config.n_shared_experts * text_config.moe_intermediate_size"),
    ),
    sizes={
        **{axis: n for axis, n in pixtral.FAMILY.sizes.items() if axis not in "ke"},
        "x": ("text_config.n_routed_experts", ""),
        "m": ("text_config.moe_intermediate_size", ""),
        "kl": ("text_config.kv_lora_rank", ""),
        "ov": ("text_config.v_head_dim", ""),
        "ih": ("text_config.index_n_heads", ""),
        "ie": ("text_config.index_head_dim", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5"),
    config_signs=({"model_type": "mistral_large4"},),
    tiny={
        "v": 24,
        "d": 16,
        "f": 12,
        "h": 4,
        "x": 4,
        "m": 6,
        "s": 8,
        "i": 3,
        "lr": 15,
        "qk": 9,
        "kr": 7,
        "kl": 5,
        "kb": 21,
        "ov": 3,
        "ih": 11,
        "ie": 13,
        "vd": 20,
        "vf": 28,
        "vh": 2,
        "ve": 10,
        "vc": 3,
        "ph": 5,
        "pw": 5,
        "j": 3,
        "a": 18,
        "u": 80,
    },
)
