"""Nemotron 3, 4 and Minitron: Llama's tensors, no gate in the feed-forward, norms with biases.

The norms multiply with ``1 + w``. Source: transformers' ``modeling_nemotron.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _megatron, arcee

NORMS = """
logical      axes  hf: model.layers.{i}.
norm_1_bias  d     input_layernorm.bias
norm_2_bias  d     post_attention_layernorm.bias
"""

NORM = """
logical    axes  hf
norm_bias  d     model.norm.bias
"""

FAMILY: Family = replace(
    arcee.FAMILY,
    name="nemotron",
    title="Nemotron 3 and 4, Minitron",
    aliases=("nemotron4", "minitron"),
    tables=(*arcee.FAMILY.tables, NORMS, NORM),
    architecture="NemotronForCausalLM",
    config_signs=({"model_type": "nemotron"},),
    megatron=_megatron.NEMOTRON,
)
