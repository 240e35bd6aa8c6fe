"""Mixtral: Mistral with experts.

Sources: transformers' ``modeling_mixtral.py`` and its ``conversion_mapping.py`` (``hf-v5``: what
transformers 5 holds in memory), mistral-inference's ``moe.py`` and ``transformer_layers.py``.
"""

from ckptctl.planner.layouts import Family, Tie

BEFORE = """
logical  axes  hf, hf-v5                  mistral
embed    v d   model.embed_tokens.weight  tok_embeddings.weight
"""

LAYER = """
logical  axes     hf: model.layers.{i}.                    hf-v5: model.layers.{i}.            mistral: layers.{i}.
q        (h r p) d  self_attn.q_proj.weight (h p r) d        self_attn.q_proj.weight (h p r) d   attention.wq.weight
k        (k r p) d  self_attn.k_proj.weight (k p r) d        self_attn.k_proj.weight (k p r) d   attention.wk.weight
v        (k e) d    self_attn.v_proj.weight                  self_attn.v_proj.weight             attention.wv.weight
o        d (h e)    self_attn.o_proj.weight                  self_attn.o_proj.weight             attention.wo.weight
router   x d        block_sparse_moe.gate.weight             mlp.gate.weight                     feed_forward.gate.weight
w1       x f d      block_sparse_moe.experts.{x}.w1.weight   mlp.experts.gate_up_proj#0.1        feed_forward.experts.{x}.w1.weight
w3       x f d      block_sparse_moe.experts.{x}.w3.weight   mlp.experts.gate_up_proj#1.1        feed_forward.experts.{x}.w3.weight
w2       x d f      block_sparse_moe.experts.{x}.w2.weight   mlp.experts.down_proj               feed_forward.experts.{x}.w2.weight
norm_1   d          input_layernorm.weight                   input_layernorm.weight              attention_norm.weight
norm_2   d          post_attention_layernorm.weight          post_attention_layernorm.weight     ffn_norm.weight
"""  # noqa: E501

AFTER = """
logical  axes  hf, hf-v5          mistral
norm     d     model.norm.weight  norm.weight
output   v d   lm_head.weight     output.weight
"""

FAMILY = Family(
    name="mixtral",
    title="Mixtral 8x7B, 8x22B",
    layouts=("hf", "hf-v5", "mistral"),
    tables=(BEFORE, LAYER, AFTER),
    architecture="MixtralForCausalLM",
    ties=(Tie("output", of="embed", stored_in=("mistral",)),),
    constants={"p": 2},
    composite={"e": ("r", "p")},
    sizes={
        "v": ("vocab_size", "vocab_size"),
        "d": ("hidden_size", "dim"),
        "f": ("intermediate_size", "hidden_dim"),
        "h": ("num_attention_heads", "n_heads"),
        "k": ("num_key_value_heads", "n_kv_heads"),
        "e": ("head_dim", "head_dim"),
        "x": ("num_local_experts", "moe.num_experts"),
        "i": ("num_hidden_layers", "n_layers"),
    },
    config_signs=({"model_type": "mixtral"},),
    tiny={"v": 24, "d": 16, "f": 12, "h": 8, "k": 4, "e": 4, "x": 4, "i": 2},
)
