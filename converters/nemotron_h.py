"""Nemotron-H, Nemotron Nano 2, Nemotron 3: every layer is Mamba-2, attention, dense or experts.

Experts have no gate, and may work on a latent of the hidden state. transformers ignores the MTP
layer in files (``mtp``, attention, then experts). Its in-memory models and mlx-lm do not have this
layer, so it is missing in ``hf-v5`` and ``mlx``.

Sources: transformers' ``modeling_nemotron_h.py`` and ``conversion_mapping.py``, mlx-lm's
``nemotron_h.py``; for ``mtp`` vLLM's ``nemotron_h_mtp.py``; Megatron-Core's ``mamba_mixer.py``,
``mamba_layer_specs.py`` and ``multi_token_prediction.py`` (0.19), Megatron-Bridge's
``nemotron_h_bridge.py`` (0.6, ``mcore``). Megatron-Core has a tensor for each part of a Mamba-2
layer's projection and convolution, without biases of projections.
"""

from ckptctl.planner.layouts import CHOSEN, SIZES, Demand, Family, LayerKind

from . import _megatron, _proofs

BEFORE = """
logical  axes  hf, mlx: backbone.  hf-v5: model.
embed    v d   embeddings.weight   embeddings.weight
"""

MAMBA_WHOLE = """
mamba_in@mamba              mp d         in_proj.weight
mamba_conv@mamba            mc one taps  conv1d.weight
mamba_conv_bias@mamba?conv  mc           conv1d.bias
"""

MAMBA_PARTS = """
mamba_z@mamba                 (mh me) d         in_proj.weight#0
mamba_x@mamba                 (mh me) d         in_proj.weight#1
mamba_b@mamba                 mb d              in_proj.weight#2
mamba_c@mamba                 mb d              in_proj.weight#3
mamba_dt@mamba                mh d              in_proj.weight#4
mamba_conv_x@mamba            (mh me) one taps  conv1d.weight#0
mamba_conv_b@mamba            mb one taps       conv1d.weight#1
mamba_conv_c@mamba            mb one taps       conv1d.weight#2
mamba_conv_x_bias@mamba?conv  (mh me)           conv1d.bias#0
mamba_conv_b_bias@mamba?conv  mb                conv1d.bias#1
mamba_conv_c_bias@mamba?conv  mb                conv1d.bias#2
"""

MAMBA_HEADS = """
mamba_dt_bias@mamba  mh           dt_bias
mamba_a_log@mamba    mh           A_log
mamba_skip@mamba     mh           D
mamba_out@mamba      d (mh me)    out_proj.weight
"""

MAMBA = MAMBA_WHOLE + MAMBA_HEADS

MAMBA_NORM = """
mamba_norm@mamba           (mh me)  norm.weight
mamba_in_bias@mamba?proj   mp       in_proj.bias
mamba_out_bias@mamba?proj  d        out_proj.bias
"""

MIXER = MAMBA_PARTS + MAMBA_HEADS + MAMBA_NORM

LAYER = """
norm@mamba                d        norm.weight
attention_norm@attention  d        norm.weight
dense_norm@dense          d        norm.weight
moe_norm@moe              d        norm.weight
q@attention               (h e) d  mixer.q_proj.weight
k@attention               (k e) d  mixer.k_proj.weight
v@attention               (k e) d  mixer.v_proj.weight
o@attention               d (h e)  mixer.o_proj.weight
up@dense                  f d      mixer.up_proj.weight
up_bias@dense?mlp         f        mixer.up_proj.bias
down@dense                d f      mixer.down_proj.weight
down_bias@dense?mlp       d        mixer.down_proj.bias
"""

EXPERTS = """
router@moe                 x d    mixer.gate.weight
router_bias@moe            x      mixer.gate.e_score_correction_bias
latent_in@moe?latent       l d    mixer.fc1_latent_proj.weight
latent_in_bias@moe?lbias   l      mixer.fc1_latent_proj.bias
latent_out@moe?latent      d l    mixer.fc2_latent_proj.weight
latent_out_bias@moe?lbias  d      mixer.fc2_latent_proj.bias
shared_up@moe              s d    mixer.shared_experts.up_proj.weight
shared_up_bias@moe?mlp     s      mixer.shared_experts.up_proj.bias
shared_down@moe            d s    mixer.shared_experts.down_proj.weight
shared_down_bias@moe?mlp   d      mixer.shared_experts.down_proj.bias
expert_up@moe              x m l  mixer.experts.{x}.up_proj.weight
expert_down@moe            x l m  mixer.experts.{x}.down_proj.weight
"""

