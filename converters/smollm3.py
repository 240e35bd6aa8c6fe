"""SmolLM3: Llama's tensors, with layers without RoPE that config.json lists.

Source: transformers' ``modeling_smollm3.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _proofs, granite

FAMILY: Family = replace(
    granite.FAMILY,
    name="smollm3",
    title="SmolLM3",
    aliases=("smollm_3",),
    architecture="SmolLM3ForCausalLM",
    tied=True,
    proofs=_proofs.get_proofs("hf", "mlx"),
    config_signs=({"model_type": "smollm3"},),
)
