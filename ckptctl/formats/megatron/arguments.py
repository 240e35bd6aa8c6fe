"""What Megatron's arguments say of the model, in the words of config.json.

Source: ``megatron/training/arguments.py``. The vocabulary is padded for the ranks, and of rotary
scaling the arguments know other kinds than transformers: neither is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_SAME = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("intermediate_size",),
    "num_attention_heads": ("num_attention_heads",),
    "kv_channels": ("head_dim",),
    "rotary_base": ("rope_theta",),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
}
_ROTARY = "rope"


def described(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the facts that *arguments* state, under each of the names that config.json may use."""
    return dict(_facts(arguments))


def _facts(arguments: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    rotary = arguments.get("position_embedding_type") == _ROTARY
    for name, called in _SAME.items():
        value = arguments.get(name)
        if isinstance(value, (int, float)) and (rotary or name != "rotary_base"):
            yield from ((one, value) for one in called)
    heads = arguments.get("num_query_groups")
    if arguments.get("group_query_attention") is True and isinstance(heads, int):
        yield "num_key_value_heads", heads
    untied = arguments.get("untie_embeddings_and_output_weights")
    if isinstance(untied, bool):
        yield "tie_word_embeddings", not untied
