"""Hunyuan 4: latent attention on indexed tokens with gates and sinks, hyper-connections, experts.

==============  ================================================================================
layout          where it is found
==============  ================================================================================
hf              on the Hub; transformers 5 reads it, without the MTP layer (``model.mtp_layers``)
hf-v5           in-memory names of transformers 5
hf-fresh        saved by transformers 5: ``hc_pre`` in another place, also if there is no head;
                gates called ``linear_gate``
llm-compressor  llm-compressor, with a linear layer per projection of an expert
==============  ================================================================================

Layers without an indexer reuse the tokens of the layer before. ``indexer_types`` lists them.

Sources: transformers' ``modeling_hy_v4.py`` and ``conversion_mapping.py``, the names and shapes of
Hy4 on the Hub, SGLang's ``hunyuan_v4_mtp.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Demand, Family, Tie

from . import _hf, _llm_compressor, _proofs, deepseek_v32, glm_moe_dsa

LAYER = """
logical          axes       hf: model.layers.{i}.
norm_1           d          input_layernorm.weight
q_a              ql d       self_attn.q_a_proj.weight
q_a_norm         ql         self_attn.q_a_layernorm.weight
q_b              (h qk) ql  self_attn.q_b_proj.weight
kv_a             kr d       self_attn.kv_a_proj_with_mqa.weight
kv_a_norm        kl         self_attn.kv_a_layernorm.weight
kv_b             (h kv) kl  self_attn.kv_b_proj.weight
gate             (h vd) d   self_attn.linear_gate.weight
sinks            h          self_attn.learnable_sink_param
o                d (h vd)   self_attn.o_proj.weight
norm_2           d          post_attention_layernorm.weight
w1@dense         f d        mlp.gate_proj.weight
w3@dense         f d        mlp.up_proj.weight
w2@dense         d f        mlp.down_proj.weight
router@moe       x d        mlp.gate.weight
router_bias@moe  x          mlp.gate.e_score_correction_bias
expert_w1@moe    x m d      mlp.experts.gate_up_proj#0.1
expert_w3@moe    x m d      mlp.experts.gate_up_proj#1.1
expert_w2@moe    x d m      mlp.experts.down_proj
shared_w1@moe    s d        mlp.shared_experts.gate_proj.weight
shared_w3@moe    s d        mlp.shared_experts.up_proj.weight
shared_w2@moe    d s        mlp.shared_experts.down_proj.weight
"""

CONNECTIONS = """
logical        axes   hf: model.layers.{i}.        hf-v5: model.layers.{i}.  hf-fresh: model.layers.{i}.hc_pre.
attn_hc        hx hd  hc_attn_layer.hc_pre.hc_fn     attn_hc.fn              hc_attn_layer.hc_fn
attn_hc_base   hx     hc_attn_layer.hc_pre.hc_base   attn_hc.base            hc_attn_layer.hc_base
attn_hc_scale  hs     hc_attn_layer.hc_pre.hc_scale  attn_hc.scale           hc_attn_layer.hc_scale
ffn_hc         hx hd  hc_mlp_layer.hc_pre.hc_fn      ffn_hc.fn               hc_mlp_layer.hc_fn
ffn_hc_base    hx     hc_mlp_layer.hc_pre.hc_base    ffn_hc.base             hc_mlp_layer.hc_base
ffn_hc_scale   hs     hc_mlp_layer.hc_pre.hc_scale   ffn_hc.scale            hc_mlp_layer.hc_scale
"""  # noqa: E501

NAMES = """
logical    hf-v5: model.layers.{i}.     hf-fresh: model.layers.{i}.
gate       self_attn.gate_proj.weight   self_attn.linear_gate.weight
sinks      self_attn.sinks              self_attn.learnable_sink_param
w1         mlp.gate_proj.weight         mlp.linear_gate.weight
shared_w1  mlp.shared_experts.gate_proj.weight  mlp.shared_experts.linear_gate.weight
"""

MTP = """
logical   axes  hf: model.mtp_layers.{j}.
enorm     d     enorm.weight
hnorm     d     hnorm.weight
eh_proj   d dd  eh_proj.weight
mtp_norm  d     final_layernorm.weight
"""

AFTER = """
logical        axes   hf                           hf-v5                   hf-fresh
head_hc        hm hd  model.hc_head.hc_head_fn     model.hc_head.hc_fn     model.hc_pre.hc_head.hc_head_fn
head_hc_base   hm     model.hc_head.hc_head_base   model.hc_head.hc_base   model.hc_pre.hc_head.hc_head_base
head_hc_scale  one    model.hc_head.hc_head_scale  model.hc_head.hc_scale  model.hc_pre.hc_head.hc_head_scale
"""  # noqa: E501

IN_MTP = "model.layers.{i}.", "model.mtp_layers.{j}."

FAMILY: Family = replace(
    deepseek_v32.FAMILY,
    name="hy_v4",
    title="Hunyuan 4",
    aliases=("hunyuan_v4",),
    layouts=("hf", "hf-v5", "hf-fresh", "llm-compressor"),
    tables=(
        _hf.BEFORE,
        LAYER,
        glm_moe_dsa.INDEXER,
        CONNECTIONS,
        NAMES,
        MTP,
        LAYER.replace(*IN_MTP),
        glm_moe_dsa.MTP_INDEXER.replace("model.layers.{j}.", "model.mtp_layers.{j}."),
        _llm_compressor.build_table("model.layers.{i}.mlp.experts"),
        _llm_compressor.build_table("model.mtp_layers.{j}.mlp.experts"),
        AFTER,
        _hf.AFTER,
    ),
    like={"hf-v5": "hf", "hf-fresh": "hf"},
    prefixes={"hf-fresh-base": {"model.hc_pre.hc_head.": "hc_head.hc_pre."}},
    architecture="HYV4ForCausalLM",
    drops=(),
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    companions=(),
    free=(),
    shifts=(),
    variants=(("dense", "moe"),),
    constants={"one": 1, "hs": 2},
    pinned=(
        *("router_bias", "sinks", "attn_hc", "attn_hc_base", "attn_hc_scale", "ffn_hc"),
        *("ffn_hc_base", "ffn_hc_scale", "head_hc", "head_hc_base", "head_hc_scale"),
    ),
    demands=(Demand(("index",), kinds=("indexer_types", "full")),),
    kinds=deepseek_v32.FAMILY.kinds[:1],
    formulas=(
        *deepseek_v32.FAMILY.formulas,
        ("hx", "2 * hc_mult"),
        ("hd", "hc_mult * hidden_size"),
    ),
    sizes=dict(deepseek_v32.FAMILY.sizes) | {"hm": ("hc_mult", "")},
    proofs=_proofs.get_proofs("hf", "hf-v5", "hf-fresh", "llm-compressor"),
    config_signs=({"model_type": "hy_v4"},),
    tiny=dict(deepseek_v32.FAMILY.tiny, hm=18, hd=34, hx=15),
)
