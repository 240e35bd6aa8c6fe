"""Experts in llm-compressor's models, in which each projection of an expert is a linear layer.

compressed-tensors stores no stacks of experts. Families with stacks therefore have this layout in
addition to that of transformers. Sources: llm-compressor's ``modeling/moe/linear_experts.py`` and
``llama4.py``, and ``split_fused_moe_experts`` in its ``entrypoints/model_free/converter.py``.
"""

EXPERTS = """
expert_w1  {x}.gate_proj.weight m d
expert_w3  {x}.up_proj.weight m d
expert_w2  {x}.down_proj.weight d m
"""


def build_table(module: str) -> str:
    """Build the table of the layout from the key of the stacks' *module*."""
    return f"logical  llm-compressor: {module}.{EXPERTS}"
