"""Qwen 3 Next: gated delta nets, every fourth layer gated attention; experts and a shared one.

``in_proj_qkvz`` and ``in_proj_ba`` are grouped by key head and stay as they are, like the queries
of full attention, each head's beside its gate. transformers ignores the layers that predict further
tokens (``mtp``), and so do its models in memory: ``hf-v5`` has no place for them.

Sources: transformers' ``modeling_qwen3_next.py`` and ``conversion_mapping.py``; for ``mtp`` vLLM's
``qwen3_next_mtp.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _megatron, qwen2_moe

LINEAR = """
logical                axes          hf: model.layers.{i}.
linear_qkvz@linear     qkvz d        linear_attn.in_proj_qkvz.weight
linear_ba@linear       ba d          linear_attn.in_proj_ba.weight
linear_conv@linear     qkv one taps  linear_attn.conv1d.weight
linear_dt_bias@linear  lh            linear_attn.dt_bias
linear_a_log@linear    lh            linear_attn.A_log
linear_norm@linear     le            linear_attn.norm.weight
linear_o@linear        d (lh le)     linear_attn.out_proj.weight
"""

FULL = """
q@full           (h g e) d  self_attn.q_proj.weight
k@full           (k e) d    self_attn.k_proj.weight
v@full           (k e) d    self_attn.v_proj.weight
o@full           d (h e)    self_attn.o_proj.weight
q_norm@full      e          self_attn.q_norm.weight
k_norm@full      e          self_attn.k_norm.weight
q_bias@full?qkv  (h g e)    self_attn.q_proj.bias
k_bias@full?qkv  (k e)      self_attn.k_proj.bias
v_bias@full?qkv  (k e)      self_attn.v_proj.bias
o_bias@full?     d          self_attn.o_proj.bias
"""

MTP = """
logical             axes  hf: mtp.                      hf-v5: mtp.
mtp_fc?mtp          d dd  fc.weight                     -
mtp_embed_norm?mtp  d     pre_fc_norm_embedding.weight  -
mtp_norm_1?mtp      d     pre_fc_norm_hidden.weight     -
mtp_norm?mtp        d     norm.weight                   -
"""

MTP_LAYER = """
logical          axes       hf: mtp.layers.{j}.                 hf-v5: mtp.layers.{j}.
q?mtp            (h g e) d  self_attn.q_proj.weight             -
k?mtp            (k e) d    self_attn.k_proj.weight             -
v?mtp            (k e) d    self_attn.v_proj.weight             -
o?mtp            d (h e)    self_attn.o_proj.weight             -
q_norm?mtp       e          self_attn.q_norm.weight             -
k_norm?mtp       e          self_attn.k_norm.weight             -
router?mtp       x d        mlp.gate.weight                     -
expert_w1?mtp    x m d      mlp.experts.{x}.gate_proj.weight    -
expert_w3?mtp    x m d      mlp.experts.{x}.up_proj.weight      -
expert_w2?mtp    x d m      mlp.experts.{x}.down_proj.weight    -
shared_w1?mtp    s d        mlp.shared_expert.gate_proj.weight  -
shared_w3?mtp    s d        mlp.shared_expert.up_proj.weight    -
shared_w2?mtp    d s        mlp.shared_expert.down_proj.weight  -
shared_gate?mtp  one d      mlp.shared_expert_gate.weight       -
norm_1?mtp       d          input_layernorm.weight              -
norm_2?mtp       d          post_attention_layernorm.weight     -
"""

FAMILY: Family = replace(
    qwen2_moe.FAMILY,
    name="qwen3_next",
    title="Qwen 3 Next 80B-A3B",
    aliases=(),
    layouts=("hf", "hf-v5"),
    tables=(
        qwen2_moe.BEFORE,
        LINEAR + FULL + qwen2_moe.FEED_FORWARD + qwen2_moe.SHARED + qwen2_moe.NORMS,
        qwen2_moe.AFTER,
        qwen2_moe.PACKED,
        MTP,
        MTP_LAYER,
    ),
    architecture="Qwen3NextForCausalLM",
    variants=(("linear", "full"), ("dense", "moe")),
    constants={"one": 1, "g": 2},
    composite={},
    sizes={
        **qwen2_moe.FAMILY.sizes,
        "lh": ("linear_num_value_heads", ""),
        "le": ("linear_value_head_dim", ""),
        "taps": ("linear_conv_kernel_dim", ""),
    },
    proofs={"hf": "transformers 5.23", "hf-v5": "transformers 5.23"},
    config_signs=({"model_type": "qwen3_next"},),
    megatron=_megatron.QWEN3_NEXT,
    tiny={
        **qwen2_moe.FAMILY.tiny,
        "qkvz": 22,
        "ba": 8,
        "qkv": 18,
        "taps": 3,
        "lh": 2,
        "le": 7,
        "dd": 40,
        "i": 4,
        "j": 1,
    },
)
