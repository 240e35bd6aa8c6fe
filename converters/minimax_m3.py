"""MiniMax M3, text only.

==============  ==============================================================================
layout          where it is found
==============  ==============================================================================
hf              transformers 5, in files and in memory
llm-compressor  llm-compressor, with a linear layer per projection of an expert
mlx             mlx-lm, if config.json has this model as ``text_config`` of ``minimax_m3_vl``;
                mlx-vlm (``minimax_m3``), if config.json has ``pack_shared_expert: false``
==============  ==============================================================================

Sources: as for ``minimax_m3_vl``, and mlx-vlm's ``minimax_m3``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _hf, _llm_compressor, _proofs, minimax_m3_vl, qwen3_5_text

FAMILY: Family = replace(
    minimax_m3_vl.FAMILY,
    name="minimax_m3",
    title="MiniMax M3, text only",
    layouts=("hf", "llm-compressor", "mlx"),
    tables=(
        _hf.BEFORE,
        "logical  axes  hf: model.layers.{i}." + minimax_m3_vl.ATTENTION + minimax_m3_vl.V5,
        _llm_compressor.build_table("model.layers.{i}.mlp.experts"),
        _hf.AFTER,
        "logical  axes  mlx: language_model.model." + qwen3_5_text.EMBED + qwen3_5_text.NORM,
        qwen3_5_text.MLX_OUTPUT,
        "logical  axes  mlx: language_model.model.layers.{i}." + minimax_m3_vl.LAYER,
        minimax_m3_vl.MLX,
    ),
    like={"mlx": ""},
    architecture="MiniMaxM3VLForCausalLM",
    companions=(),
    free=(),
    demands=minimax_m3_vl.DEMANDS,
    kinds=minimax_m3_vl.KINDS,
    formulas=(),
    sizes=minimax_m3_vl.SIZE_NAMES,
    proofs=_proofs.get_proofs("hf", "mlx"),
    sources={"llm-compressor": "llm-compressor's split_fused_moe_experts"},
    config_signs=({"model_type": "minimax_m3_vl_text"}, {"model_type": "minimax_m3"}),
    tiny={
        axis: size
        for axis, size in minimax_m3_vl.FAMILY.tiny.items()
        if axis in (*minimax_m3_vl.SIZE_NAMES, "i")
    },
)
