"""Arcee AFM 4.5B: Llama's tensors without the gate of the feed-forward.

Source: transformers' ``modeling_arcee.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _proofs, granite

NO_GATE = """
logical  hf: model.layers.{i}.
w1       -
w1_bias  -
"""

FAMILY: Family = replace(
    granite.FAMILY,
    name="arcee",
    title="Arcee AFM",
    aliases=("afm",),
    tables=(*granite.FAMILY.tables, NO_GATE),
    layouts=("hf",),
    architecture="ArceeForCausalLM",
    config_signs=({"model_type": "arcee"},),
    proofs=_proofs.get_proofs("hf"),
)
