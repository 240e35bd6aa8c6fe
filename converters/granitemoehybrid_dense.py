"""Granite 4 Nano, Micro: Mamba-2 or attention layers (or only attention), without experts.

Sources: as for ``granitemoehybrid``; mlx-lm calls the feed-forward network by other names here.
"""

from dataclasses import replace

from ckptctl.planner.layouts import UNCHOSEN, Family, Tie

from . import _proofs, granitemoehybrid

MLX = """
logical    mlx: model.layers.{i}.mlp.
shared_w1  gate_proj.weight
shared_w3  up_proj.weight
shared_w2  down_proj.weight
"""

PARTS = granitemoehybrid.FAMILY.tables

FAMILY: Family = replace(
    granitemoehybrid.FAMILY,
    name="granitemoehybrid_dense",
    title="Granite 4.0 Nano, Micro",
    aliases=("granite4",),
    layouts=("hf", "mlx"),
    tables=(*(table for table in PARTS if table != granitemoehybrid.EXPERTS), MLX),
    like={},
    ties=(Tie("output", of="embed"),),
    sizes={k: v for k, v in granitemoehybrid.FAMILY.sizes.items() if k not in ("x", "m")},
    stack_schemes=(),
    proofs=_proofs.get_proofs("hf", "mlx"),
    config_signs=({"model_type": "granitemoehybrid", "num_local_experts": UNCHOSEN},),
    tiny={k: v for k, v in granitemoehybrid.FAMILY.tiny.items() if k not in ("x", "m")},
)
