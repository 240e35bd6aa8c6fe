"""GPT-NeoX 20B, Pythia, Dolly 2: queries, keys and values interleaved per head.

Source: transformers' ``modeling_gpt_neox.py`` and ``conversion_mapping.py`` (``hf-v5``: in-memory
names of transformers 5), mlx-lm's ``gpt_neox.py``.
"""

from ckptctl.planner.layouts import SIZES, Drop, Family, Tie

from . import _proofs

BEFORE = """
logical  axes  hf
embed    v d   gpt_neox.embed_in.weight
"""

LAYER = """
logical             axes       hf: gpt_neox.layers.{i}.
qkv                 (h t e) d  attention.query_key_value.weight
qkv_bias?attention  (h t e)    attention.query_key_value.bias
o                   d (h e)    attention.dense.weight
o_bias?attention    d          attention.dense.bias
w1                  f d        mlp.dense_h_to_4h.weight
w1_bias             f          mlp.dense_h_to_4h.bias
w2                  d f        mlp.dense_4h_to_h.weight
w2_bias             d          mlp.dense_4h_to_h.bias
norm_1              d          input_layernorm.weight
norm_1_bias         d          input_layernorm.bias
norm_2              d          post_attention_layernorm.weight
norm_2_bias         d          post_attention_layernorm.bias
"""

AFTER = """
logical    axes  hf                                hf-v5
norm       d     gpt_neox.final_layer_norm.weight  gpt_neox.final_layer_norm.weight
norm_bias  d     gpt_neox.final_layer_norm.bias    gpt_neox.final_layer_norm.bias
output     v d   embed_out.weight                  lm_head.weight
"""

MLX = (
    "logical  mlx: model.\nembed  embed_in.weight",
    LAYER.replace("axes       hf: gpt_neox.layers.{i}.", "axes       mlx: model.h.{i}."),
    """
logical    mlx: model.
norm       final_layer_norm.weight
norm_bias  final_layer_norm.bias
output     embed_out.weight
""",
)

MASK = "causal mask, the same in every model"

FAMILY = Family(
    name="gpt_neox",
    title="GPT-NeoX 20B, Pythia, Dolly 2",
    aliases=("gptneox", "pythia"),
    layouts=("hf", "hf-v5", "mlx"),
    tables=(BEFORE, LAYER, AFTER, *MLX),
    like={"hf-v5": "hf", "mlx": ""},
    architecture="GPTNeoXForCausalLM",
    drops=(
        Drop("hf", "gpt_neox.layers.{i}.attention.bias", MASK),
        Drop("hf", "gpt_neox.layers.{i}.attention.masked_bias", MASK),
        Drop(
            "hf",
            "gpt_neox.layers.{i}.attention.rotary_emb.inv_freq",
            "rotary frequencies are computed from config.json",
        ),
    ),
    ties=(Tie("output", of="embed", stored_in=("hf-v5", "mlx")),),
    constants={"t": 3},
    sizes={axis: SIZES[axis] for axis in "vdfhei"},
    config_signs=({"model_type": "gpt_neox"},),
    earlier=("rotary_emb_base", "rotary_pct"),
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx"),
    tiny=dict(v=24, d=16, f=12, h=8, e=2, i=2),
)
