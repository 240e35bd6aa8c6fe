"""Llama key tables, typed out by hand from the projects that define them.

Sources: llama-models ``models/llama3/model.py``; torchtune 0.6.1 ``modules/transformer.py``;
torchtitan 0.2.2 and 0.3.0 ``models/llama3``; transformers 5.24 ``models/llama``.
"""

from __future__ import annotations

import re
from typing import Literal

import torch

Layout = Literal["hf", "meta", "torchtune", "torchtitan@0.2", "torchtitan@0.3"]

LAYOUTS: tuple[Layout, ...] = ("hf", "meta", "torchtune", "torchtitan@0.2", "torchtitan@0.3")

# hf | meta | torchtune | torchtitan@0.2 | torchtitan@0.3, without `.weight` except where it differs
_TABLE = """
model.embed_tokens.weight | tok_embeddings.weight | tok_embeddings.weight | = | =
model.layers.#.self_attn.q_proj.weight | layers.#.attention.wq.weight | layers.#.attn.q_proj.weight | = | layers.#.attention.qkv_linear.wq.weight
model.layers.#.self_attn.k_proj.weight | layers.#.attention.wk.weight | layers.#.attn.k_proj.weight | = | layers.#.attention.qkv_linear.wk.weight
model.layers.#.self_attn.v_proj.weight | layers.#.attention.wv.weight | layers.#.attn.v_proj.weight | = | layers.#.attention.qkv_linear.wv.weight
model.layers.#.self_attn.o_proj.weight | layers.#.attention.wo.weight | layers.#.attn.output_proj.weight | = | =
model.layers.#.mlp.gate_proj.weight | layers.#.feed_forward.w1.weight | layers.#.mlp.w1.weight | = | =
model.layers.#.mlp.down_proj.weight | layers.#.feed_forward.w2.weight | layers.#.mlp.w2.weight | = | =
model.layers.#.mlp.up_proj.weight | layers.#.feed_forward.w3.weight | layers.#.mlp.w3.weight | = | =
model.layers.#.input_layernorm.weight | layers.#.attention_norm.weight | layers.#.sa_norm.scale | = | =
model.layers.#.post_attention_layernorm.weight | layers.#.ffn_norm.weight | layers.#.mlp_norm.scale | = | =
model.norm.weight | norm.weight | norm.scale | = | =
lm_head.weight | output.weight | output.weight | = | lm_head.weight
"""  # noqa: E501


def _rows() -> list[dict[Layout, str]]:
    rows = []
    for line in _TABLE.strip().splitlines():
        hf, meta, tune, titan2, titan3 = (cell.strip() for cell in line.split("|"))
        rows.append(
            {
                "hf": hf,
                "meta": meta,
                "torchtune": tune,
                "torchtitan@0.2": meta if titan2 == "=" else titan2,
                "torchtitan@0.3": meta if titan3 == "=" else titan3,
            }
        )
    return rows  # type: ignore[return-value]


ROWS = _rows()


def rename(
    state: dict[str, torch.Tensor], source: Layout, target: Layout
) -> dict[str, torch.Tensor]:
    """Return *state* under the names of another layout; values and axis orders stay.

    Raises:
        KeyError: A key is not one of *source*'s.
    """
    forward = {row[source]: row[target] for row in ROWS}
    renamed = {}
    for name, value in state.items():
        number = re.search(r"\.(\d+)\.", name)
        template = name.replace(number[0], ".#.", 1) if number else name
        renamed[forward[template].replace("#", number[1] if number else "")] = value
    return renamed
