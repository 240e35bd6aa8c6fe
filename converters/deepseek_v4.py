"""DeepSeek-V4: hyper-connections, sliding windows, compressed tokens, hash-routed first layers.

========  ======================================================================================
layout    where it is found
========  ======================================================================================
hf        on the Hub, under the names of DeepSeek's own code; transformers 5 reads it
hf-v5     in-memory names of transformers 5, without MTP layers
hf-fresh  saved by transformers 5; no other program reads it
mcore     Megatron-Bridge, with experts that are not packed
mlx       mlx-vlm, without MTP layers
========  ======================================================================================

``layer_types`` or ``compress_ratios`` in config.json determine the layers that compress, and those
with an indexer. The compression ratio differs between layers (``ca``, ``cw``). On the Hub the
experts are packed, two numbers in a byte (``ed``, ``em``). All layouts rotate neighboring pairs of
the last part of each head, so no axis is reordered.

Sources: transformers' ``modeling_deepseek_v4.py`` and ``conversion_mapping.py``, the names and
shapes of DeepSeek-V4-Flash on the Hub, vLLM's ``deepseek_v4_mtp.py``; Megatron-Bridge's
``deepseek_v4_bridge.py`` (0.6, ``mcore``), whose model Megatron-Core 0.19 does not have; mlx-vlm's
``models/deepseek_v4``.
"""

from ckptctl.planner.layouts import BLOCK_AXES, UNCHOSEN, Companion, Demand, Family, Tie

from . import _proofs, deepseek_v3

ENDS = """
logical         axes   hf            hf-v5                      hf-fresh
embed           v d    embed.weight  model.embed_tokens.weight  model.embed_tokens.weight
"""

LAYER = """
logical             axes       hf: layers.{i}.
norm_1              d          attn_norm.weight
attn_hc             hx hd      hc_attn_fn
attn_hc_base        hx         hc_attn_base
attn_hc_pre         one        hc_attn_scale#0
attn_hc_post        one        hc_attn_scale#1
attn_hc_res         one        hc_attn_scale#2
q_a                 ql d       attn.wq_a.weight
q_a_norm            ql         attn.q_norm.weight
q_b                 (h e) ql   attn.wq_b.weight
kv                  e d        attn.wkv.weight
kv_norm             e          attn.kv_norm.weight
sinks               h          attn.attn_sink
o_a                 (og ol) w  attn.wo_a.weight
o_b                 d (og ol)  attn.wo_b.weight
"""

COMPRESSED = """
comp_kv?comp        cw d        attn.compressor.wkv.weight
comp_gate?comp      cw d        attn.compressor.wgate.weight
comp_place?comp     ca cw       attn.compressor.ape
comp_norm?comp      e           attn.compressor.norm.weight
index_q?index       (ih ie) ql  attn.indexer.wq_b.weight
index_heads?index   ih d        attn.indexer.weights_proj.weight
index_kv?index      iw d        attn.indexer.compressor.wkv.weight
index_gate?index    iw d        attn.indexer.compressor.wgate.weight
index_place?index   ia iw       attn.indexer.compressor.ape
index_norm?index    ie          attn.indexer.compressor.norm.weight
"""

ROUTED = """
router_map@hash     v t  ffn.gate.tid2eid
router_bias@scored  x    ffn.gate.bias
"""

EXPERTS = """
norm_2              d       ffn_norm.weight
ffn_hc              hx hd   hc_ffn_fn
ffn_hc_base         hx      hc_ffn_base
ffn_hc_pre          one     hc_ffn_scale#0
ffn_hc_post         one     hc_ffn_scale#1
ffn_hc_res          one     hc_ffn_scale#2
router              x d     ffn.gate.weight
expert_w1           x m ed  ffn.experts.{x}.w1.weight
expert_w3           x m ed  ffn.experts.{x}.w3.weight
expert_w2           x d em  ffn.experts.{x}.w2.weight
shared_w1           s d     ffn.shared_experts.w1.weight
shared_w3           s d     ffn.shared_experts.w3.weight
shared_w2           d s     ffn.shared_experts.w2.weight
"""

