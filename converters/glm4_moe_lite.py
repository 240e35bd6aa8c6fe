"""GLM-4.7-Flash: the tensors and names of DeepSeek-V3, with MTP layers.

Sources: transformers' ``modeling_glm4_moe_lite.py`` and ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5, without MTP layers), mlx-lm's ``glm4_moe_lite.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, Tie

from . import _proofs, deepseek_v3

FAMILY: Family = replace(
    deepseek_v3.FAMILY,
    name="glm4_moe_lite",
    title="GLM-4.7-Flash",
    aliases=("glm4_7_flash",),
    layouts=("hf", "hf-v5", "mlx"),
    architecture="Glm4MoeLiteForCausalLM",
    ties=(Tie("output", of="embed"),),
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx"),
    shown_by=(),
    config_signs=({"model_type": "glm4_moe_lite"},),
    megatron=None,
)
