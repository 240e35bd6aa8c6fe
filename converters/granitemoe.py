"""Granite 3 1B-A400M, 3B-A800M: attention as in Llama, all layers with stacked experts.

Sources: transformers' ``modeling_granitemoe.py`` and ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5), mlx-lm's ``granitemoe.py``; vLLM's
``granitemoe.py`` for scales of stacks.
"""

from ckptctl.planner.layouts import SIZES, Family, Tie

from . import _hf, _proofs, granitemoehybrid, qwen2_moe

NORMS = """
o_bias?     d        self_attn.o_proj.bias
norm_1      d        input_layernorm.weight
norm_2      d        post_attention_layernorm.weight
"""

FAMILY = Family(
    name="granitemoe",
    title="Granite 3 MoE",
    layouts=("hf", "hf-v5", "mlx"),
    tables=(_hf.BEFORE, qwen2_moe.LAYER + NORMS, granitemoehybrid.EXPERTS, _hf.AFTER),
    like={"hf-v5": "hf"},
    architecture="GraniteMoeForCausalLM",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    composite={"h": ("k", "q")},
    sizes={
        **{axis: SIZES[axis] for axis in "vdhkei"},
        "x": ("num_local_experts", ""),
        "m": ("intermediate_size", ""),
    },
    stack_schemes=("fp8-channel",),
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx"),
    config_signs=({"model_type": "granitemoe"},),
    tiny=dict(v=24, d=20, h=8, k=4, e=6, x=3, m=10, i=2),
)
