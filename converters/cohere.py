"""Cohere's Command R, Aya 23: Command R7B with norms for the queries and keys of each head.

Source: transformers' ``modeling_cohere.py``, mlx-lm's ``cohere.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import cohere2

HEAD_NORMS = """
logical    axes  hf: model.layers.{i}.
q_norm?qk  h e   self_attn.q_norm.weight
k_norm?qk  k e   self_attn.k_norm.weight
"""

FAMILY: Family = replace(
    cohere2.FAMILY,
    name="cohere",
    title="Command R, Command R+, Aya 23",
    aliases=("command_r", "command_r_plus", "aya_23"),
    tables=(*cohere2.FAMILY.tables, HEAD_NORMS),
    architecture="CohereForCausalLM",
    shown_by=("qk",),
    config_signs=({"model_type": "cohere"},),
)
