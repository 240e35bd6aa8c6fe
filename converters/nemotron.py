"""Nemotron 3, 4 and Minitron: Llama's tensors, no gate in the feed-forward, norms with biases.

The norms multiply by ``1 + w`` in every layout.

Sources: transformers' ``modeling_nemotron.py``, Megatron-Bridge's ``nemotron_bridge.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _megatron, _proofs, arcee

NORMS = """
logical      axes  hf: model.layers.{i}.
norm_1_bias  d     input_layernorm.bias
norm_2_bias  d     post_attention_layernorm.bias
"""

NORM = """
logical    axes  hf
norm_bias  d     model.norm.bias
"""

MCORE_LAYER = """
logical      mcore: decoder.layers.{i}.
w1           -
w1_bias      -
w3           mlp.linear_fc1.weight
w3_bias      mlp.linear_fc1.bias
norm_1_bias  self_attention.linear_qkv.layer_norm_bias
norm_2_bias  mlp.linear_fc1.layer_norm_bias
"""

MCORE_NORM = """
logical    mcore
norm_bias  decoder.final_layernorm.bias
"""

FAMILY: Family = replace(
    arcee.FAMILY,
    name="nemotron",
    title="Nemotron 3 and 4, Minitron",
    aliases=("nemotron4", "minitron"),
    layouts=("hf", "mlx", "mcore"),
    tables=(*arcee.FAMILY.tables, NORMS, NORM, MCORE_LAYER, MCORE_NORM),
    architecture="NemotronForCausalLM",
    proofs=_proofs.get_proofs("hf", "mcore", "mlx"),
    config_signs=({"model_type": "nemotron"},),
    megatron=_megatron.NEMOTRON,
)
