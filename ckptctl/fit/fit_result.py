"""Result of ``inspect --fit``, in frozen dataclasses that convert to JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ckptctl.results import JsonField, Result


@dataclass(frozen=True, slots=True)
class CacheUse(Result):
    """Cache of the layers of one kind, for one request, of all GPUs with a different part of it."""

    kind: Annotated[
        str,
        JsonField(
            "kind of layer: `full attention`, `sliding window`, `chunked attention`, `latent "
            "attention`, `linear attention`, `state space` or `convolution`"
        ),
    ]
    layers: Annotated[int, JsonField("number of layers")]
    window: Annotated[int | None, JsonField("maximum number of cached tokens, or null")]
    token_bytes: Annotated[int, JsonField("bytes per token in all these layers")]
    state_bytes: Annotated[int, JsonField("bytes per request, independent of its length")]
    nbytes: Annotated[
        int | None, JsonField("bytes per request at `context`, or null", name="bytes")
    ]


@dataclass(frozen=True, slots=True)
class StageUse(Result):
    """Memory of each GPU of one pipeline stage."""

    layers: Annotated[int | None, JsonField("number of layers, or null if it is unknown")]
    weights: Annotated[int | None, JsonField("bytes of weights on the fullest GPU, or null")]
    token_bytes: Annotated[
        int | None, JsonField("bytes of KV cache per token, without windows, or null")
    ]
    request_bytes: Annotated[
        int | None, JsonField("bytes of cache per request at `context`, or null")
    ]


@dataclass(frozen=True, slots=True)
class Fit(Result):
    """Memory that weights and caches need for inference."""

    gpus: Annotated[int, JsonField("number of GPUs")]
    memory: Annotated[int, JsonField("bytes of each GPU")]
    tp: Annotated[int, JsonField("tensor-parallel size")]
    pp: Annotated[int, JsonField("number of pipeline stages")]
    ep: Annotated[int, JsonField("number of GPUs among which experts are distributed")]
    dp: Annotated[int, JsonField("number of copies that serve different requests")]
    context: Annotated[int | None, JsonField("tokens per request, or null if it is unknown")]
    kv_dtype: Annotated[str | None, JsonField("dtype of the KV cache, or null if it is unknown")]
    weights: Annotated[int, JsonField("bytes of the model's weights, as stored")]
    replicated: Annotated[
        int | None, JsonField("bytes of weights that every tensor-parallel GPU has, or null")
    ]
    experts: Annotated[int | None, JsonField("bytes of expert weights, or null")]
    stages: Annotated[tuple[StageUse, ...], JsonField("memory per GPU of each pipeline stage")]
    cache: Annotated[
        tuple[CacheUse, ...] | None,
        JsonField("cache of one request by kind of layer, or null if it is unknown"),
    ]
    token_bytes: Annotated[
        int | None,
        JsonField("bytes of KV cache per token of the complete model, without windows, or null"),
    ]
    request_bytes: Annotated[
        int | None, JsonField("bytes of cache per request of the complete model, or null")
    ]
    requests: Annotated[
        int | None,
        JsonField("requests of `context` tokens that fit at the same time, or null if unknown"),
    ]
    max_context: Annotated[
        int | None,
        JsonField("tokens of a single request that fit; null if unknown or unlimited"),
    ]
    fits: Annotated[
        bool | None,
        JsonField("whether weights and one request fit, or null if that cannot be determined"),
    ]
    unknown: Annotated[tuple[str, ...], JsonField("reasons why values are null")] = ()
