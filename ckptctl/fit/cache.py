"""Cache of each layer of a model: keys and values, latents, or states.

Tables of the family and shapes of the tensors show what a layer caches. config.json states windows
and sizes that no tensor has. Whatever is not known is an error with a reason, never a guess.

====================  ========================================  ===================================
tensors of a layer    elements per token                        elements per request
====================  ========================================  ===================================
``k``, ``v``          rows of ``k`` + rows of ``v``             -
``kv_a``              rows of ``kv_a`` (latent and rotary key)  -
``kv_b`` alone        - (the latent of an earlier layer)        -
``index_k``           rows of ``index_k`` and ``index_gate``    -
``kv``                rows of ``kv``, in a window               -
``comp_kv``           rows of ``kv`` and ``index_norm`` for     rows of ``comp_kv`` and
                      each group of tokens                      ``comp_gate`` of an open group
``linear_norm``       -                                         rows of it x head dimension
``linear_conv_*``     -                                         channels x (taps - 1), and key
                                                                dimension x rows of values
``mamba_conv*``       -                                         channels x (taps - 1), and
                                                                state size x inner size
``conv``              -                                         channels x (taps - 1)
``k_conv``, ...       -                                         channels x (taps - 1) for each
``ple_conv``          -                                         channels x (taps - 1) x dilation
====================  ========================================  ===================================

Sources: vLLM's ``v1/kv_cache_interface.py`` (``FullAttentionSpec``, ``MLAAttentionSpec``,
``SlidingWindowSpec``, ``ChunkedLocalAttentionSpec``, ``MambaSpec``),
``layers/mamba/mamba_utils.py`` (``MambaStateShapeCalculator``, ``MambaStateDtypeCalculator``) and
``models/deepseek_v2.py`` (``DeepseekV32IndexerCache``), and transformers' ``cache_utils.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptctl.dtypes import parse_dtype
from ckptctl.errors import MappingError
from ckptctl.fit.sharding import (
    LAYERS,
    get_layer_sizes,
    get_logical_name,
    is_layer_tensor,
)
from ckptctl.planner.axes import AxisSizes
from ckptctl.planner.config_facts import (
    FULL_ATTENTION,
    LOCAL_ATTENTION,
    Json,
    find_default_size,
)
from ckptctl.planner.families.declarations import choose_field_alias, get_nested
from ckptctl.planner.families.tables import Leaf
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.matching import MatchedKeys
from ckptctl.units import pluralize

FULL, SLIDING, CHUNKED = "full attention", "sliding window", "chunked attention"
LATENT, LINEAR = "latent attention", "linear attention"
STATE_SPACE, CONVOLUTION = "state space", "convolution"
COMPRESSED = "attention compressed"

INDEXED_TYPES = ("indexed_attention", "minimax_m3_sparse")
FULL_TYPES = (FULL_ATTENTION, "attention", "hybrid", *INDEXED_TYPES)
SLIDING_TYPES = (LOCAL_ATTENTION, "hybrid_sliding")
CHUNKED_TYPES = ("chunked_attention",)
STATE_TYPES = ("linear_attention", "mamba", "conv", "moe", "mlp")
"""Values of ``layer_types`` in config.json: types with each kind of cache."""
WINDOW_FIELDS = ("sliding_window", "sliding_window_size")
ALL_LAYERS_SLIDE = ("ministral3", "mistral", "mixtral", "phi3", "starcoder2")
"""Values of ``model_type`` of models whose layers all have the window that config.json states."""
SPARSE_LATENT = ("deepseek_v32", "glm_moe_dsa")
"""Families with DeepSeek's sparse attention, whose indexer caches keys of its own."""
UNCHUNKED_INTERVAL = 4
"""Default of ``no_rope_layer_interval`` in transformers' ``Llama4TextConfig``."""
WITHOUT_LAYERS_OF_TEXT = {
    "clip_text": "the model is an encoder, which has no KV cache",
    "llama3_vision": "cross-attention layers also cache the images of a request",
    "qwen3_omni_moe": "the model consists of several models that generate",
    "t5_encoder": "the model is an encoder, which has no KV cache",
}
UNCACHED_WORDS = {
    *("w1", "w2", "w3", "w13", "up", "down", "norm", "router", "expert", "shared", "dense", "moe"),
    *("mlp", "latent", "pool", "unpool", "layer", "residual", "alpha", "beta", "epsilon", "ple"),
    *("altup", "laurel"),
}
"""First words of names of tensors that do not belong to attention."""
ATTENTION_WORDS = {
    *("q", "k", "v", "o", "r", "qkv", "kv", "gate", "sinks", "linear", "mamba", "conv", "ssmax"),
    *("post", "vision", "attn", "ffn", "hc", "scale", "attention", "relative", "index"),
}
"""First words of names of tensors of layers with a cache that is described."""
FUSED_AXES = ("n", "d")
"""Axes of queries, keys and values in one tensor, with fewer heads of keys than of queries."""
COMPRESSOR_WORD, COMPRESSOR = "comp", ("comp_kv", "comp_gate", "comp_place", "comp_norm")
"""First word of names of tensors that compress groups of tokens, and the complete set of them."""
INDEX_NAMES = ("index_k", "index_gate")
"""Tensors of an indexer that compute what it caches: keys, and gates by which it joins them."""
HEAD_CONVOLUTIONS, HIDDEN_CONVOLUTIONS = ("k_conv", "v_conv"), ("conv_1", "conv_2")
"""Short convolutions of keys and values, and of what attention and experts return."""
INDEXER_BLOCK, SCALE_BYTES = 128, 4
"""Block size of the fp8 keys of an indexer, and of fp8 latents, and the bytes of its scale."""
STATE_FIELDS = ("mamba_d_state", "ssm_state_size")
GROUP_FIELDS = ("mamba_n_groups", "n_groups")
SSM_DTYPE = "mamba_ssm_dtype"
SSM_DTYPE_FIELDS = (SSM_DTYPE, "mamba_ssm_cache_dtype")
SSM_DTYPES = {"nemotron_h": "float32"}
"""Dtypes of recurrent states by ``model_type``, if config.json states none, as in vLLM's
``NemotronHForCausalLMConfig``."""


