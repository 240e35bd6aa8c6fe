"""DeepSeek-V3 and R1, Kimi K2, Moonlight: latent attention, experts, multi-token prediction.

Sources: transformers' ``modeling_deepseek_v3.py``, DeepSeek's ``inference/convert.py`` and
``model.py`` (``deepseek``) and ``README_WEIGHTS.md``, torchtitan's ``models/deepseek_v3`` (0.2 and
0.3), Megatron-Core's ``multi_latent_attention.py`` and ``multi_token_prediction.py`` (``mcore``).
All programs rotate neighboring pairs, so no axis is reordered. mlx-lm's ``deepseek_v3.py`` splits
the projection of the latent to keys and values, and transposes the keys' part. Only ``hf``,
``torchtitan@0.3`` and ``mcore`` keep the MTP layers. In ``hf``, MTP layers repeat the embedding and
the head. In all three, the input of ``eh_proj`` is the embedding, then the hidden state.
"""

from dataclasses import replace

from ckptctl.planner.layouts import BLOCK_AXES, Companion, Drop, Family, Shift, Tie

from . import _megatron, _proofs, deepseek_v2, qwen2_moe

BEFORE = """
logical  deepseek      torchtitan@0.2, torchtitan@0.3
embed    embed.weight  tok_embeddings.weight
"""

SPLIT = """
logical  hf, hf-v5, deepseek, torchtitan@0.2, torchtitan@0.3, mcore, mcore-local: model.layers.{i}.
kv_b     -
"""

LATENT = """
logical  axes        hf, hf-v5: model.layers.{i}.self_attn.
kv_b_k   (h* kn) kl  kv_b_proj.weight#0/h
kv_b_v   (h* vd) kl  kv_b_proj.weight#1/h
"""

LATENT_MLX = """
logical  mlx: model.layers.{i}.self_attn.
kv_b_k   embed_q.weight h kl kn
kv_b_v   unembed_out.weight h vd kl
"""

LATENT_ELSEWHERE = """
logical  deepseek: layers.{i}.attn.  torchtitan@0.2, torchtitan@0.3: layers.{i}.attention.  mcore: decoder.layers.{i}.self_attention.
kv_b_k   wkv_b.weight#0/h            wkv_b.weight#0/h                                       linear_kv_up_proj.weight#0/h
kv_b_v   wkv_b.weight#1/h            wkv_b.weight#1/h                                       linear_kv_up_proj.weight#1/h
"""  # noqa: E501

CORRECTION = """
logical          axes  hf, hf-v5: model.layers.{i}.
router_bias@moe  x     mlp.gate.e_score_correction_bias
"""

MCORE_CORRECTION = """
logical      mcore: decoder.layers.{i}.
router_bias  mlp.router.expert_bias
"""

DEEPSEEK = """
logical      deepseek: layers.{i}.
norm_1       attn_norm.weight
q            attn.wq.weight
q_a          attn.wq_a.weight
q_a_norm     attn.q_norm.weight
q_b          attn.wq_b.weight
kv_a         attn.wkv_a.weight
kv_a_norm    attn.kv_norm.weight
kv_b         attn.wkv_b.weight
o            attn.wo.weight
norm_2       ffn_norm.weight
norm_2_moe   ffn_norm.weight
w1           ffn.w1.weight
w3           ffn.w3.weight
w2           ffn.w2.weight
router       ffn.gate.weight
router_bias  ffn.gate.bias
expert_w1    ffn.experts.{x}.w1.weight
expert_w3    ffn.experts.{x}.w3.weight
expert_w2    ffn.experts.{x}.w2.weight
shared_w1    ffn.shared_experts.w1.weight
shared_w3    ffn.shared_experts.w3.weight
shared_w2    ffn.shared_experts.w2.weight
"""

TITAN = """
logical      torchtitan@0.2, torchtitan@0.3: layers.{i}.
norm_1       attention_norm.weight
q            attention.wq.weight
q_a          attention.wq_a.weight
q_a_norm     attention.q_norm.weight
q_b          attention.wq_b.weight
kv_a         attention.wkv_a.weight
kv_a_norm    attention.kv_norm.weight
kv_b         attention.wkv_b.weight
o            attention.wo.weight
norm_2       ffn_norm.weight
norm_2_moe   ffn_norm.weight
w1           feed_forward.w1.weight
w3           feed_forward.w3.weight
w2           feed_forward.w2.weight
router       moe.router.gate.weight
router_bias  moe.expert_bias_E
expert_w1    moe.routed_experts.inner_experts.w1_EFD
expert_w3    moe.routed_experts.inner_experts.w3_EFD
expert_w2    moe.routed_experts.inner_experts.w2_EDF
shared_w1    moe.shared_experts.w1.weight
shared_w3    moe.shared_experts.w3.weight
shared_w2    moe.shared_experts.w2.weight
"""

TITAN_02 = """
logical      torchtitan@0.2: layers.{i}.
router_bias  moe.expert_bias
expert_w1    moe.experts.w1
expert_w3    moe.experts.w3
expert_w2    moe.experts.w2
"""

