"""Memory of weights and caches on each GPU, and the requests that fit next to the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ckptctl import dtypes, families
from ckptctl.catalog import Catalog
from ckptctl.conversion.recognition.model import Model
from ckptctl.errors import CkptError, MappingError, UsageError, format_option
from ckptctl.fit.cache import (
    CompressedTokens,
    LayerCache,
    describe_layers,
    find_text_config,
    get_state_dtype,
)
from ckptctl.fit.sharding import (
    LAYERS,
    VOCABULARY,
    Ranks,
    Share,
    assign_layers,
    compute_share,
    find_outer_stage,
    get_layer_sizes,
    is_layer_tensor,
)
from ckptctl.numerics.quantized import read_quantization_config, survey_leniently
from ckptctl.planner.axes import AxisSizes, ObservedShape, solve_axis_sizes
from ckptctl.planner.config_facts import Json
from ckptctl.planner.layouts import Family, Layout, LayoutTensor
from ckptctl.planner.mapping.matching import MatchedKeys
from ckptctl.units import pluralize
from ckptctl.verbs.inspection.inspect_options import FitOptions, Gpus, parse_gpus
from ckptctl.verbs.inspection.inspect_result import CacheUse, Fit, StageUse

FP8 = "float8_e4m3fn"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": FP8}
"""Dtypes of the cache, by the values of ``--kv-dtype``."""
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Fields of config.json with the largest number of tokens, as in hf-mem."""


@dataclass(frozen=True)
class _Grid:
    """Division of GPUs into pipeline stages, copies and tensor-parallel ranks."""

    gpus: Gpus
    ranks: Ranks
    stages: int
    copies: int


