"""MiniMax M3: attention to blocks of keys that an indexer selects; experts; a vision tower.

========  ======================================================================================
layout    where it is found
========  ======================================================================================
hf        on the Hub; transformers 5 reads and writes it, without MTP layers
hf-v5     in-memory names of transformers 5, which fuses gates and up projections
mlx       mlx-lm, without the tower; mlx-vlm, if config.json has ``pack_shared_expert: false``
========  ======================================================================================

By default, mlx-vlm appends the shared expert to the experts if both have the same size. mlx-lm
also reads such files, which are not a layout here. Only layers with sparse attention have an
indexer. Norms multiply by 1 + weight. The first part of each head rotates by halves, in the tower
too, so no axis is reordered.

Sources: transformers' ``modeling_minimax_m3_vl.py`` and ``conversion_mapping.py``, vLLM's
``minimax_m3/nvidia/mtp.py`` for MTP layers, mlx-lm's and mlx-vlm's ``minimax_m3_vl``.
"""

from ckptctl.planner.layouts import BLOCK_AXES, SIZES, Companion, Demand, Family, LayerKind, Tie

from . import _proofs, qwen3_5_text

OUTPUT = """
logical  axes  hf, mlx                        hf-v5
output   v d   language_model.lm_head.weight  lm_head.weight
"""

ATTENTION = """
norm_1              d          input_layernorm.weight
q                   (h e) d    self_attn.q_proj.weight
q_norm              e          self_attn.q_norm.weight
k                   (k e) d    self_attn.k_proj.weight
k_norm              e          self_attn.k_norm.weight
v                   (k e) d    self_attn.v_proj.weight
o                   d (h e)    self_attn.o_proj.weight
norm_2              d          post_attention_layernorm.weight
"""

INDEXER = """
index_q?index       (ih ie) d  self_attn.index_q_proj.weight
index_q_norm?index  ie         self_attn.index_q_norm.weight
index_k?index       ie d       self_attn.index_k_proj.weight
index_k_norm?index  ie         self_attn.index_k_norm.weight
"""

DENSE = """
w1@dense            f d        mlp.gate_proj.weight
w3@dense            f d        mlp.up_proj.weight
w2@dense            d f        mlp.down_proj.weight
"""

MOE = """
router@moe          x d        block_sparse_moe.gate.weight
router_bias@moe     x          block_sparse_moe.e_score_correction_bias
expert_w1@moe       x m d      block_sparse_moe.experts.{x}.w1.weight
expert_w3@moe       x m d      block_sparse_moe.experts.{x}.w3.weight
expert_w2@moe       x d m      block_sparse_moe.experts.{x}.w2.weight
shared_w1@moe       s d        block_sparse_moe.shared_experts.gate_proj.weight
shared_w3@moe       s d        block_sparse_moe.shared_experts.up_proj.weight
shared_w2@moe       d s        block_sparse_moe.shared_experts.down_proj.weight
"""

LAYER = ATTENTION + INDEXER + DENSE + MOE

V5 = """
index_q?index       (ih ie) d  self_attn.indexer.q_proj.weight
index_q_norm?index  ie         self_attn.indexer.q_norm.weight
index_k?index       ie d       self_attn.indexer.k_proj.weight
index_k_norm?index  ie         self_attn.indexer.k_norm.weight
w1@dense            f d        mlp.gate_up_proj.weight#0
w3@dense            f d        mlp.gate_up_proj.weight#1
w2@dense            d f        mlp.down_proj.weight
router@moe          x d        mlp.gate.weight
router_bias@moe     x          mlp.gate.e_score_correction_bias
expert_w1@moe       x m d      mlp.experts.gate_up_proj#0.1
expert_w3@moe       x m d      mlp.experts.gate_up_proj#1.1
expert_w2@moe       x d m      mlp.experts.down_proj
shared_w1@moe       s d        mlp.shared_experts.gate_up_proj.weight#0
shared_w3@moe       s d        mlp.shared_experts.gate_up_proj.weight#1
shared_w2@moe       d s        mlp.shared_experts.down_proj.weight
"""

MTP = """
logical   axes  hf: language_model.model.mtp.layers.{j}.
enorm     d     enorm.weight
hnorm     d     hnorm.weight
eh_proj   d dd  eh_proj.weight
mtp_norm  d     final_layernorm.weight
"""

MTP_LAYER = ATTENTION + INDEXER.replace("?index", "") + MOE.replace("@moe", "")

MLX = """
logical    mlx: language_model.model.layers.{i}.block_sparse_moe.
expert_w1  switch_mlp.gate_proj.weight
expert_w3  switch_mlp.up_proj.weight
expert_w2  switch_mlp.down_proj.weight
"""

VISION = """
logical          axes            hf, mlx: vision_tower.vision_model.  hf-v5: model.vision_tower.
vision_patch     vd vc vt ph pw  embeddings.patch_embedding.weight    embeddings.proj.weight
vision_pre       vd              pre_layrnorm.weight                  pre_layrnorm.weight
vision_pre_bias  vd              pre_layrnorm.bias                    pre_layrnorm.bias
"""

