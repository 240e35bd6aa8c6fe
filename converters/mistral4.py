"""The text model of Mistral Small 4: latent attention, routed experts and a shared expert.

transformers stacks the experts of a layer, Mistral stores them separately. All programs rotate
neighboring pairs, so no axis is reordered. mlx-lm splits the projection of the latent to keys and
values, and transposes the keys' part. With its vision tower it is ``mistral4_vision``.

Sources: transformers' ``modeling_mistral4.py`` and ``convert_mistral4_weight_to_hf.py``, vLLM's
``mistral_large_3.py`` (``mistral``: dense layers), mlx-lm's ``mistral4.py``; Megatron-Core's
``multi_latent_attention.py`` (``mcore``), to whose queries the scale by position must be added.
"""

from ckptctl.planner.layouts import PRESENT, Family, ParamsStyle, Tie, get_facts

from . import _llm_compressor, _proofs, deepseek_v2, mistral, mixtral, qwen2_moe

LAYER = """
logical                   axes       hf: model.layers.{i}.                mistral: layers.{i}.
norm_1                    d          input_layernorm.weight               attention_norm.weight
q@q                       (h qk) d   self_attn.q_proj.weight              attention.wq.weight
q_a@qlora                 ql d       self_attn.q_a_proj.weight            attention.wq_a.weight
q_a_bias@qlora?attention  ql         self_attn.q_a_proj.bias              -
q_a_norm@qlora            ql         self_attn.q_a_layernorm.weight       attention.q_a_norm.weight
q_b@qlora                 (h qk) ql  self_attn.q_b_proj.weight            attention.wq_b.weight
kv_a                      kr d       self_attn.kv_a_proj_with_mqa.weight  attention.wkv_a_with_mqa.weight
kv_a_bias?attention       kr         self_attn.kv_a_proj_with_mqa.bias    -
kv_a_norm                 kl         self_attn.kv_a_layernorm.weight      attention.kv_a_norm.weight
kv_b_k                    (h kn) kl  self_attn.kv_b_proj.weight#0/h       attention.wkv_b.weight#0/h
kv_b_v                    (h ov) kl  self_attn.kv_b_proj.weight#1/h       attention.wkv_b.weight#1/h
o                         d (h ov)   self_attn.o_proj.weight              attention.wo.weight
o_bias?attention          d          self_attn.o_proj.bias                -
norm_2@dense              d          post_attention_layernorm.weight      ffn_norm.weight
norm_2_moe@moe            d          post_attention_layernorm.weight      ffn_norm.weight
w1@dense                  f d        mlp.gate_proj.weight                 feed_forward.w1.weight
w3@dense                  f d        mlp.up_proj.weight                   feed_forward.w3.weight
w2@dense                  d f        mlp.down_proj.weight                 feed_forward.w2.weight
router@moe                x d        mlp.gate.weight                      gate.weight
expert_w1@moe             x m d      mlp.experts.gate_up_proj#0.1         experts.{x}.w1.weight
expert_w3@moe             x m d      mlp.experts.gate_up_proj#1.1         experts.{x}.w3.weight
expert_w2@moe             x d m      mlp.experts.down_proj                experts.{x}.w2.weight
shared_w1@moe             s d        mlp.shared_experts.gate_proj.weight  shared_experts.w1.weight
shared_w3@moe             s d        mlp.shared_experts.up_proj.weight    shared_experts.w3.weight
shared_w2@moe             d s        mlp.shared_experts.down_proj.weight  shared_experts.w2.weight
"""  # noqa: E501

MLX = """
logical    mlx: model.layers.{i}.
kv_b_k     self_attn.embed_q.weight h kl kn
kv_b_v     self_attn.unembed_out.weight h ov kl
expert_w1  mlp.switch_mlp.gate_proj.weight
expert_w3  mlp.switch_mlp.up_proj.weight
expert_w2  mlp.switch_mlp.down_proj.weight
"""

MCORE = """
logical  mcore: decoder.layers.{i}.
kv_b_k   self_attention.linear_kv_up_proj.weight#0/h
kv_b_v   self_attention.linear_kv_up_proj.weight#1/h
"""

STYLE = ParamsStyle(
    owner="Mistral's",
    text=(
        mistral.NORM,
        mistral.THETA,
        *get_facts("rope.factor", "rope.beta_fast", "rope.beta_slow", "num_experts_per_tok"),
    ),
    silent=mistral.STYLE.silent,
    translated=False,
)

SIZES = {
    "v": ("vocab_size", "vocab_size"),
    "d": ("hidden_size", "dim"),
    "f": ("intermediate_size", "hidden_dim"),
    "m": ("moe_intermediate_size", "moe.expert_hidden_dim"),
    "h": ("num_attention_heads", "n_heads"),
    "x": ("n_routed_experts", "moe.num_experts"),
    "ql": ("q_lora_rank", "q_lora_rank"),
    "kl": ("kv_lora_rank", "kv_lora_rank"),
    "kn": ("qk_nope_head_dim", "qk_nope_head_dim"),
    "ov": ("v_head_dim", "v_head_dim"),
    "i": ("num_hidden_layers", "n_layers"),
}

FAMILY = Family(
    name="mistral4",
    title="Mistral Small 4 (text)",
    aliases=("mistral_4",),
    layouts=("hf", "llm-compressor", "mistral", "mlx", "mcore", "mcore-local"),
    tables=(
        mixtral.BEFORE,
        LAYER,
        _llm_compressor.build_table("model.layers.{i}.mlp.experts"),
        MLX,
        mixtral.AFTER,
        *qwen2_moe.MCORE_ENDS,
        deepseek_v2.MCORE_LATENT,
        MCORE,
        qwen2_moe.MCORE_FEED_FORWARD,
        qwen2_moe.MCORE_SHARED,
        deepseek_v2.MCORE_LOCAL,
    ),
    like={"mcore-local": "mcore"},
    architecture="Mistral4ForCausalLM",
    ties=(Tie("output", of="embed"),),
    variants=(("dense", "moe"), ("q", "qlora")),
    sizes=SIZES,
    formulas=deepseek_v2.FAMILY.formulas,
    kinds=deepseek_v2.FAMILY.kinds,
    proofs=_proofs.get_proofs("hf", "llm-compressor", "mlx", "mcore", "mcore-local"),
    sources={"mistral": "transformers' convert_mistral4_weight_to_hf.py"},
    config_signs=({"model_type": "mistral4"},),
    params_signs=({"kv_lora_rank": PRESENT, "vision_encoder": None},),
    params=STYLE,
    tiny=dict(v=24, d=16, f=12, m=6, s=8, h=4, x=4, qk=6, ql=10, kl=5, kr=7, kn=9, ov=3, i=2),
)
