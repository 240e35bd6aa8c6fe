"""OLMo 3: OLMo 2 with three local layers before each global one.

Sources: transformers' ``modeling_olmo3.py`` and ``convert_olmo3_weights_to_hf.py``, OLMo-core's
``nn/hf/convert.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import olmo2

FAMILY: Family = replace(
    olmo2.FAMILY,
    name="olmo3",
    title="OLMo 3",
    layouts=("hf", "olmo-core", "mlx"),
    architecture="Olmo3ForCausalLM",
    proofs={"hf": "transformers 5.23", "olmo-core": "OLMo-core 3.0.0", "mlx": "mlx-lm 0.32.2"},
    config_signs=({"model_type": "olmo3"},),
)
