"""GPT-2: learned positions, LayerNorm, queries, keys and values in one tensor.

In ``hf``, linear layers are ``[in, out]`` (transformers' ``Conv1D``), so they are neither quantized
nor adapted. Published files do not have the prefix ``transformer.``.

Sources: transformers' ``modeling_gpt2.py``, mlx-lm's ``gpt2.py``.
"""

from ckptctl.planner.layouts import Drop, Family, Tie

from . import _proofs

BEFORE = """
logical   axes   hf: transformer.  mlx: model.
embed     v d    wte.weight        wte.weight
position  pos d  wpe.weight        wpe.weight
"""

LAYER = """
logical      axes     hf: transformer.h.{i}.          mlx: model.h.{i}.
norm_1       d        ln_1.weight                     ln_1.weight
norm_1_bias  d        ln_1.bias                       ln_1.bias
q            (h e) d  attn.c_attn.weight#0.1 d (h e)  attn.c_attn.weight#0
k            (h e) d  attn.c_attn.weight#1.1 d (h e)  attn.c_attn.weight#1
v            (h e) d  attn.c_attn.weight#2.1 d (h e)  attn.c_attn.weight#2
q_bias       (h e)    attn.c_attn.bias#0              attn.c_attn.bias#0
k_bias       (h e)    attn.c_attn.bias#1              attn.c_attn.bias#1
v_bias       (h e)    attn.c_attn.bias#2              attn.c_attn.bias#2
o            d (h e)  attn.c_proj.weight (h e) d      attn.c_proj.weight
o_bias       d        attn.c_proj.bias                attn.c_proj.bias
norm_2       d        ln_2.weight                     ln_2.weight
norm_2_bias  d        ln_2.bias                       ln_2.bias
w1           f d      mlp.c_fc.weight d f             mlp.c_fc.weight
w1_bias      f        mlp.c_fc.bias                   mlp.c_fc.bias
w2           d f      mlp.c_proj.weight f d           mlp.c_proj.weight
w2_bias      d        mlp.c_proj.bias                 mlp.c_proj.bias
"""

AFTER = """
logical    axes  hf                       mlx
norm       d     transformer.ln_f.weight  model.ln_f.weight
norm_bias  d     transformer.ln_f.bias    model.ln_f.bias
output     v d   lm_head.weight           lm_head.weight
"""

MASK = "causal mask, the same in every model"

FAMILY = Family(
    name="gpt2",
    title="GPT-2",
    layouts=("hf", "mlx"),
    tables=(BEFORE, LAYER, AFTER),
    architecture="GPT2LMHeadModel",
    drops=(
        Drop("hf", "transformer.h.{i}.attn.bias", MASK),
        Drop("hf", "transformer.h.{i}.attn.masked_bias", MASK),
    ),
    ties=(Tie("output", of="embed"),),
    tied=True,
    sizes={
        "v": ("vocab_size", ""),
        "pos": ("n_positions", ""),
        "d": ("n_embd", ""),
        "f": ("n_inner", ""),
        "h": ("n_head", ""),
        "e": ("head_dim", ""),
        "i": ("n_layer", ""),
    },
    unquantized=("q", "k", "v", "o", "w1", "w2"),
    proofs=_proofs.get_proofs("hf", "mlx"),
    config_signs=({"model_type": "gpt2"},),
    tiny=dict(v=24, pos=7, d=16, f=12, h=8, e=2, i=2),
)
