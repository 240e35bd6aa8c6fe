"""GLM-5 and GLM-5.1: latent attention on tokens selected by an indexer, and experts.

From GLM-5.1 on, some layers have no indexer and reuse the tokens of the layer before.
``indexer_types`` in config.json lists them. If it is missing, a layer without any indexer tensor is
one of them, unless all layers need an indexer. MTP layers are numbered after all others.

Sources: transformers' ``modeling_glm_moe_dsa.py`` and ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5, without MTP layers), vLLM's ``deepseek_mtp.py``, mlx-lm's
``glm_moe_dsa.py``, in which every layer has an indexer; Megatron-Bridge's ``glm5_bridge.py`` (0.6)
and Megatron-Core's ``dsa.py`` (0.19, ``mcore``). Attention and indexer rotate neighboring pairs, so
no axis is reordered.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Demand, Family, Tie

from . import _megatron, _proofs, deepseek_v3, deepseek_v32

INDEXER = """
logical                  axes        hf, hf-v5: model.layers.{i}.self_attn.indexer.
index_q?index            (ih ie) ql  wq_b.weight
index_k?index            ie d        wk.weight
index_k_norm?index       ie          k_norm.weight
index_k_norm_bias?index  ie          k_norm.bias
index_heads?index        ih d        weights_proj.weight
"""

MTP_INDEXER = INDEXER.replace("hf, hf-v5:", "hf:").replace("{i}", "{j}").replace("?index", "?next")

FAMILY: Family = replace(
    deepseek_v32.FAMILY,
    name="glm_moe_dsa",
    title="GLM-5, GLM-5.1",
    aliases=("glm5",),
    layouts=("hf", "hf-v5", "mlx", "mcore"),
    tables=(*deepseek_v3.FAMILY.tables, INDEXER, MTP_INDEXER, *deepseek_v32.MCORE),
    architecture="GlmMoeDsaForCausalLM",
    ties=(Tie("output", of="embed"),),
    demands=(
        Demand(("index",), kinds=("indexer_types", "full")),
        Demand(
            ("index",),
            {"indexer_types": None, "index_topk_freq": None, "index_topk_pattern": None},
        ),
    ),
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", "mcore", mcore=_proofs.MCORE_019),
    shown_by=("index", "next"),
    config_signs=({"model_type": "glm_moe_dsa"},),
    megatron=_megatron.GLM_MOE_DSA,
)
