"""Hunyuan 0.5B to 7B, dense: Llama's tensors and a norm for the queries and keys of each head.

Source: transformers' ``modeling_hunyuan_v1_dense.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _proofs, granite

NORMS = """
logical  axes  hf: model.layers.{i}.
q_norm   e     self_attn.query_layernorm.weight
k_norm   e     self_attn.key_layernorm.weight
"""

FAMILY: Family = replace(
    granite.FAMILY,
    name="hunyuan_v1_dense",
    title="Hunyuan (dense)",
    aliases=("hunyuan", "hunyuan_dense"),
    tables=(*granite.FAMILY.tables, NORMS),
    architecture="HunYuanDenseV1ForCausalLM",
    config_signs=({"model_type": "hunyuan_v1_dense"},),
    proofs=_proofs.get_proofs("hf", "mlx"),
)