V5 = """
logical             hf-v5: model.layers.{i}.
norm_1              input_layernorm.weight
attn_hc             attn_hc.fn
attn_hc_base        attn_hc.base
attn_hc_pre         attn_hc.scale#0
attn_hc_post        attn_hc.scale#1
attn_hc_res         attn_hc.scale#2
q_a                 self_attn.q_a_proj.weight
q_a_norm            self_attn.q_a_norm.weight
q_b                 self_attn.q_b_proj.weight
kv                  self_attn.kv_proj.weight
kv_norm             self_attn.kv_norm.weight
sinks               self_attn.sinks
o_a                 self_attn.o_a_proj.weight
o_b                 self_attn.o_b_proj.weight
comp_kv             self_attn.compressor.kv_proj.weight
comp_gate           self_attn.compressor.gate_proj.weight
comp_place          self_attn.compressor.position_bias
comp_norm           self_attn.compressor.kv_norm.weight
index_q             self_attn.compressor.indexer.q_b_proj.weight
index_heads         self_attn.compressor.indexer.scorer.weights_proj.weight
index_kv            self_attn.compressor.indexer.kv_proj.weight
index_gate          self_attn.compressor.indexer.gate_proj.weight
index_place         self_attn.compressor.indexer.position_bias
index_norm          self_attn.compressor.indexer.kv_norm.weight
norm_2              post_attention_layernorm.weight
ffn_hc              ffn_hc.fn
ffn_hc_base         ffn_hc.base
ffn_hc_pre          ffn_hc.scale#0
ffn_hc_post         ffn_hc.scale#1
ffn_hc_res          ffn_hc.scale#2
router              mlp.gate.weight
router_map          mlp.gate.tid2eid
router_bias         mlp.gate.e_score_correction_bias
expert_w1           mlp.experts.gate_up_proj#0.1
expert_w3           mlp.experts.gate_up_proj#1.1
expert_w2           mlp.experts.down_proj
shared_w1           mlp.shared_experts.gate_proj.weight
shared_w3           mlp.shared_experts.up_proj.weight
shared_w2           mlp.shared_experts.down_proj.weight
"""

FRESH_NORM = """
logical             hf-fresh: model.layers.{i}.
kv_norm             attn.norm.weight
"""

MTP_LAYER = """
logical        axes   hf: mtp.{j}.
next_embed     d dd   e_proj.weight
next_hidden    d dd   h_proj.weight
next_enorm     d      enorm.weight
next_hnorm     d      hnorm.weight
head_hc        hm hd  hc_head_fn
head_hc_base   hm     hc_head_base
head_hc_scale  one    hc_head_scale
norm           d      norm.weight
"""

AFTER = """
logical        axes   hf             hf-v5                   hf-fresh
head_hc        hm hd  hc_head_fn     model.hc_head.hc_fn     model.hc_head.hc_fn
head_hc_base   hm     hc_head_base   model.hc_head.hc_base   model.hc_head.hc_base
head_hc_scale  one    hc_head_scale  model.hc_head.hc_scale  model.hc_head.hc_scale
norm           d      norm.weight    model.norm.weight       model.norm.weight
output         v d    head.weight    lm_head.weight          head.weight
"""

MCORE_ENDS = """
logical        mcore
embed          embedding.word_embeddings.weight
head_hc        decoder.hc_head_fn
head_hc_base   decoder.hc_head_base
head_hc_scale  decoder.hc_head_scale
norm           decoder.final_layernorm.weight
output         output_layer.weight
"""

