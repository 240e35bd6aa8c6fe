"""Models whose tensors are in another order than Megatron-Core's: what a wrong axis would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

State = dict[str, torch.Tensor]
Change = Callable[[Any, torch.Tensor], torch.Tensor]


def wrongs(config: Any, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, State]]:
    """Yield the name of each wrong order that the model can have, and its whole state.

    Args:
        config: The model's ``TransformerConfig``.
        state: What is right, of one rank.
    """
    for name, (part, change) in CHANGES.items():
        touched = {key: change(config, value) for key, value in state.items() if part in key}
        if any(not torch.equal(state[key], value) for key, value in touched.items()):
            yield name, {**state, **touched}
    for name, (first, second) in SWAPS.items():
        pairs = [(key, key.replace(first, second)) for key in state if first in key]
        pairs = [pair for pair in pairs if pair[1] in state and _alike(state, *pair)]
        swapped = {a: state[b] for pair in pairs for a, b in (pair, pair[::-1])}
        if swapped:
            yield name, {**state, **swapped}
    bias = {key: value.roll(1) for key, value in state.items() if key.endswith("expert_bias")}
    if bias:
        yield "correction of another expert", {**state, **bias}


def _alike(state: Mapping[str, torch.Tensor], first: str, second: str) -> bool:
    return state[first].shape == state[second].shape


def _cut(value: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Return *value* with a dimension of *count* before what is left of *dim*."""
    return value.reshape(*value.shape[:dim], count, -1, *value.shape[dim + 1 :])


def _groups(config: Any, value: torch.Tensor) -> torch.Tensor:
    """Return ``[group, head in it, e, d]`` of ``linear_qkv``: queries, one key, one value."""
    return value.view(config.num_query_groups, -1, config.kv_channels, value.shape[-1])


def _all_queries_first(config: Any, value: torch.Tensor) -> torch.Tensor:
    groups = _groups(config, value)
    parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
    return torch.cat([part.flatten(0, 2) for part in parts])


def _queries_by_place(config: Any, value: torch.Tensor) -> torch.Tensor:
    groups = _groups(config, value).clone()
    queries = groups[:, :-2]
    groups[:, :-2] = queries.transpose(0, 1).reshape_as(queries)
    return groups.flatten(0, 2)


def _key_and_value(config: Any, value: torch.Tensor) -> torch.Tensor:
    groups = _groups(config, value)
    return torch.cat([groups[:, :-2], groups[:, -1:], groups[:, -2:-1]], 1).flatten(0, 2)


def _neighboring_pairs(config: Any, value: torch.Tensor) -> torch.Tensor:
    if config.is_hybrid_model:
        return value  # nothing is rotated
    groups = _groups(config, value).clone()
    rotated = groups[:, :-1]
    halves = _cut(rotated, 2, 2)
    groups[:, :-1] = halves.transpose(2, 3).flatten(2, 3)
    return groups.flatten(0, 2)


def _up_over_gate(config: Any, value: torch.Tensor) -> torch.Tensor:
    return torch.cat(value.chunk(2)[::-1]) if config.gated_linear_unit else value


def _gate_and_up_in_turn(config: Any, value: torch.Tensor) -> torch.Tensor:
    if not config.gated_linear_unit:
        return value
    return torch.stack(value.chunk(2), 1).flatten(0, 1)


def _rolled(config: Any, value: torch.Tensor) -> torch.Tensor:
    return value.roll(1, 0)


def _heads_of_the_output(config: Any, value: torch.Tensor) -> torch.Tensor:
    heads = _cut(value, 1, config.num_attention_heads)
    return heads.roll(1, 1).flatten(1)


