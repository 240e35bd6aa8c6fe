"""Granite 4 Tiny, Small: Mamba-2 or attention layers, routed experts and a shared expert.

Sources: transformers' ``modeling_granitemoehybrid.py`` and ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5), mlx-lm's ``granitemoehybrid.py``; vLLM's
``granitemoehybrid.py`` for scales of stacks.
"""

from ckptctl.planner.layouts import CHOSEN, SIZES, Demand, Family, LayerKind, Tie

from . import _hf, _proofs, nemotron_h

LAYER = """
logical               axes     hf: model.layers.{i}.
q@attention           (h e) d  self_attn.q_proj.weight
q_bias@attention?qkv  (h e)    self_attn.q_proj.bias
k@attention           (k e) d  self_attn.k_proj.weight
k_bias@attention?qkv  (k e)    self_attn.k_proj.bias
v@attention           (k e) d  self_attn.v_proj.weight
v_bias@attention?qkv  (k e)    self_attn.v_proj.bias
o@attention           d (h e)  self_attn.o_proj.weight
o_bias@attention?qkv  d        self_attn.o_proj.bias
shared_w1             s d      shared_mlp.input_linear.weight#0
shared_w3             s d      shared_mlp.input_linear.weight#1
shared_w2             d s      shared_mlp.output_linear.weight
norm_1                d        input_layernorm.weight
norm_2                d        post_attention_layernorm.weight
"""

EXPERTS = """
logical    axes   hf: model.layers.{i}.block_sparse_moe.  hf-v5: model.layers.{i}.block_sparse_moe.  mlx: model.layers.{i}.block_sparse_moe.
router     x d    router.layer.weight                     router.weight                              router.layer.weight
expert_w1  x m d  input_linear.weight#0.1                 experts.gate_up_proj#0.1                   switch_mlp.gate_proj.weight
expert_w3  x m d  input_linear.weight#1.1                 experts.gate_up_proj#1.1                   switch_mlp.up_proj.weight
expert_w2  x d m  output_linear.weight                    experts.down_proj                          switch_mlp.down_proj.weight
"""  # noqa: E501

MLX = """
logical     mlx: model.layers.{i}.
mamba_conv  mamba.conv1d.weight mc taps one
"""

FAMILY = Family(
    name="granitemoehybrid",
    title="Granite 4.0 Tiny, Small",
    layouts=("hf", "hf-v5", "mlx"),
    tables=(
        _hf.BEFORE,
        "logical  axes  hf: model.layers.{i}.mamba." + nemotron_h.MAMBA + nemotron_h.MAMBA_NORM,
        LAYER,
        EXPERTS,
        _hf.AFTER,
        MLX,
    ),
    like={"hf-v5": "hf"},
    architecture="GraniteMoeHybridForCausalLM",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    variants=(("mamba", "attention"),),
    constants={"one": 1},
    composite={"h": ("k", "q")},
    demands=(
        Demand(("conv",), {"mamba_conv_bias": CHOSEN}),
        Demand(("proj",), {"mamba_proj_bias": CHOSEN}),
    ),
    formulas=(
        (
            "mp",
            "2 * mamba_expand * hidden_size + 2 * mamba_n_groups * mamba_d_state + mamba_n_heads",
        ),
        ("mc", "mamba_expand * hidden_size + 2 * mamba_n_groups * mamba_d_state"),
        ("me", "mamba_d_head"),
    ),
    kinds=(
        LayerKind("mamba", kinds=("layer_types", "mamba", "linear_attention")),
        LayerKind("mamba", kinds=("layers_block_type", "mamba", "linear_attention")),
    ),
    sizes={
        **{axis: SIZES[axis] for axis in "vdhk"},
        "x": ("num_local_experts", ""),
        "m": ("intermediate_size", ""),
        "s": ("shared_intermediate_size", ""),
        "mh": ("mamba_n_heads", ""),
        "taps": ("mamba_d_conv", ""),
        "i": ("num_hidden_layers", ""),
    },
    stack_schemes=("fp8-channel",),
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx"),
    config_signs=({"model_type": "granitemoehybrid", "num_local_experts": CHOSEN},),
    tiny=dict(v=24, d=20, h=8, k=4, e=6, x=3, m=10, s=14, mp=27, mc=18, mh=4, me=3, taps=5, i=4),
)
