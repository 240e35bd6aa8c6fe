"""OLMo 3: OLMo 2 with three local layers before each global one.

Sources: transformers' ``modeling_olmo3.py`` and ``convert_olmo3_weights_to_hf.py``, OLMo-core's
``nn/hf/convert.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _proofs, olmo2

FAMILY: Family = replace(
    olmo2.FAMILY,
    name="olmo3",
    title="OLMo 3",
    layouts=("hf", "olmo-core", "mlx"),
    architecture="Olmo3ForCausalLM",
    proofs=_proofs.get_proofs("hf", "olmo-core", "mlx"),
    config_signs=({"model_type": "olmo3"},),
)
