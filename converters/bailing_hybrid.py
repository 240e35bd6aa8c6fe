"""Ling 3: Kimi delta attention, every sixth layer gated latent attention; experts.

In published files, the output of delta attention is ``o_proj``, that of latent attention ``dense``.
transformers saves ``dense`` for both (``hf-fresh``), and reads both. Without a head, it calls the
embedding ``embed_tokens``, and does not read ``word_embeddings``.

mlx-lm splits the projection of the latent to keys and values, and transposes the keys' part.

Sources: transformers' ``modeling_bailing_hybrid.py`` and ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5), mlx-lm's ``bailing_moe_v3.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, LayerKind

from . import _hf, _proofs, kimi_linear, qwen2_moe

BEFORE = """
logical  axes  hf                            hf-v5
embed    v d   model.word_embeddings.weight  model.embed_tokens.weight
"""

GATES = """
linear_a_log@linear  lh         A_log
linear_f@linear      (lh le) d  f_proj.weight
gate                 ga d       g_proj.weight
"""

OUTPUT = """
linear_o@linear  d oa  o_proj.weight
o@full           d oa  dense.weight
"""

FEED_FORWARD = """
norm_1           d    input_layernorm.weight
norm_2           d    post_attention_layernorm.weight
router_bias@moe  x    mlp.gate.expert_bias
shared_w1@moe    s d  mlp.shared_experts.gate_proj.weight
shared_w3@moe    s d  mlp.shared_experts.up_proj.weight
shared_w2@moe    d s  mlp.shared_experts.down_proj.weight
"""

FRESH = """
logical   hf-fresh: model.layers.{i}.attention.
linear_o  dense.weight
"""

V5 = """
linear_f         forget_gate.f_proj.weight
linear_o         o_proj.weight
o                o_proj.weight
"""

V5_BIAS = """
logical      hf-v5: model.layers.{i}.
router_bias  mlp.gate.e_score_correction_bias
"""

MLX = """
logical        mlx: model.layers.{i}.attention.
linear_conv_q  q_conv1d.weight (lh le) taps one
linear_conv_k  k_conv1d.weight (lh le) taps one
linear_conv_v  v_conv1d.weight (lh le) taps one
kv_b_k         embed_q.weight h kl kn
kv_b_v         unembed_out.weight h vd kl
"""

ATTENTION = kimi_linear.DELTA + GATES + kimi_linear.FULL

FAMILY: Family = replace(
    kimi_linear.FAMILY,
    name="bailing_hybrid",
    title="Ling 3",
    aliases=("ling3", "bailing_moe_v3"),
    layouts=("hf", "hf-v5", "hf-fresh", "mlx"),
    tables=(
        BEFORE,
        "logical  axes  hf: model.layers.{i}.attention." + ATTENTION + OUTPUT,
        "logical  axes  hf-v5: model.layers.{i}.self_attn." + ATTENTION,
        kimi_linear.V5_DELTA + V5,
        "logical  axes  hf: model.layers.{i}." + qwen2_moe.FEED_FORWARD + FEED_FORWARD,
        FRESH,
        V5_BIAS,
        MLX,
        qwen2_moe.PACKED,
        qwen2_moe.MLX,
        _hf.AFTER,
    ),
    like={"hf-v5": "hf", "hf-fresh": "hf"},
    prefixes={"hf-fresh-base": {"model.word_embeddings.": "embed_tokens."}},
    architecture="BailingHybridForCausalLM",
    constants={"one": 1},
    kinds=(
        LayerKind("linear", kinds=("layer_types", "linear_attention")),
        LayerKind("full", every="layer_group_size"),
        *kimi_linear.FAMILY.kinds[1:],
    ),
    formulas=kimi_linear.FAMILY.formulas[:-1],
    sizes=dict(kimi_linear.FAMILY.sizes)
    | {
        "lh": ("linear_num_heads|num_attention_heads", ""),
        "le": ("linear_head_dim|head_dim", ""),
        "taps": ("linear_conv_kernel_dim|short_conv_kernel_size", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "hf-fresh", "mlx"),
    shown_by=("router",),
    config_signs=({"model_type": "bailing_hybrid"},),
)
