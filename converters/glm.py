"""GLM-4 9B of 2024 in transformers: GLM-4 0414 with two norms per layer.

mlx-lm (0.32.2) ignores ``partial_rotary_factor``, which published models set to 0.5, and rotates
complete heads. Names and axis orders are the same.

Sources: transformers' ``modeling_glm.py``, NeMo's ``chatglm.py`` (``mcore``), mlx-lm's ``glm.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _proofs, glm4

TWO_NORMS = """
logical      hf: model.layers.{i}.  mcore: decoder.layers.{i}.
norm_1_post  -                      -
norm_2_post  -                      -
"""

FAMILY: Family = replace(
    glm4.FAMILY,
    name="glm",
    title="GLM-4 9B, GLM-Edge",
    aliases=("glm4_9b",),
    tables=(*glm4.FAMILY.tables, TWO_NORMS),
    layouts=("hf", "mlx", "mcore"),
    architecture="GlmForCausalLM",
    config_signs=({"model_type": "glm"},),
    proofs=_proofs.get_proofs("hf", "mlx", "mcore"),
)
