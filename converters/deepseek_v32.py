"""DeepSeek-V3.2: DeepSeek-V3 with an indexer in each layer, which selects the attended tokens.

The indexer rotates halves of the first part of each of its heads. Attention rotates neighboring
pairs. All programs do the same, so no axis is reordered.

Sources: transformers' ``modeling_deepseek_v32.py``, DeepSeek's ``inference/convert.py`` and
``model.py`` of DeepSeek-V3.2-Exp (``deepseek``, without the MTP layers), mlx-lm's
``deepseek_v32.py``, Megatron-Core's ``dsa.py`` and ``mla_qk_norm_config.py`` (0.19, ``mcore``:
sparse attention does not fuse the norms of latents with the linear layers after them).
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, Tie

from . import _megatron, _proofs, deepseek_v3

INDEXER = """
logical            axes        hf, hf-v5: model.layers.{i}.self_attn.indexer.  deepseek: layers.{i}.attn.indexer.
index_q            (ih ie) ql  wq_b.weight                                     wq_b.weight
index_k            ie d        wk.weight                                       wk.weight
index_k_norm       ie          k_norm.weight                                   k_norm.weight
index_k_norm_bias  ie          k_norm.bias                                     k_norm.bias
index_heads        ih d        weights_proj.weight                             weights_proj.weight
"""  # noqa: E501

MTP_INDEXER = """
logical            axes        hf: model.layers.{j}.self_attn.indexer.
index_q            (ih ie) ql  wq_b.weight
index_k            ie d        wk.weight
index_k_norm       ie          k_norm.weight
index_k_norm_bias  ie          k_norm.bias
index_heads        ih d        weights_proj.weight
"""

MCORE_INDEXER = """
logical            mcore: decoder.layers.{i}.self_attention.
q_a_norm           q_layernorm.weight
kv_a_norm          kv_layernorm.weight
index_q            core_attention.indexer.linear_wq_b.weight
index_k            core_attention.indexer.linear_wk.weight
index_k_norm       core_attention.indexer.k_norm.weight
index_k_norm_bias  core_attention.indexer.k_norm.bias
index_heads        core_attention.indexer.linear_weights_proj.weight
"""

MCORE = (MCORE_INDEXER, MCORE_INDEXER.replace(*deepseek_v3.IN_MTP))

FAMILY: Family = replace(
    deepseek_v3.FAMILY,
    name="deepseek_v32",
    title="DeepSeek-V3.2",
    aliases=(),
    layouts=("hf", "hf-v5", "deepseek", "mlx", "mcore"),
    tables=(*deepseek_v3.FAMILY.tables, INDEXER, MTP_INDEXER, *MCORE),
    like={"mlx": "hf-v5"},
    architecture="DeepseekV32ForCausalLM",
    ties=(Tie("output", of="embed", stored_in=("deepseek", "mlx")),),
    sizes={
        **deepseek_v3.FAMILY.sizes,
        "ih": ("index_n_heads", ""),
        "ie": ("index_head_dim", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "deepseek", "mlx", "mcore", mcore=_proofs.MCORE_019),
    config_signs=({"model_type": "deepseek_v32"},),
    megatron=_megatron.DEEPSEEK_V32,
    tiny=dict(deepseek_v3.FAMILY.tiny, ih=3, ie=8),
)
