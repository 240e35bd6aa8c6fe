"""Gemma 2: Gemma with a norm on either side of attention and of the feed-forward.

Sources: transformers' ``modeling_gemma2.py``, torchtune's ``models/gemma2/_component_builders.py``
and ``_attention.py``. torchtune's own converter (0.6.1, ``models/gemma2/_convert_weights.py``)
exchanges the two norms of the feed-forward: github.com/meta-pytorch/torchtune/issues/2850.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _megatron, _proofs, gemma, qwen2

NORMS = """
norm_1_post  d  post_attention_layernorm.weight    sa_scale.scale
norm_2       d  pre_feedforward_layernorm.weight   mlp_norm.scale
norm_2_post  d  post_feedforward_layernorm.weight  mlp_scale.scale
"""

GGUF_NORMS = """
logical      gguf: blk.{i}.
norm_1_post  post_attention_norm.weight+1
norm_2_post  post_ffw_norm.weight+1
"""

MCORE_NORMS = """
logical      mcore: decoder.layers.{i}.
norm_1_post  self_attention.linear_proj.post_layernorm.weight
norm_2_post  mlp.linear_fc2.post_layernorm.weight
"""

FINAL_NORM = """
logical  torchtune
norm     norm.rms_norm.scale
"""

FAMILY: Family = replace(
    gemma.FAMILY,
    name="gemma2",
    title="Gemma 2",
    aliases=("gemma_2",),
    tables=(
        qwen2.BEFORE,
        gemma.LAYER + NORMS,
        qwen2.AFTER,
        FINAL_NORM,
        *gemma.GGUF,
        GGUF_NORMS,
        *gemma.MCORE,
        MCORE_NORMS,
    ),
    architecture="Gemma2ForCausalLM",
    proofs={**gemma.FAMILY.proofs, **_proofs.get_proofs("gguf")},
    sources={"mcore": "Megatron-Bridge"},
    config_signs=({"model_type": "gemma2"},),
    megatron=_megatron.GEMMA2,
)
