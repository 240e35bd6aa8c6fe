"""GLM-4 9B of 2024, as transformers runs it: two norms a layer, otherwise GLM-4 0414.

Sources: transformers' ``modeling_glm.py``, NeMo's ``chatglm.py`` (``mcore``).
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import glm4

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
    layouts=("hf", "mcore"),
    architecture="GlmForCausalLM",
    config_signs=({"model_type": "glm"},),
    proofs={"hf": "transformers 5.23", "mcore": "megatron-core 0.16.1 without Transformer Engine"},
)