AFTER = """
logical  axes  hf, mlx                 hf-v5
norm_f   d     backbone.norm_f.weight  model.norm_f.weight
output   v d   lm_head.weight          lm_head.weight
"""

STACKED = """
logical      hf-v5: model.layers.{i}.mixer.  mlx: backbone.layers.{i}.mixer.
expert_up    experts.up_proj                 switch_mlp.fc1.weight
expert_down  experts.down_proj               switch_mlp.fc2.weight
"""

MLX_MAMBA = """
logical       mlx: backbone.layers.{i}.mixer.
mamba_conv_x  conv1d.weight#0 (mh me) taps one
mamba_conv_b  conv1d.weight#1 mb taps one
mamba_conv_c  conv1d.weight#2 mb taps one
"""

MCORE_AROUND = """
logical  mcore
embed    embedding.word_embeddings.weight
norm_f   decoder.final_norm.weight
output   output_layer.weight
"""

MCORE_MAMBA = """
logical            mcore: decoder.layers.{i}.mixer.
norm               in_proj.layer_norm_weight
mamba_z            in_proj.weight.z
mamba_x            in_proj.weight.x
mamba_b            in_proj.weight.B
mamba_c            in_proj.weight.C
mamba_dt           in_proj.weight.dt
mamba_conv_x       conv1d.weight.x
mamba_conv_b       conv1d.weight.B
mamba_conv_c       conv1d.weight.C
mamba_conv_x_bias  conv1d.bias.x
mamba_conv_b_bias  conv1d.bias.B
mamba_conv_c_bias  conv1d.bias.C
mamba_dt_bias      dt_bias
mamba_a_log        A_log
mamba_skip         D
mamba_norm         norm.weight
mamba_out          out_proj.weight
"""

MCORE_LAYER = """
logical         mcore: decoder.layers.{i}.
attention_norm  self_attention.linear_qkv.layer_norm_weight
dense_norm      mlp.linear_fc1.layer_norm_weight
moe_norm        pre_mlp_layernorm.weight
q               self_attention.linear_qkv.weight#0/k
k               self_attention.linear_qkv.weight#1/k
v               self_attention.linear_qkv.weight#2/k
o               self_attention.linear_proj.weight
up              mlp.linear_fc1.weight
down            mlp.linear_fc2.weight
router          mlp.router.weight
router_bias     mlp.router.expert_bias
latent_in       mlp.fc1_latent_proj.weight
latent_out      mlp.fc2_latent_proj.weight
shared_up       mlp.shared_experts.linear_fc1.weight
shared_down     mlp.shared_experts.linear_fc2.weight
expert_up       mlp.experts.experts.linear_fc1.weight
expert_down     mlp.experts.experts.linear_fc2.weight
"""

MCORE_MTP = """
logical          mcore: mtp.layers.0.
mtp_embed_norm   enorm.weight
mtp_hidden_norm  hnorm.weight
mtp_fc           eh_proj.weight
mtp_norm_1       mtp_model_layer.layers.0.self_attention.linear_qkv.layer_norm_weight
mtp_q            mtp_model_layer.layers.0.self_attention.linear_qkv.weight#0/k
mtp_k            mtp_model_layer.layers.0.self_attention.linear_qkv.weight#1/k
mtp_v            mtp_model_layer.layers.0.self_attention.linear_qkv.weight#2/k
mtp_o            mtp_model_layer.layers.0.self_attention.linear_proj.weight
mtp_norm_2       mtp_model_layer.layers.1.pre_mlp_layernorm.weight
mtp_router       mtp_model_layer.layers.1.mlp.router.weight
mtp_router_bias  mtp_model_layer.layers.1.mlp.router.expert_bias
mtp_latent_in    mtp_model_layer.layers.1.mlp.fc1_latent_proj.weight
mtp_latent_out   mtp_model_layer.layers.1.mlp.fc2_latent_proj.weight
mtp_shared_up    mtp_model_layer.layers.1.mlp.shared_experts.linear_fc1.weight
mtp_shared_down  mtp_model_layer.layers.1.mlp.shared_experts.linear_fc2.weight
mtp_expert_up    mtp_model_layer.layers.1.mlp.experts.experts.linear_fc1.weight
mtp_expert_down  mtp_model_layer.layers.1.mlp.experts.experts.linear_fc2.weight
mtp_norm         final_layernorm.weight
"""

