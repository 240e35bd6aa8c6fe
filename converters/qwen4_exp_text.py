"""The text model of Qwen 3.8 Flash Next: hyper-connections, indexed attention, n-gram embeddings.

========  =====================================================================================
layout    experts, and tables of n-gram embeddings
========  =====================================================================================
hf        stacked; ``split_ngram_parts`` shards: on the Hub
hf-v5     stacked; one table: in-memory names of transformers 5, which ignores MTP layers
hf-fresh  separate; shards: published FP8 models, and new models saved by transformers 5
========  =====================================================================================

Gated delta nets and gated attention are those of Qwen 3.5. Instead of norms, hyper-connections
precede them and the experts. The indexer's queries and single key are one projection.
``ple_layer_ids`` lists, counted from 1, the layers with n-gram embeddings. The tables of these
layers differ in size.

Sources: transformers' ``modeling_qwen4_exp.py`` and ``conversion_mapping.py``, mlx-vlm's
``speculative/drafters/qwen4_exp_mtp`` for ``mtp``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Demand, Family, Tie

from . import _proofs, qwen3_5_moe_text, qwen3_5_text, qwen3_next

INDEXER = """
index_q@full       (ih ie) d  self_attn.indexer.index_qk_proj.weight#0
index_k@full       ie d       self_attn.indexer.index_qk_proj.weight#1
index_q_norm@full  ie         self_attn.indexer.q_layernorm.weight
index_k_norm@full  ie         self_attn.indexer.k_layernorm.weight
"""

CONNECTIONS = """
attn_hc_norm    hd     attn_hyper_connection.hc_norm.weight
attn_hc_down    hl hd  attn_hyper_connection.input_mix_weight_down.weight
attn_hc_up      hd hl  attn_hyper_connection.input_mix_weight_up.weight
attn_hc_inject  hm hd  attn_hyper_connection.block_inject_weight.weight
ffn_hc_norm     hd     mlp_hyper_connection.hc_norm.weight
ffn_hc_down     hl hd  mlp_hyper_connection.input_mix_weight_down.weight
ffn_hc_up       hd hl  mlp_hyper_connection.input_mix_weight_up.weight
ffn_hc_inject   hm hd  mlp_hyper_connection.block_inject_weight.weight
"""

NGRAMS = """
ple_key?ple          hd pe       ple.key_proj.weight
ple_value?ple        d pe        ple.value_proj.weight
ple_norm_key?ple     hd          ple.norm_key.weight
ple_norm_query?ple   hd          ple.norm_query.weight
ple_norm_conv?ple    hd          ple.norm_conv.weight
ple_conv?ple         hd one pt   ple.conv1d.weight
ple_multipliers?ple  ng          ple.ple_embedding.layer_multipliers
ple_sizes?ple        nh          ple.ple_embedding.ngram_heads_vocab_sizes
ple_offsets?ple      nh          ple.ple_embedding.ngram_heads_offsets
ple_table?ple        (y nr) ne   ple.ple_embedding.ngram_embedding.shard_{y}.weight
"""

TABLE = """
ple_table  ple.ple_embedding.ngram_embedding.weight
"""

MIXER = """
head_hc_norm  hd     hyper_connection_mixer.hc_norm.weight
head_hc_down  hl hd  hyper_connection_mixer.input_mix_weight_down.weight
head_hc_up    hd hl  hyper_connection_mixer.input_mix_weight_up.weight
"""

OUTPUT = """
logical  axes  hf, hf-v5
output   v d   lm_head.weight
"""

MTP_MIXER = """
logical               axes   hf: mtp.
mtp_embed_norm?mtp    d      pre_fc_norm_embedding.weight
mtp_hidden_norm?mtp   hd     pre_fc_norm_hidden.weight
mtp_fc_embed?mtp      d de   fc_embedding.weight
mtp_fc_hidden?mtp     d de   fc_hidden.weight
mtp_head_hc_norm?mtp  hd     hyper_connection_mixer.hc_norm.weight
mtp_head_hc_down?mtp  hl hd  hyper_connection_mixer.input_mix_weight_down.weight
mtp_head_hc_up?mtp    hd hl  hyper_connection_mixer.input_mix_weight_up.weight
"""

MTP_LAYER = """
index_q?mtp         (ih ie) d  self_attn.indexer.index_qk_proj.weight#0
index_k?mtp         ie d       self_attn.indexer.index_qk_proj.weight#1
index_q_norm?mtp    ie         self_attn.indexer.q_layernorm.weight
index_k_norm?mtp    ie         self_attn.indexer.k_layernorm.weight
attn_hc_norm?mtp    hd         attn_hyper_connection.hc_norm.weight
attn_hc_down?mtp    hl hd      attn_hyper_connection.input_mix_weight_down.weight
attn_hc_up?mtp      hd hl      attn_hyper_connection.input_mix_weight_up.weight
attn_hc_inject?mtp  hm hd      attn_hyper_connection.block_inject_weight.weight
ffn_hc_norm?mtp     hd         mlp_hyper_connection.hc_norm.weight
ffn_hc_down?mtp     hl hd      mlp_hyper_connection.input_mix_weight_down.weight
ffn_hc_up?mtp       hd hl      mlp_hyper_connection.input_mix_weight_up.weight
ffn_hc_inject?mtp   hm hd      mlp_hyper_connection.block_inject_weight.weight
"""

LAYER = (
    qwen3_5_text.LINEAR
    + qwen3_next.CONVOLUTION
    + qwen3_next.FULL
    + INDEXER
    + CONNECTIONS
    + NGRAMS
    + qwen3_5_moe_text.EXPERTS
)

MTP = (
    MTP_MIXER,
    "logical  axes  hf: mtp.layers.{j}."
    + qwen3_5_text.MTP_ATTENTION
    + MTP_LAYER
    + qwen3_5_moe_text.MTP_EXPERTS,
    "logical  hf-fresh: mtp.layers.{j}." + qwen3_5_moe_text.APART,
)

UNQUANTIZED = (
    *("index_q", "index_k", "attn_hc_down", "attn_hc_up", "attn_hc_inject"),
    *("ffn_hc_down", "ffn_hc_up", "ffn_hc_inject", "ple_key", "ple_value", "ple_table"),
)

SIZES = qwen3_5_moe_text.SIZES | {
    "ih": ("indexer_n_heads", ""),
    "ie": ("indexer_head_dim", ""),
    "hm": ("hc_count", ""),
    "hl": ("hc_lowrank", ""),
    "pe": ("ple_embed_dim|hidden_size", ""),
    "pt": ("ple_conv_kernel_size", ""),
    "ng": ("ngram_size", ""),
    "y": ("split_ngram_parts", ""),
}

NESTED = {
    axis: "|".join(f"text_config.{name}" for name in names.split("|"))
    for axis, (names, _) in SIZES.items()
}

FORMULAS = (
    ("hd", "hc_count * hidden_size"),
    ("de", "hidden_size"),
    ("nh", "ngram_size * heads_per_ngram - heads_per_ngram"),
)

FAMILY: Family = replace(
    qwen3_5_moe_text.FAMILY,
    name="qwen4_exp_text",
    title="Qwen 3.8 Flash Next, text only",
    layouts=("hf", "hf-v5", "hf-fresh"),
    tables=(
        "logical  axes  hf, hf-v5: model." + qwen3_5_text.EMBED,
        "logical  axes  hf, hf-v5: model.layers.{i}." + LAYER,
        "logical  hf-v5: model.layers.{i}." + TABLE,
        "logical  hf-fresh: model.layers.{i}." + qwen3_5_moe_text.APART,
        "logical  axes  hf, hf-v5: model." + MIXER,
        OUTPUT,
        *MTP,
    ),
    like={"hf-fresh": "hf"},
    architecture="Qwen4ExpForCausalLM",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    demands=(Demand(("ple",), numbers="ple_layer_ids", start=1),),
    formulas=FORMULAS,
    free=("nr",),
    unquantized=UNQUANTIZED,
    sizes={axis: (f"{names}|{NESTED[axis]}", "") for axis, (names, _) in SIZES.items()},
    proofs=_proofs.get_proofs("hf", "hf-v5", "hf-fresh"),
    shown_by=None,
    config_signs=(
        {"model_type": "qwen4_exp_text"},
        {"model_type": "qwen4_exp", "vision_config": None},
    ),
    megatron=None,
    tiny={
        **qwen3_5_moe_text.FAMILY.tiny,
        "ih": 3,
        "ie": 11,
        "hm": 13,
        "hl": 9,
        "hd": 34,
        "de": 17,
        "pe": 12,
        "pt": 6,
        "ng": 8,
        "nh": 10,
        "y": 2,
        "nr": 14,
        "ne": 15,
    },
)
