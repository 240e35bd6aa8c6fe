"""Falcon 3: Llama with a head dimension of 256 and a different RoPE base.

Source: the config.json of ``tiiuae/Falcon3-7B-Base``; transformers runs it as ``llama``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _proofs, llama2

THETA = {"rope_theta": 1000042}

FAMILY: Family = replace(
    llama2.FAMILY,
    name="falcon3",
    title="Falcon 3",
    aliases=("falcon_3",),
    refines="llama2",
    proofs=_proofs.get_proofs("hf", "mlx", "gguf", "mcore"),
    config_signs=({"model_type": "llama", **THETA},),
    params_signs=(THETA,),
    presets=(*llama2.FAMILY.presets[:1], ({}, {**THETA, "max_position_embeddings": 32768})),
)