class UnknownCacheError(MappingError):
    """The cache of a model cannot be determined."""


@dataclass(frozen=True, slots=True)
class State:
    """Elements that a layer keeps for each request, independent of its length.

    Attributes:
        elements: Number of elements that tensor-parallel ranks split.
        grouped: Number of elements for each group of a state space layer.
        groups: Number of groups. If ranks outnumber groups, each rank has one group.
        dtype: Dtype of the elements, or None for the dtype of the model.
    """

    elements: int
    grouped: int = 0
    groups: int = 1
    dtype: str | None = None

    def count_elements(self, ranks: int) -> int:
        """Count the elements on each of *ranks* ranks.

        Raises:
            UnknownCacheError: They cannot be divided.
        """
        if self.elements % ranks:
            raise UnknownCacheError(f"a state of {self.elements} cannot be divided by {ranks}")
        groups = self.groups // ranks if self.groups % ranks == 0 else 1
        return self.elements // ranks + self.grouped * groups


@dataclass(frozen=True, slots=True)
class CompressedTokens:
    """Cache of groups of tokens, of which each has one entry.

    Attributes:
        tokens: Number of tokens of a group.
        elements: Elements of an entry.
        index_elements: Elements of an entry of the indexer, in the dtype of the model.
    """

    tokens: int
    elements: int
    index_elements: int = 0


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Cache of one layer.

    Attributes:
        kind: Kind of the layer.
        elements: Elements per token.
        heads: Number of key/value heads, which tensor-parallel ranks split. 0 if every rank has all
            elements, and None if the number is unknown.
        window: Largest number of cached tokens, or None if there is no limit.
        states: States per request.
        index_elements: Elements per token of an indexer, which every rank has in the dtype of the
            model.
        compressed: Cache of groups of tokens next to that of single ones, or None.
        extra_bytes: Bytes per token that do not depend on any dtype.
        fp8_bytes: Bytes per token with an fp8 cache, if they are not those of *elements*.
    """

    kind: str
    elements: int = 0
    heads: int | None = 0
    window: int | None = None
    states: tuple[State, ...] = ()
    index_elements: int = 0
    compressed: CompressedTokens | None = None
    extra_bytes: int = 0
    fp8_bytes: int = 0

    def count_elements(self, ranks: int) -> int:
        """Count the elements per token on each of *ranks* ranks.

        Raises:
            UnknownCacheError: The heads cannot be divided.
        """
        if self.heads == 0 or ranks == 1:
            return self.elements
        if self.heads is None:
            raise UnknownCacheError("the number of key/value heads is unknown")
        if self.heads % ranks and ranks % self.heads:
            raise UnknownCacheError(
                f"{self.heads} key/value heads cannot be divided among {ranks} ranks"
            )
        return self.elements // self.heads * max(1, self.heads // ranks)


@dataclass(frozen=True)
class _Layer:
    """Tensors of one layer.

    Attributes:
        rows: Number of elements of each tensor, by name without indices, divided by the hidden
            size if the tensor has that axis.
        leaves: Leaf of each tensor.
        shapes: Shape of each stored tensor.
    """

    number: int
    rows: dict[str, int] = field(default_factory=dict)
    leaves: dict[str, Leaf] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


def find_text_config(family: Family, config: Json) -> Json:
    """Return the part of config.json that describes the language model."""
    name = choose_field_alias(config, family.sizes[LAYERS][0]) if LAYERS in family.sizes else ""
    module = name.rpartition(".")[0]
    holder = get_nested(config, module) if module else config
    return holder if isinstance(holder, Mapping) else config


def describe_layers(
    family: Family,
    matched: MatchedKeys,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: AxisSizes,
    config: Json,
) -> list[LayerCache | None]:
    """Describe the cache of every layer, or None for a layer that caches nothing.

    Args:
        family: The model type.
        matched: Matched keys of the model.
        shapes: Shapes of the tensors, by key.
        sizes: Sizes of the axes.
        config: config.json.

    Raises:
        UnknownCacheError: The cache of a layer cannot be determined.
    """
    if reason := WITHOUT_LAYERS_OF_TEXT.get(family.name):
        raise UnknownCacheError(reason)
    text = find_text_config(family, config)
    layers = _collect_layers(family, matched, shapes, sizes)
    if [layer.number for layer in layers] != list(range(len(layers))) or not layers:
        raise UnknownCacheError("not all layers are present")
    has_keys = any("k" in layer.rows or "qkv" in layer.rows for layer in layers)
    windows = _find_windows(family, text, len(layers)) if has_keys else [None] * len(layers)
    shared = text.get("num_kv_shared_layers")
    first_shared = len(layers) - (shared if isinstance(shared, int) else 0)
    caches: list[LayerCache | None] = []
    for layer, window in zip(layers, windows, strict=True):
        layer_sizes = get_layer_sizes(family, sizes, config, layer.number, len(layers))
        is_shared = layer.number >= first_shared
        cache = None if is_shared else _describe_layer(family, layer, window, layer_sizes, text)
        caches.append(cache)
    return caches


def _collect_layers(
    family: Family, matched: MatchedKeys, shapes: Mapping[str, tuple[int, ...]], sizes: AxisSizes
) -> list[_Layer]:
    """Collect the tensors of every layer."""
    hidden_size = sizes.axes.get("d")
    layers: dict[int, _Layer] = {}
    for group in matched.groups:
        for tensor, leaf in group.stored.parts:
            if not is_layer_tensor(tensor) or not family.expert_axes.isdisjoint(leaf.axes):
                continue
            name = get_logical_name(tensor)
            numbers = group.iterate_index_values(tensor.indices)
            for (*outer, number), key in zip(numbers, group.keys, strict=True):
                if (tensor.name, (*outer, number)) in matched.excluded:
                    continue
                layer = layers.setdefault(number, _Layer(number))
                layer.leaves[name], layer.shapes[name] = leaf, shapes[key]
                rows = _count_rows(family, leaf, shapes[key], hidden_size, sizes)
                if rows is None:
                    raise UnknownCacheError(f"the size of a part of `{key}` is unknown")
                layer.rows[name] = rows + layer.rows.get(name, 0)
    return [layers[number] for number in sorted(layers)]


def _count_rows(
    family: Family,
    leaf: Leaf,
    shape: tuple[int, ...],
    hidden_size: int | None,
    sizes: AxisSizes,
) -> int | None:
    """Count the elements of a tensor, without the hidden size, or return None if it is unknown."""
    axes = tuple(axis for axis in leaf.axes if axis != "d")
    if leaf.part is not None:
        return sizes.find_size(family.expand_axes(axes))
    if len(axes) == len(leaf.axes):
        return math.prod(shape)
    return math.prod(shape) // hidden_size if hidden_size else None


# -------------------------------------------------------------------------------- windows


def _find_windows(family: Family, text: Json, count: int) -> list[tuple[str, int | None] | None]:
    """Return the kind and the window of the attention of every layer."""
    types = text.get("layer_types")
    if isinstance(types, list):
        if len(types) < count:
            raise UnknownCacheError(f"`layer_types` does not describe {pluralize(count, 'layer')}")
        return [_find_window_of_type(text, kind) for kind in types[:count]]
    full, unset = (FULL, None), object()
    if text.get("attention_chunk_size") is not None:
        return _find_chunked_layers(text, count)
    window = next((text[name] for name in WINDOW_FIELDS if name in text), unset)
    if text.get("use_sliding_window") is False or window is None:
        return [full] * count
    if window is unset:
        style = family.megatron
        if style and any(fact.config == "sliding_window" for fact in style.facts):
            raise UnknownCacheError("config.json does not state `sliding_window`")
        return [full] * count
    local = (SLIDING, _read_count(text, WINDOW_FIELDS))
    if text.get("model_type") in ALL_LAYERS_SLIDE:
        return [local] * count
    is_full = _find_full_layers(family, text, count)
    return [full if number in is_full else local for number in range(count)]


def _find_full_layers(family: Family, text: Json, count: int) -> set[int]:
    """Return the numbers of the layers without a window, if config.json lists no types."""
    pattern = text.get("hybrid_layer_pattern")
    if isinstance(pattern, list) and len(pattern) >= count:
        return {number for number in range(count) if pattern[number] == 0}
    first_local = text.get("max_window_layers")
    if text.get("use_sliding_window") is True and isinstance(first_local, int):
        return set(range(min(first_local, count)))
    kind, default_period = family.megatron.layer_pattern if family.megatron else ("", 1)
    period = text.get("sliding_window_pattern", default_period if kind == LOCAL_ATTENTION else None)
    if isinstance(period, int) and period > 0:
        return {number for number in range(count) if (number + 1) % period == 0}
    raise UnknownCacheError(
        "config.json states `sliding_window`, but not the layers that have the window"
    )


def _find_window_of_type(text: Json, kind: object) -> tuple[str, int | None] | None:
    if kind in FULL_TYPES:
        return FULL, None
    if kind in SLIDING_TYPES:
        return SLIDING, _read_count(text, WINDOW_FIELDS)
    if kind in CHUNKED_TYPES:
        return CHUNKED, _read_count(text, ("attention_chunk_size",))
    if kind in STATE_TYPES:
        return None
    raise UnknownCacheError(f"unsupported layer type `{kind}` in config.json")


def _find_chunked_layers(text: Json, count: int) -> list[tuple[str, int | None] | None]:
    """Return the kind and the window of the layers of Llama 4 if config.json lists no types."""
    chunked = CHUNKED, _read_count(text, ("attention_chunk_size",))
    rotated = text.get("no_rope_layers")
    if not rotated:
        interval = text.get("no_rope_layer_interval", UNCHUNKED_INTERVAL)
        if not isinstance(interval, int) or interval < 1:
            raise UnknownCacheError("`no_rope_layer_interval` is not a positive number")
        rotated = [int((number + 1) % interval != 0) for number in range(count)]
    if not isinstance(rotated, list) or len(rotated) < count:
        raise UnknownCacheError(f"`no_rope_layers` does not describe {pluralize(count, 'layer')}")
    return [chunked if is_rotated else (FULL, None) for is_rotated in rotated[:count]]


def _read_count(text: Json, names: Sequence[str]) -> int:
    """Return the first positive number among the fields *names* of config.json.

    Raises:
        UnknownCacheError: None of them is a positive number.
    """
    for name in names:
        value = text.get(name, find_default_size(text, name))
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    stated = next((name for name in names if name in text), None)
    raise UnknownCacheError(
        f"`{stated}` in config.json is not a positive number"
        if stated
        else f"config.json does not state `{names[0]}`"
    )


# --------------------------------------------------------------------------------- layers


def _describe_layer(
    family: Family,
    layer: _Layer,
    window: tuple[str, int | None] | None,
    sizes: AxisSizes,
    text: Json,
) -> LayerCache | None:
    """Describe the cache of one layer."""
    caches = list(_iterate_caches(family, layer, window, sizes, text))
    _require_known_tensors(layer, is_cached=bool(caches) or _reuses_latent(layer))
    if not caches:
        return None
    first, *others = caches
    keyed = next((cache for cache in caches if cache.elements), first)
    states = tuple(state for cache in caches for state in cache.states)
    short = _describe_short_convolutions(layer, keyed, sizes)
    return replace(
        keyed,
        kind=keyed.kind if not others else f"{keyed.kind} + {STATE_SPACE}",
        states=(*states, *short),
    )


def _reuses_latent(layer: _Layer) -> bool:
    """Return whether the layer attends to the latent of an earlier one, and caches nothing."""
    names = layer.rows.keys()
    return "kv_b" in names and names.isdisjoint(("kv_a", *INDEX_NAMES))


def _require_known_tensors(layer: _Layer, *, is_cached: bool) -> None:
    """Raise if a tensor of the layer may belong to a cache that is not described."""
    known_words = UNCACHED_WORDS | (ATTENTION_WORDS if is_cached else set())
    if layer.rows.keys().isdisjoint(INDEX_NAMES):
        known_words -= {"index"}
    if layer.rows.keys() >= set(COMPRESSOR):
        known_words |= {COMPRESSOR_WORD}
    unknown = [name for name in layer.rows if name.partition("_")[0] not in known_words]
    for name in unknown:
        key = layer.leaves[name].key.text
        raise UnknownCacheError(f"the cache of layers with `{key}` is not supported")


def _iterate_caches(
    family: Family,
    layer: _Layer,
    window: tuple[str, int | None] | None,
    sizes: AxisSizes,
    text: Json,
) -> Iterator[LayerCache]:
    rows = layer.rows
    if "kv_a" in rows:
        yield _describe_latent(family, layer)
    if "kv" in rows:
        yield _describe_compressed(layer, text)
    if "linear_norm" in rows and "qkv" in rows:
        yield _describe_lightning(layer, sizes)
    elif "k" in rows or "qkv" in rows:
        if window is None:
            raise UnknownCacheError("`layer_types` contradicts the tensors of a layer")
        kind, tokens = window
        elements = _count_keys_and_values(layer, text)
        index = _count_index_elements(layer)
        heads = _count_heads(layer, sizes, text)
        yield LayerCache(kind, elements, heads, tokens, index_elements=index)
    if "linear_conv_v" in rows:
        yield _describe_delta_net(layer, sizes)
    if any(name.startswith("mamba_conv") for name in rows):
        yield _describe_state_space(layer, sizes, text)
    if "conv" in rows:
        taps = _get_taps(layer, "conv", sizes)
        yield LayerCache(CONVOLUTION, states=(State(rows["conv"] // taps * (taps - 1)),))


def _count_keys_and_values(layer: _Layer, text: Json) -> int:
    rows = layer.rows
    if "qkv" in rows:
        if layer.leaves["qkv"].axes == FUSED_AXES:
            return rows["qkv"] - rows["o"]  # `o` has as many columns as there are queries
        if "t" not in layer.leaves["qkv"].axes:
            raise UnknownCacheError("queries, keys and values are not separate")
        return rows["qkv"] // 3 * 2
    if "v" in rows:
        return rows["k"] + rows["v"]
    if text.get("attention_k_eq_v") is True:
        return 2 * rows["k"]
    raise UnknownCacheError(f"layer {layer.number} has keys, but no values")


def _count_heads(layer: _Layer, sizes: AxisSizes, text: Json) -> int | None:
    """Count the key/value heads of a layer, or return None if tensors do not show their number."""
    if "qkv" in layer.rows:
        is_fused = layer.leaves["qkv"].axes == FUSED_AXES
        return _read_count(text, ("num_key_value_heads",)) if is_fused else sizes.axes.get("h")
    axes = layer.leaves["k"].axes
    norm = layer.leaves.get("k_norm")
    if norm and norm.axes == ("e",) and axes == ("kd", "d"):
        return layer.rows["k"] // layer.rows["k_norm"]
    return sizes.axes.get("k") if "k" in axes else sizes.axes.get("h") if "h" in axes else None


def _count_index_elements(layer: _Layer) -> int:
    """Count the elements per token that an indexer caches, as in transformers."""
    return sum(layer.rows.get(name, 0) for name in INDEX_NAMES)


def _describe_latent(family: Family, layer: _Layer) -> LayerCache:
    """Describe latent attention, which caches the latent and the rotary key of each token."""
    width = layer.rows["kv_a"]
    if family.name not in SPARSE_LATENT:
        return LayerCache(LATENT, width, index_elements=_count_index_elements(layer))
    index = layer.rows.get("index_k", 0)
    indexer_bytes = index + -(-index // INDEXER_BLOCK) * SCALE_BYTES
    latent = layer.rows["kv_a_norm"]
    fp8_bytes = latent + -(-latent // INDEXER_BLOCK) * SCALE_BYTES + 2 * (width - latent)
    return LayerCache(LATENT, width, extra_bytes=indexer_bytes, fp8_bytes=fp8_bytes)


def _describe_compressed(layer: _Layer, text: Json) -> LayerCache:
    """Describe DeepSeek-V4's attention: a window of tokens, and compressed groups of all tokens.

    Keys are also values. Until a group is complete, the inputs of its entry are a state. If the
    groups overlap, which doubles the inputs, half of those of the last group are another one.
    """
    rows, shapes = layer.rows, layer.shapes
    width, window = rows["kv"], _read_count(text, WINDOW_FIELDS)
    if "comp_place" not in rows:
        return LayerCache(SLIDING, width, window=window)
    tokens = shapes["comp_place"][0]
    index = rows.get("index_norm", 0)
    if index and shapes["index_place"][0] != tokens:
        raise UnknownCacheError("the indexer compresses another number of tokens")
    inputs = rows["comp_kv"] + rows["comp_gate"]
    index_inputs = rows["index_kv"] + rows["index_gate"] if index else 0
    elements = (tokens - 1) * (inputs + index_inputs)
    elements += sum(
        tokens * inputs // 2
        for size, inputs in ((width, inputs), (index, index_inputs))
        if inputs > 2 * size
    )
    return LayerCache(
        f"{COMPRESSED} {tokens}:1",
        width,
        window=window,
        states=(State(0, elements),),
        compressed=CompressedTokens(tokens, width, index),
    )


def _get_taps(layer: _Layer, name: str, sizes: AxisSizes, axis: str = "taps") -> int:
    leaf = layer.leaves[name]
    if leaf.part is None and (axis,) in leaf.dims:
        return layer.shapes[name][leaf.dims.index((axis,))]
    if taps := sizes.axes.get(axis):
        return taps
    raise UnknownCacheError("the kernel size of the convolution is unknown")


def _describe_short_convolutions(
    layer: _Layer, keyed: LayerCache, sizes: AxisSizes
) -> Iterator[State]:
    """Describe the states of convolutions next to a cache that the layer has anyway.

    Those of keys and values are divided like their heads, and all others are on every rank. The
    convolution of n-gram embeddings has as many tokens between its taps as an n-gram has.
    """
    for name in (*HEAD_CONVOLUTIONS, *HIDDEN_CONVOLUTIONS):
        if name in layer.rows:
            taps = _get_taps(layer, name, sizes)
            # The convolution of hidden states has their axis, which `rows` does not count.
            channels = math.prod(layer.shapes[name]) // taps
            heads = (keyed.heads or 1) if name in HEAD_CONVOLUTIONS else 1
            yield State(0, channels // heads * (taps - 1), heads)
    if "ple_conv" in layer.rows:
        taps = _get_taps(layer, "ple_conv", sizes, "pt")
        channels = layer.rows["ple_conv"] // taps
        yield State(0, channels * (taps - 1) * layer.rows["ple_multipliers"])


def _describe_delta_net(layer: _Layer, sizes: AxisSizes) -> LayerCache:
    """Describe a gated delta net or Kimi delta attention."""
    rows = layer.rows
    taps = _get_taps(layer, "linear_conv_v", sizes)
    channels = sum(rows[f"linear_conv_{part}"] for part in "qkv") // taps
    key_axes = layer.leaves["linear_conv_k"].axes
    is_kimi = "lh" in key_axes
    key_size = sizes.axes.get("le" if is_kimi else "ld")
    if key_size is None:
        raise UnknownCacheError("the key dimension of linear attention is unknown")
    recurrent = rows["linear_conv_v"] // taps * key_size
    dtype = "float32" if is_kimi else SSM_DTYPE
    return LayerCache(LINEAR, states=(State(channels * (taps - 1)), State(recurrent, dtype=dtype)))


def _describe_lightning(layer: _Layer, sizes: AxisSizes) -> LayerCache:
    """Describe lightning attention, which keeps a product of keys and values for each head.

    As in mlx-lm, it has the dtype of the model.
    """
    head_size = sizes.axes.get("le")
    if head_size is None:
        raise UnknownCacheError("the head dimension of linear attention is unknown")
    return LayerCache(LINEAR, states=(State(layer.rows["linear_norm"] * head_size),))


def _describe_state_space(layer: _Layer, sizes: AxisSizes, text: Json) -> LayerCache:
    """Describe a layer of Mamba or Mamba 2."""
    rows = layer.rows
    names = [name for name in rows if name.startswith("mamba_conv") and not name.endswith("bias")]
    taps = _get_taps(layer, names[0], sizes)
    channels = sum(rows[name] for name in names) // taps
    inner = rows["mamba_out"]
    if layer.leaves["mamba_a_log"].axes[-1:] == ("ms",):
        state_size = rows["mamba_a_log"] // inner
        conv = State(channels * (taps - 1))
        return LayerCache(STATE_SPACE, states=(conv, State(inner * state_size, dtype=SSM_DTYPE)))
    state_size, groups = _read_count(text, STATE_FIELDS), _read_count(text, GROUP_FIELDS)
    if channels != inner + 2 * groups * state_size:
        raise UnknownCacheError(
            f"config.json states {groups} groups with a state of {state_size}, but the convolution "
            f"has {channels} channels"
        )
    conv = State(inner * (taps - 1), 2 * state_size * (taps - 1), groups)
    return LayerCache(STATE_SPACE, states=(conv, State(inner * state_size, dtype=SSM_DTYPE)))


def get_state_dtype(state: State, model_dtype: str, text: Json) -> str:
    """Return the dtype of *state*.

    As in vLLM, ``mamba_ssm_dtype`` in config.json (``mamba_ssm_cache_dtype`` of Nemotron-H) applies
    to recurrent states, and the dtype of the model to all others.
    """
    if state.dtype != SSM_DTYPE:
        return state.dtype or model_dtype
    stated = (parse_dtype(str(text[name])) for name in SSM_DTYPE_FIELDS if name in text)
    default = SSM_DTYPES.get(str(text.get("model_type")), model_dtype)
    return next(filter(None, stated), default)