def _keys_then_values(config: Any, value: torch.Tensor) -> torch.Tensor:
    heads = _cut(value, 0, config.num_attention_heads)
    parts = heads.tensor_split([config.qk_head_dim], 1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def _rotated_first(config: Any, value: torch.Tensor) -> torch.Tensor:
    heads = _cut(value, 0, config.num_attention_heads)
    return heads.roll(config.qk_pos_emb_head_dim, 1).flatten(0, 1)


def _rotated_latent_first(config: Any, value: torch.Tensor) -> torch.Tensor:
    return value.roll(config.qk_pos_emb_head_dim, 0)


def _halves_of_the_latent(config: Any, value: torch.Tensor) -> torch.Tensor:
    latent, rotated = value.tensor_split([config.kv_lora_rank])
    return torch.cat([latent, torch.cat([rotated[::2], rotated[1::2]])])


def _gate_beside_its_query(config: Any, value: torch.Tensor) -> torch.Tensor:
    if not config.attention_output_gate:
        return value
    groups = _groups(config, value).clone()
    heads = _cut(groups[:, :-2], 1, 2)
    groups[:, :-2] = heads.transpose(1, 2).flatten(1, 2)
    return groups.flatten(0, 2)


def _delta(config: Any, value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the parts of ``in_proj`` in another *order*."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    heads = config.linear_num_value_heads
    parts = torch.split(value, [keys, keys, values, values, heads, heads])
    return torch.cat([parts[place] for place in order])


def _value_heads_by_place(config: Any, value: torch.Tensor) -> torch.Tensor:
    keys, each = config.linear_num_key_heads, config.linear_value_head_dim
    begin = 2 * keys * config.linear_key_head_dim
    heads = config.linear_num_value_heads * each
    before, part, after = value.tensor_split([begin, begin + heads])
    part = part.view(keys, -1, each, value.shape[-1]).transpose(0, 1)
    return torch.cat([before, part.flatten(0, 2), after])


def _keys_of_the_convolution(config: Any, value: torch.Tensor) -> torch.Tensor:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    query, key, rest = value.tensor_split([keys, 2 * keys])
    return torch.cat([key, query, rest])


def _mamba_state(config: Any) -> int:
    """Return how many channels come in and go out of the state of all groups."""
    count: int = config.mamba_num_groups * config.mamba_state_dim
    return count


def _mamba(config: Any, value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the parts of a Mamba-2 layer's ``in_proj`` in another *order*."""
    heads, state = config.mamba_num_heads, _mamba_state(config)
    width = heads * config.mamba_head_dim
    parts = torch.split(value, [width, width, state, state, heads])
    return torch.cat([parts[place] for place in order])


def _heads_of_mamba(config: Any, value: torch.Tensor) -> torch.Tensor:
    return _cut(value, 1, config.mamba_num_heads).roll(1, 1).flatten(1)


def _one_more(config: Any, value: torch.Tensor) -> torch.Tensor:
    return value + 1


CHANGES: Mapping[str, tuple[str, Change]] = {
    "all queries first": ("linear_qkv.weight", _all_queries_first),
    "queries by their place in a group": ("linear_qkv.weight", _queries_by_place),
    "value before key": ("linear_qkv.weight", _key_and_value),
    "neighboring pairs rotated": ("linear_qkv.weight", _neighboring_pairs),
    "gates beside their queries": ("linear_qkv.weight", _gate_beside_its_query),
    "keys of a delta net first": (
        "self_attention.in_proj.weight",
        lambda config, value: _delta(config, value, (1, 0, 2, 3, 4, 5)),
    ),
    "gates of a delta net before values": (
        "self_attention.in_proj.weight",
        lambda config, value: _delta(config, value, (0, 1, 3, 2, 4, 5)),
    ),
    "decay of a delta net first": (
        "self_attention.in_proj.weight",
        lambda config, value: _delta(config, value, (0, 1, 2, 3, 5, 4)),
    ),
    "values of a delta net by their place": (
        "self_attention.in_proj.weight",
        _value_heads_by_place,
    ),
    "keys of the convolution first": ("self_attention.conv1d.weight", _keys_of_the_convolution),
    "gates of Mamba after values": (
        "mixer.in_proj.weight",
        lambda config, value: _mamba(config, value, (1, 0, 2, 3, 4)),
    ),
    "inputs and outputs of Mamba's state": (
        "mixer.in_proj.weight",
        lambda config, value: _mamba(config, value, (0, 1, 3, 2, 4)),
    ),
    "steps of Mamba first": (
        "mixer.in_proj.weight",
        lambda config, value: _mamba(config, value, (4, 0, 1, 2, 3)),
    ),
    "state first in the convolution": (
        "mixer.conv1d",
        lambda config, value: value.roll(_mamba_state(config), 0),
    ),
    "skip of another head": ("mixer.D", _rolled),
    "decay of another head": ("mixer.A_log", _rolled),
    "steps of another head": ("mixer.dt_bias", _rolled),
    "heads of Mamba's output": ("mixer.out_proj.weight", _heads_of_mamba),
    "norm of a delta net plus one": ("out_norm.weight", _one_more),
    "heads of the output": ("linear_proj.weight", _heads_of_the_output),
    "up over gate": ("linear_fc1.weight", _up_over_gate),
    "gate and up in turn": ("linear_fc1.weight", _gate_and_up_in_turn),
    "router of another expert": ("router.weight", _rolled),
    "keys of the indexer rolled": ("indexer.linear_wk.weight", _rolled),
    "heads of the indexer": ("indexer.linear_weights_proj.weight", _rolled),
    "keys of all heads first": ("linear_kv_up_proj.weight", _keys_then_values),
    "rotated part of a query first": ("linear_q_up_proj.weight", _rotated_first),
    "rotated part of a query first, no latent": ("linear_q_proj.weight", _rotated_first),
    "rotated part of the latent first": ("linear_kv_down_proj.weight", _rotated_latent_first),
    "halves of the latent rotated": ("linear_kv_down_proj.weight", _halves_of_the_latent),
}
SWAPS: Mapping[str, tuple[str, str]] = {
    "norms of queries and keys": ("q_layernorm.weight", "k_layernorm.weight"),
    "norms of attention and MLP": ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
}