def _read_grid(options: FitOptions) -> _Grid:
    """Divide the GPUs of ``--fit`` as the options state.

    Raises:
        UsageError: The number of GPUs is not divisible.
    """
    gpus, stages = parse_gpus(options.fit or ""), options.pp or 1
    if gpus.number % stages:
        raise _indivisible_error(gpus.number, "--pp", stages)
    stage_gpus = gpus.number // stages
    tensor, expert = options.tp or stage_gpus, options.ep or 1
    for name, value in (("--tp", tensor), ("--ep", expert)):
        if stage_gpus % value:
            raise _indivisible_error(stage_gpus, name, value)
    return _Grid(gpus, Ranks(tensor, expert), stages, stage_gpus // tensor)


def _indivisible_error(count: int, name: str, value: int) -> UsageError:
    return UsageError(
        f"{pluralize(count, 'GPU')} cannot be divided by {format_option(name)} {value}",
        why="each pipeline stage has the same number of GPUs, and so has each of its copies",
        hint=f"choose a divisor of {count}, or set the number of GPUs, as in "
        f"{format_option('--fit 8x80GB')}",
    )


def compute_fit(stored: Catalog, model: Model, options: FitOptions) -> Fit:
    """Compute the memory for inference, and the requests that fit.

    Args:
        stored: Catalog of the checkpoint, with quantized weights as they are stored.
        model: Model in the checkpoint, whose weights may be dequantized.
        options: GPUs, their division, and requests.

    Raises:
        UsageError: The number of GPUs is not divisible, or experts shall be distributed, but the
            model has none.
    """
    grid, reasons = _read_grid(options), list[str]()
    sizes_by_key = _measure_weights(stored, model)
    weights = sum(sizes_by_key.values())
    family = families.family(model.model_type) if model.model_type else None
    text = find_text_config(family, model.config) if family and model.config else model.config or {}
    context = _find_context(options, text, reasons)
    kv_dtype = _find_cache_dtype(options, stored, model.config or {}, text, reasons)
    division, caches = _divide_model(model, family, sizes_by_key, grid, reasons)
    cache = (
        _CacheSizes(caches, kv_dtype, _find_model_dtype(model.config or {}, text), text)
        if caches is not None and kv_dtype
        else None
    )
    uses = [
        _describe_stage(stage, division, cache, grid, context, reasons)
        for stage in range(grid.stages)
    ]
    requests, max_context = _count_requests(uses, cache, division, grid, context, reasons)
    is_too_large = any(use.weights is not None and use.weights > grid.gpus.memory for use in uses)
    fits = False if is_too_large else None if requests is None else requests > 0
    return Fit(
        gpus=grid.gpus.number,
        memory=grid.gpus.memory,
        tp=grid.ranks.tensor,
        pp=grid.stages,
        ep=grid.ranks.expert,
        dp=grid.copies,
        context=context,
        kv_dtype=kv_dtype,
        weights=weights,
        replicated=division.replicated if division else None,
        experts=division.experts if division else None,
        stages=tuple(uses),
        cache=cache.describe_kinds(context) if cache else None,
        token_bytes=cache.count_token_bytes(range(len(cache.layers)), 1) if cache else None,
        request_bytes=cache.count_request_bytes(range(len(cache.layers)), 1, context)
        if cache and context
        else None,
        requests=requests,
        max_context=max_context,
        fits=fits,
        unknown=tuple(dict.fromkeys(reasons)),
    )


def _divide_model(
    model: Model,
    family: Family | None,
    sizes_by_key: Mapping[str, int],
    grid: _Grid,
    reasons: list[str],
) -> tuple[_Weights | None, list[LayerCache | None] | None]:
    """Divide the weights and describe the caches, or add to *reasons* why that is impossible.

    Raises:
        UsageError: Experts shall be distributed, but the model has none.
    """
    layout = _find_layout(family, model)
    if model.is_adapter:
        reasons.append("the checkpoint is an adapter; inspect its base model, or merge both")
        return None, None
    if family is None or layout is None:
        reasons.append("the model type is unknown, so layers and heads are unknown")
        weights = [sum(sizes_by_key.values())]
        return _Weights(weights, [None], 0, None) if grid.gpus.number == 1 else None, None
    matched = model.match_keys(family, layout, model.tensors.keys())
    sizes = division = caches = None
    try:
        sizes = solve_sizes(family, layout, model, matched)
    except MappingError as error:
        reasons.append(f"sizes of the model: {error.what}")
    try:
        division = _divide_weights(
            family, model, matched, sizes or AxisSizes({}, {}), sizes_by_key, grid
        )
    except MappingError as error:
        reasons.append(f"weights per GPU: {error.what}")
    if grid.ranks.expert > 1 and division and division.experts == 0:
        raise UsageError(
            "the model has no experts to distribute",
            why=f"{format_option('--ep')} {grid.ranks.expert} applies to mixtures of experts",
            hint=f"omit {format_option('--ep')}",
        )
    try:
        caches = _describe_caches(family, model, matched, sizes) if sizes else None
    except MappingError as error:
        reasons.append(f"KV cache: {error.what}")
    return division, caches


def _find_layout(family: Family | None, model: Model) -> Layout | None:
    """Return the layout of the model, or the first of equivalent ones."""
    if family is None:
        return None
    names = (name for other, name in model.pairs if other == family.name)
    name = model.layout or next(names, None)
    return family.get_layout(name) if name else None


# -------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class _Weights:
    """Division of weights among GPUs.

    Attributes:
        stages: Bytes on the fullest GPU of each pipeline stage.
        layers: Layers of each stage, or None if they are unknown.
        replicated: Bytes of weights that every tensor-parallel rank has completely.
        experts: Bytes of all expert weights, or None if it is unknown which they are.
    """

    stages: list[int]
    layers: list[range | None]
    replicated: int
    experts: int | None


def _measure_weights(stored: Catalog, model: Model) -> dict[str, int]:
    """Return the stored bytes of each tensor of the model.

    Bytes of quantized weights include their scales.
    """
    weights = {key: entry.nbytes for key, entry in model.tensors.items() if entry.alias_of is None}
    if model.catalog.tensors.keys() == stored.tensors.keys():
        return weights
    for weight in survey_leniently(stored).weights:
        key = weight.key.removeprefix(model.root)
        if key in weights:
            names = [name for name in weight.names if name in stored.tensors]
            weights[key] = sum(stored.tensors[name].nbytes for name in names)
    return weights


def solve_sizes(family: Family, layout: Layout, model: Model, matched: MatchedKeys) -> AxisSizes:
    """Solve for the sizes of all axes from shapes and configuration.

    Raises:
        MappingError: Shapes and configuration contradict each other.
    """
    observations: dict[object, ObservedShape] = {}
    for key, stored in matched.tensor_by_key.items():
        shape = model.tensors[key].shape
        observations.setdefault((id(stored), shape), ObservedShape(key, stored, shape))
    counts = {
        axis: count for axis, count in matched.count_indices().items() if axis in layout.spread_axes
    }
    configured = model.get_axis_sizes(family, implied=True)
    configured.pop(VOCABULARY, None)  # stored vocabularies may be padded
    return solve_axis_sizes(family, observations.values(), {**configured, **counts})


def _divide_weights(
    family: Family,
    model: Model,
    matched: MatchedKeys,
    sizes: AxisSizes,
    sizes_by_key: Mapping[str, int],
    grid: _Grid,
) -> _Weights:
    """Divide the weights among the GPUs.

    Raises:
        MappingError: A size is unknown or cannot be divided.
    """
    count = matched.count_indices().get(LAYERS, 0)
    layers: list[range | None] = (
        [range(count)] if grid.stages == 1 else [*assign_layers(count, grid.stages)]
    )
    ties = {tie.of: tie.tensor for tie in family.ties}
    tied = ties if grid.stages > 1 and not _has_heads(ties.values(), matched) else {}
    nbytes_by_share: dict[tuple[int, Fraction], int] = {}
    replicated = experts = 0
    remaining = dict(sizes_by_key)
    for stored, number, key, share in iterate_shares(family, model, matched, sizes, grid.ranks):
        nbytes = remaining.pop(key, None)
        if nbytes is None:
            continue
        replicated += nbytes if share.rank == 1 and grid.ranks.tensor > 1 else 0
        experts += nbytes if share.is_expert else 0
        places = (
            find_outer_stage(stored.parts[0][0], grid.stages, tied)
            if number is None
            else {_find_stage(layers, number)}
        )
        for stage in places:
            place = stage, share.rank
            nbytes_by_share[place] = nbytes_by_share.get(place, 0) + nbytes
    stages = [Fraction(0)] * grid.stages
    stages[0] += sum(remaining.values())
    for (stage, rank), nbytes in nbytes_by_share.items():
        stages[stage] += nbytes * rank
    return _Weights(list(map(math.ceil, stages)), layers, replicated, experts)


def iterate_shares(
    family: Family, model: Model, matched: MatchedKeys, sizes: AxisSizes, ranks: Ranks
) -> Iterator[tuple[LayoutTensor, int | None, str, Share]]:
    """Yield each tensor of the model, with its layer, its key and its share on the fullest rank.

    Raises:
        MappingError: A size is unknown or cannot be divided.
    """
    total = matched.count_indices().get(LAYERS, 0)
    for group in matched.groups:
        is_in_layer = is_layer_tensor(group.stored.parts[0][0])
        shares: dict[tuple[tuple[int, ...], int | None], Share] = {}
        for position, key in enumerate(group.keys):
            number = group.columns[LAYERS][position] if is_in_layer else None
            entry = model.tensors[key]
            alike = entry.shape, number if family.layer_sizes else None
            share = shares.get(alike)
            if share is None:
                layer_sizes = get_layer_sizes(family, sizes, model.config, number, total)
                share = compute_share(family, group.stored, entry, layer_sizes, ranks)
                shares[alike] = share
            yield group.stored, number, key, share


def _has_heads(heads: Iterable[str], matched: MatchedKeys) -> bool:
    return any(name in matched.group_by_name for name in heads)


def _find_stage(layers: Sequence[range | None], number: int) -> int:
    return next(stage for stage, numbers in enumerate(layers) if numbers and number in numbers)


# ---------------------------------------------------------------------------------- cache


def _describe_caches(
    family: Family, model: Model, matched: MatchedKeys, sizes: AxisSizes
) -> list[LayerCache | None]:
    if model.config is None:
        raise MappingError("there is no config.json, which states windows and sizes of states")
    stated = model.get_axis_sizes(family, implied=True).get(LAYERS)
    stored = matched.count_indices().get(LAYERS, 0)
    if stated not in (None, stored):
        raise MappingError(
            f"config.json states {pluralize(stated, 'layer')}, but {stored} are stored"
        )
    shapes = {key: entry.shape for key, entry in model.tensors.items()}
    return describe_layers(family, matched, shapes, sizes, model.config)


def _find_context(options: FitOptions, text: Json, reasons: list[str]) -> int | None:
    if options.context is not None:
        return int(options.context)
    for name in CONTEXT_FIELDS:
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    reasons.append(
        f"config.json does not state the number of tokens; pass {format_option('--context')}"
    )
    return None


def _find_model_dtype(config: Json, text: Json) -> str | None:
    """Return the dtype of the model that config.json states."""
    for file in (text, config):
        for name in ("dtype", "torch_dtype"):
            value = file.get(name)
            if isinstance(value, str) and value.removeprefix("torch.") in DTYPES.values():
                return value.removeprefix("torch.")
    return None


def _find_cache_dtype(
    options: FitOptions, stored: Catalog, config: Json, text: Json, reasons: list[str]
) -> str | None:
    """Return the dtype of the cache, as vLLM chooses it.

    It is fp8 if the quantization config of the stored checkpoint states so, else that of the model.
    """
    if options.kv_dtype != "auto":
        return DTYPES[options.kv_dtype]
    try:
        quantization = read_quantization_config(stored)
    except CkptError as error:
        reasons.append(f"dtype of the KV cache: {error.what}")
        return None
    settings = quantization.weight_settings
    scheme = settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        is_fp8 = (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    else:
        is_fp8 = scheme == "FP8"
    if is_fp8:
        return FP8
    if scheme:
        reasons.append(
            f"unsupported dtype of the KV cache in {quantization.where}; pass "
            f"{format_option('--kv-dtype')}"
        )
        return None
    dtype = _find_model_dtype(config, text)
    if dtype is None:
        reasons.append(f"config.json does not state `dtype`; pass {format_option('--kv-dtype')}")
    return dtype


@dataclass(frozen=True)
class _CacheSizes:
    """Caches of all layers, with their dtypes."""

    layers: Sequence[LayerCache | None]
    dtype: str
    model_dtype: str | None
    text: Json

    @property
    def index_dtype(self) -> str:
        """Dtype of the cache of indexers."""
        return self.model_dtype or self.dtype

    def _count_layer_token_bytes(self, layer: LayerCache, ranks: int) -> int:
        index_bytes = layer.index_elements * dtypes.get_itemsize(self.index_dtype)
        extra = index_bytes + layer.extra_bytes
        if layer.fp8_bytes and self.dtype == FP8:
            return layer.fp8_bytes + extra
        return layer.count_elements(ranks) * dtypes.get_itemsize(self.dtype) + extra

    def _count_entry_bytes(self, compressed: CompressedTokens) -> int:
        index_bytes = compressed.index_elements * dtypes.get_itemsize(self.index_dtype)
        return compressed.elements * dtypes.get_itemsize(self.dtype) + index_bytes

    def _count_layer_state_bytes(self, layer: LayerCache, ranks: int) -> int:
        total = 0
        for state in layer.states:
            dtype = get_state_dtype(state, self.model_dtype or self.dtype, self.text)
            total += state.count_elements(ranks) * dtypes.get_itemsize(dtype)
        return total

    def _select(self, numbers: Iterable[int]) -> Iterable[LayerCache]:
        return (layer for number in numbers if (layer := self.layers[number]))

    def count_token_bytes(self, numbers: Iterable[int], ranks: int) -> int:
        """Count the bytes per token of layers on one rank, before any window is full."""
        total = 0
        for layer in self._select(numbers):
            total += self._count_layer_token_bytes(layer, ranks)
            if group := layer.compressed:
                total += -(-self._count_entry_bytes(group) // group.tokens)
        return total

    def count_request_bytes(self, numbers: Iterable[int], ranks: int, context: int) -> int:
        """Count the bytes of layers on one rank for a request of *context* tokens."""
        total = 0
        for layer in self._select(numbers):
            tokens = min(context, layer.window or context)
            total += self._count_layer_token_bytes(layer, ranks) * tokens
            total += self._count_layer_state_bytes(layer, ranks)
            if group := layer.compressed:
                total += context // group.tokens * self._count_entry_bytes(group)
        return total

    def find_largest_context(self, numbers: Sequence[int], ranks: int, free: int) -> int | None:
        """Return the largest context of one request, or None if it is unlimited."""
        layers = list(self._select(numbers))
        grows = any(
            layer.compressed or (layer.window is None and layer.elements) for layer in layers
        )
        low, high = 0, max([1, *(layer.window for layer in layers if layer.window)])
        while self.count_request_bytes(numbers, ranks, high) <= free:
            if not grows:
                return None
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self.count_request_bytes(numbers, ranks, middle) <= free:
                low = middle
            else:
                high = middle
        return low

    def describe_kinds(self, context: int | None) -> tuple[CacheUse, ...]:
        """Describe the caches by kind and window, without division among GPUs."""
        groups: dict[tuple[str, int | None], list[int]] = {}
        for number, layer in enumerate(self.layers):
            if layer:
                groups.setdefault((layer.kind, layer.window), []).append(number)
        return tuple(
            CacheUse(
                kind,
                len(numbers),
                window,
                self.count_token_bytes(numbers, 1),
                self.count_request_bytes(numbers, 1, 0),
                self.count_request_bytes(numbers, 1, context) if context else None,
            )
            for (kind, window), numbers in groups.items()
        )


def _describe_stage(
    stage: int,
    division: _Weights | None,
    cache: _CacheSizes | None,
    grid: _Grid,
    context: int | None,
    reasons: list[str],
) -> StageUse:
    weights = division.stages[stage] if division else None
    layers = division.layers[stage] if division else None
    count = len(layers) if layers is not None else None
    if cache is None or layers is None:
        return StageUse(count, weights, None, None)
    try:
        token_bytes = cache.count_token_bytes(layers, grid.ranks.tensor)
        nbytes = cache.count_request_bytes(layers, grid.ranks.tensor, context) if context else None
    except MappingError as error:
        reasons.append(f"KV cache per GPU: {error.what}")
        return StageUse(count, weights, None, None)
    return StageUse(count, weights, token_bytes, nbytes)


def _count_requests(
    uses: Sequence[StageUse],
    cache: _CacheSizes | None,
    division: _Weights | None,
    grid: _Grid,
    context: int | None,
    reasons: list[str],
) -> tuple[int | None, int | None]:
    """Return the number of requests and the context of a single request that fit."""
    if cache is None or division is None or any(use.token_bytes is None for use in uses):
        return None, None
    requests: list[int] = []
    contexts: list[int] = []
    for use, numbers in zip(uses, division.layers, strict=True):
        free = max(0, grid.gpus.memory - (use.weights or 0))
        if use.request_bytes:
            requests.append(free // use.request_bytes)
        if numbers is not None:
            largest = cache.find_largest_context(numbers, grid.ranks.tensor, free)
            contexts += [] if largest is None else [largest]
    total = min(requests) * grid.copies if requests else None
    if context and not requests:
        reasons.append("requests need no cache, so their number is unlimited")
    return total, min(contexts, default=None)
