"""Nemotron-H, Nemotron Nano 2, Nemotron 3: every layer is Mamba-2, attention, dense or experts.

Experts have no gate, and may work on a latent of the hidden state. transformers ignores the MTP
layer in files (``mtp``, attention, then experts). Its in-memory models and mlx-lm do not have this
layer, so it is missing in ``hf-v5`` and ``mlx``.

Sources: transformers' ``modeling_nemotron_h.py`` and ``conversion_mapping.py``, mlx-lm's
``nemotron_h.py``; for ``mtp`` vLLM's ``nemotron_h_mtp.py``.
"""

from ckptctl.planner.layouts import CHOSEN, SIZES, Demand, Family, LayerKind

from . import _proofs

BEFORE = """
logical  axes  hf, mlx: backbone.  hf-v5: model.
embed    v d   embeddings.weight   embeddings.weight
"""

MAMBA = """
mamba_in@mamba              mp d         in_proj.weight
mamba_conv@mamba            mc one taps  conv1d.weight
mamba_conv_bias@mamba?conv  mc           conv1d.bias
mamba_dt_bias@mamba         mh           dt_bias
mamba_a_log@mamba           mh           A_log
mamba_skip@mamba            mh           D
mamba_out@mamba             d (mh me)    out_proj.weight
"""

MAMBA_NORM = """
mamba_norm@mamba           (mh me)  norm.weight
mamba_in_bias@mamba?proj   mp       in_proj.bias
mamba_out_bias@mamba?proj  d        out_proj.bias
"""

LAYER = """
norm                  d        norm.weight
q@attention           (h e) d  mixer.q_proj.weight
k@attention           (k e) d  mixer.k_proj.weight
v@attention           (k e) d  mixer.v_proj.weight
o@attention           d (h e)  mixer.o_proj.weight
up@dense              f d      mixer.up_proj.weight
up_bias@dense?mlp     f        mixer.up_proj.bias
down@dense            d f      mixer.down_proj.weight
down_bias@dense?mlp   d        mixer.down_proj.bias
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
logical     mlx: backbone.layers.{i}.mixer.
mamba_conv  conv1d.weight mc taps one
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
    layouts=("hf", "hf-v5", "mlx"),
    tables=(
        BEFORE,
        "logical  axes  hf, mlx: backbone.layers.{i}.mixer." + MAMBA + MAMBA_NORM,
        "logical  axes  hf, mlx: backbone.layers.{i}." + LAYER + EXPERTS,
        AFTER,
        "logical  axes  hf-v5: model.layers.{i}.mixer." + MAMBA + MAMBA_NORM,
        "logical  axes  hf-v5: model.layers.{i}." + LAYER + EXPERTS,
        STACKED,
        MLX_MAMBA,
        MTP,
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
        ("mc", "mamba_num_heads * mamba_head_dim + 2 * n_groups * ssm_state_size"),
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
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx"),
    config_signs=({"model_type": "nemotron_h"},),
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
        mp=27,
        mc=18,
        mh=4,
        me=3,
        taps=5,
        i=4,
    ),
)
