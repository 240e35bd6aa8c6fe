"""EXAONE 4: Llama's tensors, with norms after attention and feed-forward.

Queries and keys of each head have norms. Source: transformers' ``modeling_exaone4.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _proofs, granite

NORMS = """
logical      axes  hf: model.layers.{i}.
norm_1       d     -
norm_2       d     -
norm_1_post  d     post_attention_layernorm.weight
norm_2_post  d     post_feedforward_layernorm.weight
q_norm       e     self_attn.q_norm.weight
k_norm       e     self_attn.k_norm.weight
"""

FAMILY: Family = replace(
    granite.FAMILY,
    name="exaone4",
    title="EXAONE 4",
    aliases=("exaone_4",),
    tables=(*granite.FAMILY.tables, NORMS),
    architecture="Exaone4ForCausalLM",
    config_signs=({"model_type": "exaone4"},),
    proofs=_proofs.get_proofs("hf", "mlx"),
)
