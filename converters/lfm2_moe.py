"""LFM2 8B-A1B, 24B-A2B: the first layers dense, experts in the others.

Sources: transformers' ``modeling_lfm2_moe.py`` and ``conversion_mapping.py`` (``hf-v5``: in-memory
names of transformers 5), mlx-lm's ``lfm2_moe.py``. transformers' ``FP8Experts`` requires
``hidden_act``, which ``Lfm2MoeConfig`` does not have.
"""

from dataclasses import replace

from ckptctl.planner.layouts import CHOSEN, Demand, Family, LayerKind, Tie

from . import _hf, _proofs, lfm2

FEED_FORWARD = """
w1@dense          f d    feed_forward.w1.weight
w3@dense          f d    feed_forward.w3.weight
w2@dense          d f    feed_forward.w2.weight
router@moe        x d    feed_forward.gate.weight
router_bias@moe?  x      feed_forward.expert_bias
expert_w1@moe     x m d  feed_forward.experts.{x}.w1.weight
expert_w3@moe     x m d  feed_forward.experts.{x}.w3.weight
expert_w2@moe     x d m  feed_forward.experts.{x}.w2.weight
"""

V5 = """
logical    hf-v5: model.layers.{i}.feed_forward.experts.
expert_w1  gate_up_proj#0.1
expert_w3  gate_up_proj#1.1
expert_w2  down_proj
"""

MLX = """
logical    mlx: model.layers.{i}.feed_forward.
w1         gate_proj.weight
w3         up_proj.weight
w2         down_proj.weight
expert_w1  switch_mlp.gate_proj.weight
expert_w3  switch_mlp.up_proj.weight
expert_w2  switch_mlp.down_proj.weight
"""

FAMILY: Family = replace(
    lfm2.FAMILY,
    name="lfm2_moe",
    title="LFM2 8B-A1B, 24B-A2B",
    aliases=(),
    layouts=("hf", "hf-v5", "mlx"),
    tables=(_hf.BEFORE, lfm2.OPERATOR + FEED_FORWARD, lfm2.AFTER, V5, lfm2.MLX, MLX),
    like={"hf-v5": "hf"},
    architecture="Lfm2MoeForCausalLM",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    variants=(("conv", "attention"), ("dense", "moe")),
    experts_apart=True,
    demands=(*lfm2.FAMILY.demands, Demand(("router_bias",), {"use_expert_bias": CHOSEN})),
    kinds=(*lfm2.FAMILY.kinds, LayerKind("dense", first="num_dense_layers")),
    sizes=dict(lfm2.FAMILY.sizes)
    | {
        "f": ("intermediate_size", ""),
        "x": ("num_experts", ""),
        "m": ("moe_intermediate_size", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx"),
    config_signs=({"model_type": "lfm2_moe"},),
    tiny=dict(lfm2.FAMILY.tiny) | {"x": 3, "m": 10},
)