VISION_LAYER = """
logical             axes        hf, mlx: vision_tower.vision_model.encoder.layers.{u}.  hf-v5: model.vision_tower.layers.{u}.
vision_norm_1       vd          layer_norm1.weight                                      layer_norm1.weight
vision_norm_1_bias  vd          layer_norm1.bias                                        layer_norm1.bias
vision_q            (vh ve) vd  self_attn.q_proj.weight                                 self_attn.q_proj.weight
vision_q_bias       (vh ve)     self_attn.q_proj.bias                                   self_attn.q_proj.bias
vision_k            (vh ve) vd  self_attn.k_proj.weight                                 self_attn.k_proj.weight
vision_k_bias       (vh ve)     self_attn.k_proj.bias                                   self_attn.k_proj.bias
vision_v            (vh ve) vd  self_attn.v_proj.weight                                 self_attn.v_proj.weight
vision_v_bias       (vh ve)     self_attn.v_proj.bias                                   self_attn.v_proj.bias
vision_o            vd (vh ve)  self_attn.out_proj.weight                               self_attn.out_proj.weight
vision_o_bias       vd          self_attn.out_proj.bias                                 self_attn.out_proj.bias
vision_norm_2       vd          layer_norm2.weight                                      layer_norm2.weight
vision_norm_2_bias  vd          layer_norm2.bias                                        layer_norm2.bias
vision_w1           vf vd       mlp.fc1.weight                                          mlp.fc1.weight
vision_w1_bias      vf          mlp.fc1.bias                                            mlp.fc1.bias
vision_w2           vd vf       mlp.fc2.weight                                          mlp.fc2.weight
vision_w2_bias      vd          mlp.fc2.bias                                            mlp.fc2.bias
"""  # noqa: E501

PROJECTOR = """
logical            axes   hf, mlx                                hf-v5: model.multi_modal_projector.
projector_w1       vp vd  multi_modal_projector.linear_1.weight  linear_1.weight
projector_w1_bias  vp     multi_modal_projector.linear_1.bias    linear_1.bias
projector_w2       d vp   multi_modal_projector.linear_2.weight  linear_2.weight
projector_w2_bias  d      multi_modal_projector.linear_2.bias    linear_2.bias
merger_w1          vp vm  patch_merge_mlp.linear_1.weight        merge_linear_1.weight
merger_w1_bias     vp     patch_merge_mlp.linear_1.bias          merge_linear_1.bias
merger_w2          d vp   patch_merge_mlp.linear_2.weight        merge_linear_2.weight
merger_w2_bias     d      patch_merge_mlp.linear_2.bias          merge_linear_2.bias
"""

SIZE_NAMES = {
    **{axis: SIZES[axis] for axis in "vdhkei"},
    "f": ("dense_intermediate_size", ""),
    "m": ("intermediate_size", ""),
    "s": ("shared_intermediate_size", ""),
    "x": ("num_local_experts", ""),
    "ih": ("index_n_heads|sparse_attention_config.sparse_num_index_heads", ""),
    "ie": ("index_head_dim|sparse_attention_config.sparse_index_dim", ""),
}

KINDS = (
    LayerKind("dense", kinds=("mlp_layer_types", "dense")),
    LayerKind("moe", kinds=("moe_layer_freq", 1)),
)

DEMANDS = (
    Demand(("index",), kinds=("layer_types", "minimax_m3_sparse")),
    Demand(("index",), kinds=("sparse_attention_config.sparse_attention_freq", 1)),
)

FAMILY = Family(
    name="minimax_m3_vl",
    title="MiniMax M3",
    layouts=("hf", "hf-v5", "mlx"),
    tables=(
        VISION,
        VISION_LAYER,
        PROJECTOR,
        "logical  axes  hf, mlx: language_model.model." + qwen3_5_text.EMBED + qwen3_5_text.NORM,
        "logical  axes  hf-v5: model.language_model." + qwen3_5_text.EMBED + qwen3_5_text.NORM,
        OUTPUT,
        "logical  axes  hf, mlx: language_model.model.layers.{i}." + LAYER,
        "logical  axes  hf-v5: model.language_model.layers.{i}." + ATTENTION + V5,
        MTP,
        "logical  axes  hf: language_model.model.mtp.layers.{j}.transformer_layer." + MTP_LAYER,
        MLX,
    ),
    like={"mlx": ""},
    architecture="MiniMaxM3SparseForConditionalGeneration",
    ties=(Tie("output", of="embed"),),
    variants=(("dense", "moe"),),
    companions=(Companion({"hf": (".weight", ".weight_scale_inv")}),),
    free=BLOCK_AXES,
    pinned=("router_bias",),
    unquantized=("eh_proj",),
    demands=tuple(demand.with_prefix("text_config") for demand in DEMANDS),
    kinds=tuple(kind.with_prefix("text_config") for kind in KINDS),
    composite={"h": ("k", "q")},
    formulas=(
        ("dd", "2 * text_config.hidden_size"),
        (
            "vm",
            "text_config.hidden_size * vision_config.spatial_merge_size"
            " * vision_config.spatial_merge_size",
        ),
    ),
    sizes={
        **{
            axis: (f"text_config.{name.replace('|', '|text_config.')}", "")
            for axis, (name, _) in SIZE_NAMES.items()
        },
        "vd": ("vision_config.hidden_size", ""),
        "vf": ("vision_config.intermediate_size", ""),
        "vh": ("vision_config.num_attention_heads", ""),
        "vc": ("vision_config.num_channels", ""),
        "vt": ("vision_config.temporal_patch_size", ""),
        "ph": ("vision_config.patch_size", ""),
        "pw": ("vision_config.patch_size", ""),
        "u": ("vision_config.num_hidden_layers", ""),
        "vp": ("projector_hidden_size", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", mlx=_proofs.MLX_VLM),
    shown_by=("router",),
    config_signs=({"model_type": "minimax_m3_vl"},),
    tiny=dict(
        v=24,
        d=20,
        f=12,
        m=10,
        s=14,
        h=8,
        k=4,
        e=6,
        x=3,
        ih=5,
        ie=7,
        dd=40,
        i=2,
        vd=16,
        vf=18,
        vh=2,
        ve=8,
        vc=3,
        vt=2,
        ph=3,
        pw=3,
        vp=22,
        vm=26,
        u=2,
        down=4,
        across=8,
    ),
)
