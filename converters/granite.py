"""Granite 3 and 4.0 (dense): Llama's tensors, with multipliers that only config.json states.

Source: transformers' ``modeling_granite.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import SIZES, Family, Tie

from . import _proofs, llama2

FAMILY: Family = replace(
    llama2.FAMILY,
    name="granite",
    title="Granite 3 (dense)",
    aliases=("granite3",),
    layouts=("hf", "mlx"),
    like={},
    architecture="GraniteForCausalLM",
    drops=(),
    ties=(Tie("output", of="embed"),),
    sizes=SIZES,
    repeated=(),
    proofs=_proofs.get_proofs("hf", "mlx"),
    config_signs=({"model_type": "granite"},),
    params_signs=(),
    presets=(),
)
