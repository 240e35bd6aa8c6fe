"""ERNIE 4.5 0.3B, dense: Llama's tensors, neighboring pairs rotated, embeddings tied.

Source: transformers' ``modeling_ernie4_5.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _proofs, granite

FAMILY: Family = replace(
    granite.FAMILY,
    name="ernie4_5",
    title="ERNIE 4.5 (dense)",
    aliases=("ernie",),
    architecture="Ernie4_5ForCausalLM",
    tied=True,
    config_signs=({"model_type": "ernie4_5"},),
    proofs=_proofs.get_proofs("hf", "mlx"),
)