AFTER = """
logical  deepseek     torchtitan@0.2  torchtitan@0.3
norm     norm.weight  norm.weight     norm.weight
output   head.weight  output.weight   lm_head.weight
"""

MTP = """
logical   axes  hf: model.layers.{j}.    torchtitan@0.3: mtp_layers.{j}.
enorm     d     enorm.weight             enorm.weight
hnorm     d     hnorm.weight             hnorm.weight
eh_proj   d dd  eh_proj.weight           eh_proj.weight
mtp_norm  d     shared_head.norm.weight  mtp_norm.weight
"""

MTP_LAYER = deepseek_v2.LAYER.replace("hf, hf-v5:", "hf:").replace("{i}", "{j}")
MTP_CORRECTION = CORRECTION.replace("hf, hf-v5:", "hf:").replace("{i}", "{j}")
MTP_TITAN = TITAN.replace("torchtitan@0.2, ", "").replace("layers.{i}", "mtp_layers.{j}")

MCORE_MTP = """
logical   mcore: mtp.layers.{j}.
enorm     enorm.weight
hnorm     hnorm.weight
eh_proj   eh_proj.weight
mtp_norm  final_layernorm.weight
"""

IN_MTP = "decoder.layers.{i}.", "mtp.layers.{j}.transformer_layer."

MCORE_MTP_ATTENTION = deepseek_v2.MCORE.replace(*IN_MTP)
MCORE_MTP_FEED_FORWARD = qwen2_moe.MCORE_FEED_FORWARD.replace(*IN_MTP)
MCORE_MTP_SHARED = qwen2_moe.MCORE_SHARED.replace(*IN_MTP)
MCORE_MTP_LOCAL = deepseek_v2.MCORE_LOCAL.replace(*IN_MTP)
MCORE_MTP_CORRECTION = MCORE_CORRECTION.replace(*IN_MTP)

REPEATED = (
    Drop("hf", "model.layers.{j}.embed_tokens.weight", "copy of the embedding", same_as="embed"),
    Drop(
        "hf",
        "model.layers.{j}.shared_head.head.weight",
        "copy of the output head",
        same_as="output",
    ),
)

FAMILY: Family = replace(
    deepseek_v2.FAMILY,
    name="deepseek_v3",
    title="DeepSeek-V3, R1, Kimi K2, Moonlight",
    aliases=("deepseek_r1", "kimi_k2"),
    layouts=(
        *("hf", "hf-v5", "deepseek", "torchtitan@0.2", "torchtitan@0.3"),
        *("mlx", "mcore", "mcore-local"),
    ),
    tables=(
        deepseek_v2.BEFORE,
        BEFORE,
        deepseek_v2.LAYER,
        CORRECTION,
        qwen2_moe.PACKED,
        DEEPSEEK,
        TITAN,
        TITAN_02,
        MTP,
        MTP_LAYER,
        MTP_CORRECTION,
        MTP_TITAN,
        deepseek_v2.AFTER,
        AFTER,
        *qwen2_moe.MCORE_ENDS,
        deepseek_v2.MCORE,
        qwen2_moe.MCORE_FEED_FORWARD,
        qwen2_moe.MCORE_SHARED,
        MCORE_CORRECTION,
        MCORE_MTP,
        MCORE_MTP_ATTENTION,
        MCORE_MTP_FEED_FORWARD,
        MCORE_MTP_SHARED,
        MCORE_MTP_CORRECTION,
        deepseek_v2.MCORE_LOCAL,
        MCORE_MTP_LOCAL,
        SPLIT,
        LATENT,
        LATENT_MLX,
        LATENT_ELSEWHERE,
        qwen2_moe.MLX,
    ),
    like={"mcore-local": "mcore", "mlx": "hf-v5"},
    architecture="DeepseekV3ForCausalLM",
    drops=(
        *REPEATED,
        Drop(
            "hf",
            "model.layers.{i}.self_attn.rotary_emb.inv_freq",
            "rotary frequencies are computed from rope_theta",
        ),
    ),
    ties=(
        Tie(
            "output", of="embed", stored_in=("deepseek", "torchtitan@0.2", "torchtitan@0.3", "mlx")
        ),
    ),
    companions=(
        Companion({"hf": (".weight", ".weight_scale_inv"), "deepseek": (".weight", ".scale")}),
    ),
    free=BLOCK_AXES,
    pinned=("router_bias",),
    unquantized=("eh_proj",),
    sizes={**deepseek_v2.FAMILY.sizes, "kn": ("qk_nope_head_dim", "")},
    formulas=(*deepseek_v2.FAMILY.formulas, ("dd", "2 * hidden_size")),
    kinds=deepseek_v2.FAMILY.kinds,
    shifts=(Shift("hf", index="j", into="i"),),
    proofs=_proofs.get_proofs(
        "hf", "hf-v5", "deepseek", "torchtitan@0.2", "torchtitan@0.3", "mlx", "mcore", "mcore-local"
    ),
    config_signs=({"model_type": "deepseek_v3"}, {"model_type": "kimi_k2"}),
    megatron=_megatron.DEEPSEEK_V3,
    tiny=dict(deepseek_v2.FAMILY.tiny, kn=6, dd=32, down=4, across=8),
)
