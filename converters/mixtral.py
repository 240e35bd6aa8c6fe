"""Mixtral: Mistral with experts.

Sources: transformers' ``modeling_mixtral.py``, its ``conversion_mapping.py`` (``hf-v5``: in-memory
names of transformers 5) and ``convert_mixtral_weights_to_hf.py`` (``mistral@2023``: the
``consolidated.NN.pt`` of the first release, in which the experts of a layer are one matrix),
mistral-inference's ``moe.py`` and ``transformer_layers.py``, mbridge's ``mixtral.py`` (``mcore``).
"""

from dataclasses import replace

from ckptctl.planner.layouts import FACTS, PRESENT, Family, ParamsStyle, Tie

from . import _megatron, _proofs, llama2, mistral, qwen2_moe

BEFORE = """
logical  axes  hf                         mistral
embed    v d   model.embed_tokens.weight  tok_embeddings.weight
"""

LAYER = """
logical  axes       hf: model.layers.{i}.                   mistral: layers.{i}.
q        (h r p) d  self_attn.q_proj.weight (h p r) d       attention.wq.weight
k        (k r p) d  self_attn.k_proj.weight (k p r) d       attention.wk.weight
v        (k e) d    self_attn.v_proj.weight                 attention.wv.weight
o        d (h e)    self_attn.o_proj.weight                 attention.wo.weight
router   x d        block_sparse_moe.gate.weight            feed_forward.gate.weight
w1       x f d      block_sparse_moe.experts.{x}.w1.weight  feed_forward.experts.{x}.w1.weight
w3       x f d      block_sparse_moe.experts.{x}.w3.weight  feed_forward.experts.{x}.w3.weight
w2       x d f      block_sparse_moe.experts.{x}.w2.weight  feed_forward.experts.{x}.w2.weight
norm_1   d          input_layernorm.weight                  attention_norm.weight
norm_2   d          post_attention_layernorm.weight         ffn_norm.weight
"""

PACKED = """
logical  hf-v5: model.layers.{i}.      mistral@2023: layers.{i}.
router   mlp.gate.weight               block_sparse_moe.gate.weight
w1       mlp.experts.gate_up_proj#0.1  block_sparse_moe.w1 (x f) d
w3       mlp.experts.gate_up_proj#1.1  block_sparse_moe.w3 (x f) d
w2       mlp.experts.down_proj         block_sparse_moe.w2 (x f) d
"""

MLX = """
logical  mlx: model.layers.{i}.block_sparse_moe.
w1       switch_mlp.gate_proj.weight
w3       switch_mlp.up_proj.weight
w2       switch_mlp.down_proj.weight
"""

GGUF = """
logical  gguf: blk.{i}.
q        attn_q.weight
k        attn_k.weight
v        attn_v.weight
o        attn_output.weight
router   ffn_gate_inp.weight
w1       ffn_gate_exps.weight
w3       ffn_up_exps.weight
w2       ffn_down_exps.weight
norm_1   attn_norm.weight
norm_2   ffn_norm.weight
"""

AFTER = """
logical  axes  hf                 mistral
norm     d     model.norm.weight  norm.weight
output   v d   lm_head.weight     output.weight
"""

MCORE = """
logical  mcore: decoder.layers.{i}.
q        self_attention.linear_qkv.weight#0/k (h p r) d
k        self_attention.linear_qkv.weight#1/k (k p r) d
v        self_attention.linear_qkv.weight#2/k
o        self_attention.linear_proj.weight
router   mlp.router.weight
w1       mlp.experts.experts.linear_fc1.weight#0.1
w3       mlp.experts.experts.linear_fc1.weight#1.1
w2       mlp.experts.experts.linear_fc2.weight
norm_1   self_attention.linear_qkv.layer_norm_weight
norm_2   pre_mlp_layernorm.weight
"""

MCORE_LOCAL = qwen2_moe.MCORE_LOCAL.replace("norm_2_moe", "norm_2")

STYLE: ParamsStyle = replace(
    mistral.STYLE,
    text=(
        replace(mistral.NORM, default=1e-5),
        replace(mistral.THETA, default=1000000.0),
        replace(mistral.WINDOW, default=None),
        mistral.LENGTH,
        replace(FACTS["num_experts_per_tok"], default=2, absent=2),
    ),
)

FAMILY = Family(
    name="mixtral",
    title="Mixtral 8x7B, 8x22B",
    aliases=("mixtral_8x7b", "mixtral_8x22b"),
    layouts=("hf", "hf-v5", "mistral", "mistral@2023", "mlx", "gguf", "mcore", "mcore-local"),
    tables=(
        BEFORE,
        LAYER,
        AFTER,
        PACKED,
        MLX,
        *llama2.GGUF_ENDS,
        GGUF,
        *qwen2_moe.MCORE_ENDS,
        MCORE,
        MCORE_LOCAL,
    ),
    like={"hf-v5": "hf", "mistral@2023": "mistral", "mcore-local": "mcore"},
    architecture="MixtralForCausalLM",
    ties=(Tie("output", of="embed", stored_in=("mistral", "mistral@2023")),),
    constants={"p": 2},
    composite={"e": ("r", "p"), "h": ("k", "q")},
    sizes={
        **mistral.FAMILY.sizes,
        "x": ("num_local_experts", "moe.num_experts"),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mistral", "mlx", "mcore", "mcore-local"),
    sources={"gguf": "llama.cpp"},
    config_signs=({"model_type": "mixtral"},),
    megatron=_megatron.MIXTRAL,
    params_signs=({"moe": PRESENT, "multiple_of": None},),
    params=STYLE,
    presets=(
        (
            {},
            mistral.BEYOND_PARAMS | {"model_type": "mixtral", "rope_theta": 1000000.0},
        ),
    ),
    tiny=dict(v=24, d=16, f=12, h=8, k=4, e=4, x=4, i=2),
)
