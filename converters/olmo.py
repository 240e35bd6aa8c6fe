"""OLMo 1B, 7B of 2024: Llama's tensors, with norms that have no weights.

Source: transformers' ``modeling_olmo.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _proofs, granite

NO_NORMS = """
logical  hf: model.layers.{i}.
norm_1   -
norm_2   -
"""

NO_NORM = """
logical  hf
norm     -
"""

FAMILY: Family = replace(
    granite.FAMILY,
    name="olmo",
    title="OLMo 1",
    aliases=("olmo1",),
    tables=(*granite.FAMILY.tables, NO_NORMS, NO_NORM),
    layouts=("hf",),
    architecture="OlmoForCausalLM",
    config_signs=({"model_type": "olmo"},),
    proofs=_proofs.get_proofs("hf"),
)
