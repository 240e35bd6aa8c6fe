"""Qwen 3 Next: gated delta nets, every fourth layer gated attention; experts and a shared one.

``in_proj_qkvz`` and ``in_proj_ba`` are grouped by key head (``lk``), each with its value
heads (``lh``). Megatron-Core has a tensor for each part. In full attention, the query of each head
precedes its gate. In Megatron-Core, all queries of a group precede its gates. The norm of a gated
delta net multiplies by its weight, in Megatron-Core by 1 + weight. mlx-lm stores 1 + weight for all
other norms. transformers ignores the MTP layers in files (``mtp``). Its in-memory models do not
have these layers, so they are missing in ``hf-v5``.

Sources: transformers' ``modeling_qwen3_next.py`` and ``conversion_mapping.py``; for ``mtp`` vLLM's
``qwen3_next_mtp.py``; Megatron-Core's ``ssm/gated_delta_net.py`` and
``experimental_attention_variant_module_specs.py``, Megatron-Bridge's ``qwen3_next_bridge.py``
(``mcore``: names under Transformer Engine, without which there are no such layers).
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, LayerKind

from . import _hf, _megatron, _proofs, deepseek_v3, qwen2, qwen2_moe, qwen3_moe

IN_MTP = deepseek_v3.IN_MTP

LINEAR = """
logical                axes              hf: model.layers.{i}.
linear_q@linear        (lk ld) d         linear_attn.in_proj_qkvz.weight#0/lk
linear_k@linear        (lk ld) d         linear_attn.in_proj_qkvz.weight#1/lk
linear_v@linear        (lh le) d         linear_attn.in_proj_qkvz.weight#2/lk
linear_z@linear        (lh le) d         linear_attn.in_proj_qkvz.weight#3/lk
linear_b@linear        lh d              linear_attn.in_proj_ba.weight#0/lk
linear_a@linear        lh d              linear_attn.in_proj_ba.weight#1/lk
"""

CONVOLUTION = """
linear_conv_q@linear   (lk ld) one taps  linear_attn.conv1d.weight#0
linear_conv_k@linear   (lk ld) one taps  linear_attn.conv1d.weight#1
linear_conv_v@linear   (lh le) one taps  linear_attn.conv1d.weight#2
linear_dt_bias@linear  lh                linear_attn.dt_bias
linear_a_log@linear    lh                linear_attn.A_log
linear_norm@linear     le                linear_attn.norm.weight
linear_o@linear        d (lh le)         linear_attn.out_proj.weight
"""

LINEAR_NORM = """
linear_norm_1@linear   d                 input_layernorm.weight
"""

FULL = """
q@full           (k q g e) d  self_attn.q_proj.weight
k@full           (k e) d      self_attn.k_proj.weight
v@full           (k e) d      self_attn.v_proj.weight
o@full           d (h e)      self_attn.o_proj.weight
q_norm@full      e            self_attn.q_norm.weight
k_norm@full      e            self_attn.k_norm.weight
q_bias@full?qkv  (k q g e)    self_attn.q_proj.bias
k_bias@full?qkv  (k e)        self_attn.k_proj.bias
v_bias@full?qkv  (k e)        self_attn.v_proj.bias
o_bias@full?     d            self_attn.o_proj.bias
"""

FULL_NORM = """
norm_1@full      d            input_layernorm.weight
"""

ATTENTION = CONVOLUTION + LINEAR_NORM + FULL + FULL_NORM

NORMS = """
norm_2@dense    d  post_attention_layernorm.weight
norm_2_moe@moe  d  post_attention_layernorm.weight
"""

MTP = """
logical             axes  hf: mtp.                      hf-v5, mlx: mtp.
mtp_fc?mtp          d dd  fc.weight                     -
mtp_embed_norm?mtp  d     pre_fc_norm_embedding.weight  -
mtp_norm_1?mtp      d     pre_fc_norm_hidden.weight     -
mtp_norm?mtp        d     norm.weight                   -
"""

MTP_LAYER = """
logical          axes         hf: mtp.layers.{j}.                 hf-v5, mlx: mtp.layers.{j}.
q?mtp            (k q g e) d  self_attn.q_proj.weight             -
k?mtp            (k e) d      self_attn.k_proj.weight             -
v?mtp            (k e) d      self_attn.v_proj.weight             -
o?mtp            d (h e)      self_attn.o_proj.weight             -
q_norm?mtp       e            self_attn.q_norm.weight             -
k_norm?mtp       e            self_attn.k_norm.weight             -
router?mtp       x d          mlp.gate.weight                     -
expert_w1?mtp    x m d        mlp.experts.{x}.gate_proj.weight    -
expert_w3?mtp    x m d        mlp.experts.{x}.up_proj.weight      -
expert_w2?mtp    x d m        mlp.experts.{x}.down_proj.weight    -
shared_w1?mtp    s d          mlp.shared_expert.gate_proj.weight  -
shared_w3?mtp    s d          mlp.shared_expert.up_proj.weight    -
shared_w2?mtp    d s          mlp.shared_expert.down_proj.weight  -
shared_gate?mtp  one d        mlp.shared_expert_gate.weight       -
norm_1?mtp       d            input_layernorm.weight              -
norm_2_moe?mtp   d            post_attention_layernorm.weight     -
"""

MLX = """
logical        mlx: model.layers.{i}.
linear_conv_q  linear_attn.conv1d.weight#0 (lk ld) taps one
linear_conv_k  linear_attn.conv1d.weight#1 (lk ld) taps one
linear_conv_v  linear_attn.conv1d.weight#2 (lh le) taps one
linear_norm_1  input_layernorm.weight+1
norm_1         input_layernorm.weight+1
norm_2         post_attention_layernorm.weight+1
q_norm         self_attn.q_norm.weight+1
k_norm         self_attn.k_norm.weight+1
"""

MLX_MOE = """
norm_2_moe  post_attention_layernorm.weight+1
"""

MLX_NORM = """
logical  mlx
norm     model.norm.weight+1
"""

MCORE_LINEAR = """
logical         mcore: decoder.layers.{i}.self_attention.
linear_q        in_proj.weight.query
linear_k        in_proj.weight.key
linear_v        in_proj.weight.value
linear_z        in_proj.weight.z
linear_b        in_proj.weight.beta
linear_a        in_proj.weight.alpha
linear_conv_q   conv1d.weight.query
linear_conv_k   conv1d.weight.key
linear_conv_v   conv1d.weight.value
linear_dt_bias  dt_bias
linear_a_log    A_log
linear_norm     out_norm.weight-1
linear_o        out_proj.weight
linear_norm_1   in_proj.layer_norm_weight
"""

MCORE_ATTENTION = """
logical  mcore: decoder.layers.{i}.
q        self_attention.linear_qkv.weight#0/k (k g q e) d
k        self_attention.linear_qkv.weight#1/k
v        self_attention.linear_qkv.weight#2/k
o        self_attention.linear_proj.weight
norm_1   self_attention.linear_qkv.layer_norm_weight
"""

MCORE_MTP = """
logical         mcore: mtp.layers.0.
mtp_fc          eh_proj.weight
mtp_embed_norm  enorm.weight
mtp_norm_1      hnorm.weight
mtp_norm        final_layernorm.weight
"""

MCORE_LAYER = (
    MCORE_ATTENTION + qwen2_moe.MCORE_EXPERTS,
    qwen3_moe.MCORE_NORMS,
    qwen2_moe.MCORE_SHARED,
    qwen2_moe.MCORE_SHARED_GATE,
)

FAMILY: Family = replace(
    qwen2_moe.FAMILY,
    name="qwen3_next",
    title="Qwen 3 Next 80B-A3B",
    aliases=(),
    layouts=("hf", "hf-v5", "mlx", "mcore"),
    tables=(
        _hf.BEFORE,
        LINEAR + ATTENTION + qwen2_moe.FEED_FORWARD + qwen2_moe.SHARED + NORMS,
        _hf.AFTER,
        qwen2_moe.PACKED,
        qwen2_moe.MLX,
        MLX + MLX_MOE,
        MLX_NORM,
        MTP,
        MTP_LAYER,
        *qwen2_moe.MCORE_ENDS,
        MCORE_LINEAR,
        qwen2.MCORE_FEED_FORWARD,
        *MCORE_LAYER,
        MCORE_MTP,
        *(table.replace(*IN_MTP) for table in MCORE_LAYER),
    ),
    architecture="Qwen3NextForCausalLM",
    variants=(("linear", "full"), ("dense", "moe")),
    formulas=(("dd", "2 * hidden_size"),),
    kinds=(
        LayerKind("linear", kinds=("layer_types", "linear_attention")),
        LayerKind("full", every="full_attention_interval"),
        *qwen2_moe.FAMILY.kinds,
    ),
    constants={"one": 1, "g": 2},
    composite={"h": ("k", "q"), "lh": ("lk", "lg")},
    sizes={
        **qwen2_moe.FAMILY.sizes,
        "lk": ("linear_num_key_heads", ""),
        "ld": ("linear_key_head_dim", ""),
        "lh": ("linear_num_value_heads", ""),
        "le": ("linear_value_head_dim", ""),
        "taps": ("linear_conv_kernel_dim", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", "mcore"),
    config_signs=({"model_type": "qwen3_next"},),
    megatron=_megatron.QWEN3_NEXT,
    tiny=dict(qwen2_moe.FAMILY.tiny, lk=2, ld=5, lh=4, le=7, taps=3, dd=40, i=4, j=1),
)