MTP = """
logical                axes     hf: mtp.layers.
mtp_embed_norm?mtp     d        0.enorm.weight
mtp_hidden_norm?mtp    d        0.hnorm.weight
mtp_fc?mtp             d dd     0.eh_proj.weight
mtp_norm_1?mtp         d        0.norm.weight
mtp_q?mtp              (h e) d  0.mixer.q_proj.weight
mtp_k?mtp              (k e) d  0.mixer.k_proj.weight
mtp_v?mtp              (k e) d  0.mixer.v_proj.weight
mtp_o?mtp              d (h e)  0.mixer.o_proj.weight
mtp_norm_2?mtp         d        1.norm.weight
mtp_router?mtp         x d      1.mixer.gate.weight
mtp_router_bias?mtp    x        1.mixer.gate.e_score_correction_bias
mtp_latent_in?mlat     l d      1.mixer.fc1_latent_proj.weight
mtp_latent_out?mlat    d l      1.mixer.fc2_latent_proj.weight
mtp_shared_up?mtp      s d      1.mixer.shared_experts.up_proj.weight
mtp_shared_down?mtp    d s      1.mixer.shared_experts.down_proj.weight
mtp_expert_up?mtp      x m l    1.mixer.experts.{x}.up_proj.weight
mtp_expert_down?mtp    x l m    1.mixer.experts.{x}.down_proj.weight
mtp_norm?mtp           d        1.final_layernorm.weight
"""

FAMILY = Family(
    name="nemotron_h",
    title="Nemotron-H, Nemotron Nano 2, Nemotron 3",
    aliases=("nemotron3", "nemotron_nano_2"),
    layouts=("hf", "hf-v5", "mlx", "mcore"),
    tables=(
        BEFORE,
        "logical  axes  hf, mlx: backbone.layers.{i}.mixer." + MIXER,
        "logical  axes  hf, mlx: backbone.layers.{i}." + LAYER + EXPERTS,
        AFTER,
        "logical  axes  hf-v5: model.layers.{i}.mixer." + MIXER,
        "logical  axes  hf-v5: model.layers.{i}." + LAYER + EXPERTS,
        STACKED,
        MLX_MAMBA,
        MTP,
        MCORE_AROUND,
        MCORE_MAMBA,
        MCORE_LAYER,
        MCORE_MTP,
    ),
    like={"mlx": ""},
    architecture="NemotronHForCausalLM",
    variants=(("mamba", "attention", "dense", "moe"),),
    constants={"one": 1},
    composite={"h": ("k", "q")},
    pinned=("router_bias", "mtp_router_bias"),
    demands=(
        Demand(("conv",), {"use_conv_bias": CHOSEN}),
        Demand(("proj",), {"use_bias": CHOSEN}),
        Demand(("mlp",), {"mlp_bias": CHOSEN}),
        Demand(("latent_in", "latent_out"), {"moe_latent_size": CHOSEN}),
        Demand(("lbias",), {"moe_latent_size": CHOSEN, "mlp_bias": CHOSEN}),
    ),
    formulas=(
        (
            "mp",
            "2 * mamba_num_heads * mamba_head_dim + 2 * n_groups * ssm_state_size"
            " + mamba_num_heads",
        ),
        ("mb", "n_groups * ssm_state_size"),
        ("dd", "2 * hidden_size"),
    ),
    kinds=tuple(
        LayerKind(variant, kinds=("layers_block_type", *words))
        for variant, words in (
            ("mamba", ("mamba", "linear_attention")),
            ("attention", ("attention", "full_attention")),
            ("dense", ("mlp",)),
            ("moe", ("moe",)),
        )
    ),
    sizes={
        **{axis: SIZES[axis] for axis in "vdfhke"},
        "x": ("n_routed_experts", ""),
        "m": ("moe_intermediate_size", ""),
        "s": ("moe_shared_expert_intermediate_size", ""),
        "l": ("moe_latent_size", ""),
        "mh": ("mamba_num_heads", ""),
        "me": ("mamba_head_dim", ""),
        "taps": ("conv_kernel", ""),
        "i": ("num_hidden_layers", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", "mcore"),
    config_signs=({"model_type": "nemotron_h"},),
    megatron=_megatron.NEMOTRON_H,
    tiny=dict(
        v=24,
        d=20,
        dd=40,
        f=12,
        h=8,
        k=4,
        e=6,
        x=4,
        m=10,
        s=14,
        l=7,
        mp=34,
        mb=3,
        mh=4,
        me=3,
        taps=5,
        i=4,
    ),
)