MCORE_LAYER = """
logical       mcore: decoder.layers.{i}.
norm_1        input_layernorm.weight
attn_hc       self_attention_hyper_connection.mapping_proj.weight
attn_hc_base  self_attention_hyper_connection.bias
attn_hc_pre   self_attention_hyper_connection.alpha_pre
attn_hc_post  self_attention_hyper_connection.alpha_post
attn_hc_res   self_attention_hyper_connection.alpha_res
q_a           self_attention.linear_q_down_proj.weight
q_a_norm      self_attention.q_layernorm.weight
q_b           self_attention.linear_q_up_proj.weight
kv            self_attention.linear_kv_proj.weight
kv_norm       self_attention.kv_layernorm.weight
sinks         self_attention.core_attention.attn_sink
o_a           self_attention.linear_o_group_proj
o_b           self_attention.linear_proj.weight
norm_2        pre_mlp_layernorm.weight
ffn_hc        mlp_hyper_connection.mapping_proj.weight
ffn_hc_base   mlp_hyper_connection.bias
ffn_hc_pre    mlp_hyper_connection.alpha_pre
ffn_hc_post   mlp_hyper_connection.alpha_post
ffn_hc_res    mlp_hyper_connection.alpha_res
router        mlp.router.weight
router_map    mlp.router.tid2eid
router_bias   mlp.router.expert_bias
expert_w1     mlp.experts.experts.linear_fc1.weight#0.1
expert_w3     mlp.experts.experts.linear_fc1.weight#1.1
expert_w2     mlp.experts.experts.linear_fc2.weight
shared_w1     mlp.shared_experts.linear_fc1.weight#0
shared_w3     mlp.shared_experts.linear_fc1.weight#1
shared_w2     mlp.shared_experts.linear_fc2.weight
"""

MCORE_COMPRESSED = """
logical      mcore: decoder.layers.{i}.self_attention.core_attention.
comp_kv      compressor.linear_wkv.weight
comp_gate    compressor.linear_wgate.weight
comp_place   compressor.ape
comp_norm    compressor.norm.weight
index_q      indexer.linear_wq_b.weight
index_heads  indexer.linear_weights_proj.weight
index_kv     indexer.compressor.linear_wkv.weight
index_gate   indexer.compressor.linear_wgate.weight
index_place  indexer.compressor.ape
index_norm   indexer.compressor.norm.weight
"""

MCORE_MTP = """
logical        mcore: mtp.layers.{j}.
next_embed     e_proj.weight
next_hidden    h_proj.weight
next_enorm     enorm.weight
next_hnorm     hnorm.weight
head_hc        hc_head_fn
head_hc_base   hc_head_base
head_hc_scale  hc_head_scale
norm           final_layernorm.weight
"""

MLX_ENDS = """
logical        mlx: language_model.
embed          model.embed_tokens.weight
head_hc        model.hc_head.fn
head_hc_base   model.hc_head.base
head_hc_scale  model.hc_head.scale
norm           model.norm.weight
output         lm_head.weight
"""

MLX_STACKS = """
logical        mlx: language_model.model.layers.{i}.
o_a            attn.wo_a.weight og ol w
expert_w1      ffn.switch_mlp.gate_proj.weight
expert_w3      ffn.switch_mlp.up_proj.weight
expert_w2      ffn.switch_mlp.down_proj.weight
shared_w1      ffn.shared_experts.gate_proj.weight
shared_w3      ffn.shared_experts.up_proj.weight
shared_w2      ffn.shared_experts.down_proj.weight
"""

MLX_HC = """
logical        mlx: language_model.model.layers.{i}.
router_bias    ffn.gate.e_score_correction_bias
attn_hc        attn_hc.fn
attn_hc_base   attn_hc.base
attn_hc_pre    attn_hc.scale#0
attn_hc_post   attn_hc.scale#1
attn_hc_res    attn_hc.scale#2
ffn_hc         ffn_hc.fn
ffn_hc_base    ffn_hc.base
ffn_hc_pre     ffn_hc.scale#0
ffn_hc_post    ffn_hc.scale#1
ffn_hc_res     ffn_hc.scale#2
"""

