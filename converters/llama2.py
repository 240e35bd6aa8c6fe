"""Llama 1 and 2, CodeLlama, and other models of transformers' type ``llama``.

Sources: Meta's ``llama/model.py``, transformers' ``modeling_llama.py`` and
``convert_llama_weights_to_hf.py``, torchtune's ``models/convert_weights.py``, torchtitan's
``models/llama3/state_dict_adapter.py``; for ``mcore`` Megatron-Core's ``models/gpt`` and
``transformer/attention.py``, which rotates halves.
"""

from ckptctl.planner.layouts import Drop, Family, Tie

from . import _megatron, _proofs

BEFORE = """
logical  axes  hf                         meta                   torchtune
embed    v d*  model.embed_tokens.weight  tok_embeddings.weight  tok_embeddings.weight
"""

LAYER = """
logical      axes        hf: model.layers.{i}.              meta: layers.{i}.       torchtune: layers.{i}.
q            (h* r p) d  self_attn.q_proj.weight (h p r) d  attention.wq.weight     attn.q_proj.weight
q_bias?qkv   (h* r p)    self_attn.q_proj.bias (h p r)      -                       -
k            (k* r p) d  self_attn.k_proj.weight (k p r) d  attention.wk.weight     attn.k_proj.weight
k_bias?qkv   (k* r p)    self_attn.k_proj.bias (k p r)      -                       -
v            (k* e) d    self_attn.v_proj.weight            attention.wv.weight     attn.v_proj.weight
v_bias?qkv   (k* e)      self_attn.v_proj.bias              -                       -
o            d (h* e)    self_attn.o_proj.weight            attention.wo.weight     attn.output_proj.weight
o_bias?      d           self_attn.o_proj.bias              -                       -
w1           f* d        mlp.gate_proj.weight               feed_forward.w1.weight  mlp.w1.weight
w1_bias?mlp  f*          mlp.gate_proj.bias                 -                       -
w3           f* d        mlp.up_proj.weight                 feed_forward.w3.weight  mlp.w3.weight
w3_bias?mlp  f*          mlp.up_proj.bias                   -                       -
w2           d f*        mlp.down_proj.weight               feed_forward.w2.weight  mlp.w2.weight
w2_bias?mlp  d           mlp.down_proj.bias                 -                       -
norm_1       d           input_layernorm.weight             attention_norm.weight   sa_norm.scale
norm_2       d           post_attention_layernorm.weight    ffn_norm.weight         mlp_norm.scale
"""  # noqa: E501

AFTER = """
logical  axes  hf                 meta           torchtune
norm     d     model.norm.weight  norm.weight    norm.scale
output   v* d  lm_head.weight     output.weight  output.weight
"""

MCORE_BEFORE = """
logical  mcore
embed    embedding.word_embeddings.weight
"""

MCORE_ATTENTION = """
logical  mcore: decoder.layers.{i}.
q        self_attention.linear_qkv.weight#0/k (h p r) d
q_bias   self_attention.linear_qkv.bias#0/k (h p r)
k        self_attention.linear_qkv.weight#1/k (k p r) d
k_bias   self_attention.linear_qkv.bias#1/k (k p r)
v        self_attention.linear_qkv.weight#2/k
v_bias   self_attention.linear_qkv.bias#2/k
o        self_attention.linear_proj.weight
o_bias   self_attention.linear_proj.bias
norm_1   self_attention.linear_qkv.layer_norm_weight
"""

MCORE_FEED_FORWARD = """
logical  mcore: decoder.layers.{i}.
w1       mlp.linear_fc1.weight#0
w3       mlp.linear_fc1.weight#1
w2       mlp.linear_fc2.weight
norm_2   mlp.linear_fc1.layer_norm_weight
"""

MCORE_BIASES = """
w1_bias  mlp.linear_fc1.bias#0
w3_bias  mlp.linear_fc1.bias#1
w2_bias  mlp.linear_fc2.bias
"""

MCORE_AFTER = """
logical  mcore
norm     decoder.final_layernorm.weight
output   output_layer.weight
"""

MCORE = (MCORE_BEFORE, MCORE_ATTENTION, MCORE_FEED_FORWARD + MCORE_BIASES, MCORE_AFTER)

