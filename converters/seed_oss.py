"""Seed-OSS 36B: Llama's tensors, with an explicit head dimension and optional biases.

Source: transformers' ``modeling_seed_oss.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _proofs, granite

FAMILY: Family = replace(
    granite.FAMILY,
    name="seed_oss",
    title="Seed-OSS 36B",
    aliases=("seedoss",),
    architecture="SeedOssForCausalLM",
    config_signs=({"model_type": "seed_oss"},),
    proofs=_proofs.get_proofs("hf", "mlx"),
)