FRESH = "hf: layers.", "hf-fresh: model.layers."
AT_MLX = "hf: layers.", "mlx: language_model.model.layers."
IN_MTP_LAYER = "hf: layers.{i}.", "hf: mtp.{j}."
UNLISTED = {"mlp_layer_types": UNCHOSEN}
COMPRESSING = "compressed_sparse_attention", "heavily_compressed_attention"
LAYERS = LAYER + COMPRESSED + ROUTED + EXPERTS
IN_FLOAT32 = (
    "router_bias",
    "sinks",
    "attn_hc",
    "attn_hc_base",
    "attn_hc_pre",
    "attn_hc_post",
    "attn_hc_res",
    "ffn_hc",
    "ffn_hc_base",
    "ffn_hc_pre",
    "ffn_hc_post",
    "ffn_hc_res",
    "head_hc",
    "head_hc_base",
    "head_hc_scale",
    "comp_place",
    "index_place",
)

FAMILY = Family(
    name="deepseek_v4",
    title="DeepSeek-V4 Flash, Pro",
    layouts=("hf", "hf-v5", "hf-fresh", "mcore", "mlx"),
    tables=(
        ENDS,
        LAYERS,
        LAYERS.replace(*FRESH),
        FRESH_NORM,
        V5,
        MTP_LAYER,
        (LAYER + ROUTED + EXPERTS).replace(*IN_MTP_LAYER),
        AFTER,
        MCORE_ENDS,
        MCORE_LAYER,
        MCORE_COMPRESSED,
        MCORE_MTP,
        MCORE_LAYER.replace(*deepseek_v3.IN_MTP),
        MLX_ENDS,
        LAYERS.replace(*AT_MLX),
        MLX_STACKS,
        MLX_HC,
    ),
    like={"mlx": ""},
    architecture="DeepseekV4ForCausalLM",
    ties=(Tie("output", of="embed"),),
    variants=(("scored", "hash"),),
    demands=(
        Demand(("comp",), kinds=("layer_types", *COMPRESSING)),
        Demand(("index",), kinds=("layer_types", COMPRESSING[0])),
        Demand(("comp",), kinds=("compress_ratios", 4, 128)),
        Demand(("index",), kinds=("compress_ratios", 4)),
        Demand(("router_map",), kinds=("mlp_layer_types", "hash_moe")),
        Demand(("router_bias",), kinds=("mlp_layer_types", "moe")),
        Demand(("router_map",), UNLISTED, first="num_hash_layers"),
        Demand(("router_bias",), UNLISTED, after="num_hash_layers"),
    ),
    constants={"one": 1},
    companions=(Companion({"hf": (".weight", ".scale")}),),
    free=(*BLOCK_AXES, "ca", "cw", "ed", "em"),
    pinned=IN_FLOAT32,
    unquantized=("comp_kv", "comp_gate", "index_kv", "index_gate", "next_embed", "next_hidden"),
    sizes={
        "v": ("vocab_size", ""),
        "d": ("hidden_size", ""),
        "m": ("moe_intermediate_size", ""),
        "h": ("num_attention_heads", ""),
        "e": ("head_dim", ""),
        "x": ("n_routed_experts", ""),
        "t": ("num_experts_per_tok", ""),
        "ql": ("q_lora_rank", ""),
        "og": ("o_groups", ""),
        "ol": ("o_lora_rank", ""),
        "ih": ("index_n_heads", ""),
        "ie": ("index_head_dim", ""),
        "hm": ("hc_mult", ""),
        "i": ("num_hidden_layers", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "hf-fresh", "mlx", mlx=_proofs.MLX_VLM),
    sources={"mcore": "Megatron-Bridge"},
    config_signs=({"model_type": "deepseek_v4"},),
    tiny=dict(
        v=24,
        d=16,
        m=6,
        s=8,
        h=4,
        e=7,
        x=5,
        t=2,
        w=14,
        ql=10,
        og=2,
        ol=9,
        ih=3,
        ie=11,
        ia=4,
        iw=22,
        ca=4,
        cw=13,
        ed=12,
        em=20,
        dd=17,
        hm=18,
        hd=32,
        hx=15,
        i=3,
        down=4,
        across=8,
    ),
)
