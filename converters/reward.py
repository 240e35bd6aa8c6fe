"""Reward models: Llama or Mistral with a score head instead of the output.

Sources: transformers' ``modeling_layers.py`` (``GenericForSequenceClassification``), torchtune's
``rlhf/utils/_convert_weights.py`` and ``llama2_classifier``, ``mistral_classifier``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import SIZES, Drop, Family

from . import _proofs, llama2, mistral

SCORE = """
logical  axes  hf            torchtune
output   c d   score.weight  output.weight
"""

FAMILY: Family = replace(
    llama2.FAMILY,
    name="reward",
    title="Reward models on Llama or Mistral",
    aliases=("llama_reward", "mistral_reward"),
    layouts=("hf", "torchtune"),
    tables=(*llama2.FAMILY.tables, SCORE),
    like={},
    architecture="LlamaForSequenceClassification",
    drops=(
        *mistral.ROTARY,
        Drop("hf", "score.bias", "neither transformers nor torchtune has a bias here"),
    ),
    ties=(),
    sizes=SIZES,
    repeated=(),
    proofs=_proofs.get_proofs("hf", "torchtune"),
    config_signs=(
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "mistral", "architectures": ["MistralForSequenceClassification"]},
    ),
    params_signs=(),
    presets=(),
    tiny=dict(llama2.FAMILY.tiny, c=3),
)
