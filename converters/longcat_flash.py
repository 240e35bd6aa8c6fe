"""LongCat Flash: each layer has two latent attentions, two dense networks and experts; MTP layer.

Zero experts (``z``) return their input and have no tensors. transformers 5.23 has rows for them in
memory, so it cannot load published files, and ``hf-v5`` is compared without zero experts. mlx-lm
splits the projection of the latent to keys and values, and transposes the keys' part. All programs
rotate neighboring pairs, so no axis is reordered.

Sources: transformers' ``modeling_longcat_flash.py`` and ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5, without the MTP layer), vLLM's ``longcat_flash_mtp.py``, mlx-lm's
``longcat_flash.py``.
"""

from ckptctl.planner.layouts import BLOCK_AXES, SIZES, Companion, Drop, Family, Tie

from . import _hf, _proofs, qwen2_moe

LAYER = """
logical      axes         hf, hf-v5: model.layers.{i}.
norm_1       a d          input_layernorm.{a}.weight
q_a          a ql d       self_attn.{a}.q_a_proj.weight
q_a_norm     a ql         self_attn.{a}.q_a_layernorm.weight
q_b          a (h qk) ql  self_attn.{a}.q_b_proj.weight
kv_a         a kr d       self_attn.{a}.kv_a_proj_with_mqa.weight
kv_a_norm    a kl         self_attn.{a}.kv_a_layernorm.weight
kv_b_k       a (h kn) kl  self_attn.{a}.kv_b_proj.weight#0/h
kv_b_v       a (h vd) kl  self_attn.{a}.kv_b_proj.weight#1/h
o            a d (h vd)   self_attn.{a}.o_proj.weight
norm_2       a d          post_attention_layernorm.{a}.weight
w1           a f d        mlps.{a}.gate_proj.weight
w3           a f d        mlps.{a}.up_proj.weight
w2           a d f        mlps.{a}.down_proj.weight
router       z d          mlp.router.classifier.weight
router_bias  z            mlp.router.e_score_correction_bias
expert_w1    x m d        mlp.experts.{x}.gate_proj.weight
expert_w3    x m d        mlp.experts.{x}.up_proj.weight
expert_w2    x d m        mlp.experts.{x}.down_proj.weight
"""

MLX = """
logical  mlx: model.layers.{i}.self_attn.
kv_b_k   {a}.embed_q.weight h kl kn
kv_b_v   {a}.unembed_out.weight h vd kl
"""

MTP = """
logical            axes       hf: model.mtp.
mtp_enorm?mtp      d          layers.0.enorm.m.weight
mtp_hnorm?mtp      d          layers.0.hnorm.m.weight
mtp_fc?mtp         d dd       layers.0.eh_proj.weight
mtp_norm_1?mtp     d          layers.0.input_layernorm.weight
mtp_q_a?mtp        ql d       layers.0.self_attn.q_a_proj.weight
mtp_q_a_norm?mtp   ql         layers.0.self_attn.q_a_layernorm.weight
mtp_q_b?mtp        (h qk) ql  layers.0.self_attn.q_b_proj.weight
mtp_kv_a?mtp       kr d       layers.0.self_attn.kv_a_proj_with_mqa.weight
mtp_kv_a_norm?mtp  kl         layers.0.self_attn.kv_a_layernorm.weight
mtp_kv_b?mtp       (h kv) kl  layers.0.self_attn.kv_b_proj.weight
mtp_o?mtp          d (h vd)   layers.0.self_attn.o_proj.weight
mtp_norm_2?mtp     d          layers.0.post_attention_layernorm.weight
mtp_w1?mtp         f d        layers.0.transformer_layer.mlp.gate_proj.weight
mtp_w3?mtp         f d        layers.0.transformer_layer.mlp.up_proj.weight
mtp_w2?mtp         d f        layers.0.transformer_layer.mlp.down_proj.weight
mtp_norm?mtp       d          norm.weight
"""

FAMILY = Family(
    name="longcat_flash",
    title="LongCat Flash",
    aliases=("longcat",),
    layouts=("hf", "hf-v5", "mlx"),
    tables=(_hf.BEFORE_V5, LAYER, qwen2_moe.PACKED, MLX, qwen2_moe.MLX, MTP, _hf.AFTER_V5),
    like={"mlx": "hf-v5"},
    architecture="LongcatFlashForCausalLM",
    drops=(Drop("hf", "model.mtp.embed_tokens.weight", "copy of the embedding", same_as="embed"),),
    ties=(Tie("output", of="embed"),),
    constants={"a": 2},
    companions=(Companion({"hf": (".weight", ".weight_scale_inv")}),),
    free=BLOCK_AXES,
    pinned=("router_bias",),
    unquantized=("router", "mtp_fc"),
    formulas=(
        ("z", "n_routed_experts + zero_expert_num"),
        ("qk", "qk_nope_head_dim + qk_rope_head_dim"),
        ("kr", "kv_lora_rank + qk_rope_head_dim"),
        ("kv", "qk_nope_head_dim + v_head_dim"),
        ("dd", "2 * hidden_size"),
    ),
    sizes={
        **{axis: SIZES[axis] for axis in "vdh"},
        "f": ("ffn_hidden_size", ""),
        "m": ("expert_ffn_hidden_size", ""),
        "x": ("n_routed_experts", ""),
        "ql": ("q_lora_rank", ""),
        "kl": ("kv_lora_rank", ""),
        "kn": ("qk_nope_head_dim", ""),
        "vd": ("v_head_dim", ""),
        "i": ("num_layers", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx"),
    config_signs=({"model_type": "longcat_flash"},),
    tiny=dict(
        v=24,
        d=16,
        f=12,
        m=10,
        h=4,
        x=3,
        z=8,
        ql=9,
        kl=5,
        kn=6,
        vd=7,
        qk=11,
        kr=13,
        kv=15,
        dd=32,
        i=2,
        down=4,
        across=8,
    ),
)