GGUF_BEFORE = """
logical  gguf
embed    token_embd.weight
"""

GGUF_ATTENTION = """
logical  gguf: blk.{i}.
q        attn_q.weight
q_bias   attn_q.bias
k        attn_k.weight
k_bias   attn_k.bias
v        attn_v.weight
v_bias   attn_v.bias
o        attn_output.weight
"""

GGUF_OUTPUT_BIAS = """
logical  gguf: blk.{i}.
o_bias   attn_output.bias
"""

GGUF_FEED_FORWARD = """
logical  gguf: blk.{i}.
w1       ffn_gate.weight
w3       ffn_up.weight
w2       ffn_down.weight
"""

GGUF_NORMS = """
logical  gguf: blk.{i}.
norm_1   attn_norm.weight
norm_2   ffn_norm.weight
"""

GGUF_AFTER = """
logical  gguf
norm     output_norm.weight
output   output.weight
"""

GGUF_ENDS = (GGUF_BEFORE, GGUF_AFTER)
GGUF = (*GGUF_ENDS, GGUF_ATTENTION, GGUF_FEED_FORWARD, GGUF_NORMS)

TITAN_03_LAYER = """
logical  torchtitan@0.3: layers.{i}.
q        attention.qkv_linear.wq.weight
k        attention.qkv_linear.wk.weight
v        attention.qkv_linear.wv.weight
"""

TITAN_03 = """
logical  torchtitan@0.3
output   lm_head.weight
"""

FREQUENCIES = "rotary frequencies are computed from rope_theta"

FAMILY = Family(
    name="llama2",
    title="Llama 1 and 2, CodeLlama",
    aliases=("llama", "llama1", "codellama"),
    layouts=("hf", "meta", "torchtune", "torchtitan@0.2", "torchtitan@0.3", "mlx", "gguf", "mcore"),
    tables=(BEFORE, LAYER, AFTER, TITAN_03_LAYER, TITAN_03, *GGUF, GGUF_OUTPUT_BIAS, *MCORE),
    like={"torchtitan@0.2": "meta", "torchtitan@0.3": "meta"},
    architecture="LlamaForCausalLM",
    drops=(
        Drop("meta", "rope.freqs", FREQUENCIES),
        Drop("meta", "layers.{i}.attention.inner_attention.rope.freqs", FREQUENCIES),
        Drop("torchtitan@0.2", "freqs_cis", FREQUENCIES),
        Drop("gguf", "rope_freqs.weight", "rotary frequencies are computed from config.json"),
        Drop("hf", "model.rotary_emb.inv_freq", FREQUENCIES),
        Drop("hf", "model.layers.{i}.self_attn.rotary_emb.inv_freq", FREQUENCIES),
    ),
    ties=(Tie("output", of="embed", stored_in=("meta", "torchtitan@0.2", "torchtitan@0.3")),),
    constants={"p": 2},
    composite={"e": ("r", "p"), "h": ("k", "q")},
    sizes={
        "v": ("vocab_size", "vocab_size"),
        "d": ("hidden_size", "dim"),
        "f": ("intermediate_size", "hidden_dim"),
        "h": ("num_attention_heads", "n_heads"),
        "k": ("num_key_value_heads", "n_kv_heads"),
        "e": ("head_dim", "head_dim"),
        "i": ("num_hidden_layers", "n_layers"),
    },
    repeated=("k",),
    proofs=_proofs.get_proofs(
        "hf", "meta", "torchtune", "torchtitan@0.2", "torchtitan@0.3", "mlx", "gguf", "mcore"
    ),
    config_signs=({"model_type": "llama"},),
    megatron=_megatron.LLAMA,
    params_signs=({"moe": None, "hidden_dim": None, "vision_chunk_size": None},),
    presets=(
        (
            {},
            {
                "model_type": "llama",
                "hidden_act": "silu",
                "rope_theta": 10000.0,
                "max_position_embeddings": 4096,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        ),
        ({"rope_theta": 1000000.0}, {"max_position_embeddings": 16384}),
    ),
    tiny=dict(v=24, d=16, f=12, h=8, k=4, e=4, i=2),
)
