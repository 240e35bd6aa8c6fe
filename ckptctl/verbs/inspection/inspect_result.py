"""Result of ``inspect``, in frozen dataclasses that convert to JSON and do not require torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from ckptctl.catalog import Finding
from ckptctl.results import JsonField, Result
from ckptctl.units import sort_naturally
from ckptctl.verbs.statistics import Statistics
from ckptctl.verdict import (
    COMPLETE,
    REFERENCE,
    SCOPE,
    Scope,
    Verdict,
    combine_verdicts,
    is_complete,
)

if TYPE_CHECKING:
    from ckptctl.runs.listing import RunFolder

MISSING_FIELD = "lacks"
"""Name of the JSON field that lists missing tensors."""


@dataclass(frozen=True, slots=True)
class TensorInfo(Result, order="name dtype shape bytes chunks alias_of unsupported stats"):
    """Description of one tensor."""

    name: Annotated[str, JsonField("stored name")]
    dtype: Annotated[str, JsonField("dtype as named by torch, for example `bfloat16`")]
    shape: Annotated[tuple[int, ...], JsonField("shape, as reported by torch")]
    nbytes: Annotated[
        int, JsonField("size in bytes; 0 if the elements cannot be read", name="bytes")
    ]
    chunks: Annotated[int, JsonField("number of stored boxes")]
    alias_of: Annotated[str | None, JsonField("tensor that shares its memory")] = None
    statistics: Annotated[
        Statistics | None,
        JsonField(
            "statistics; only with `--stats`, and only for numeric dtypes",
            name="stats",
            optional=True,
        ),
    ] = None
    unsupported: Annotated[
        str | None, JsonField("reason why the elements cannot be read, or null")
    ] = None


@dataclass(frozen=True, slots=True)
class DTypeUse:
    """Number of tensors and elements of one dtype. Elements of aliases are not counted again."""

    tensors: Annotated[int, JsonField("number of tensors with this dtype")]
    elements: Annotated[int, JsonField("number of elements with this dtype")]
    nbytes: Annotated[int, JsonField("bytes of these elements", name="bytes")]


@dataclass(frozen=True, slots=True)
class FileSize:
    """Name and size in bytes of a checkpoint's file."""

    path: Annotated[str, JsonField("path relative to the checkpoint")]
    nbytes: Annotated[int, JsonField("size in bytes", name="bytes")]


def list_file_sizes(files: Mapping[str, int]) -> list[FileSize]:
    """List *files* (sizes by name), sorted naturally by name."""
    return [FileSize(name, files[name]) for name in sort_naturally(files)]


@dataclass(frozen=True, slots=True)
class RunMember(Result, order="path format tensors bytes verdict problems"):
    """Checkpoint in a run folder.

    Attributes:
        read_failed: Whether the operating system failed a read.
    """

    path: Annotated[str, JsonField("path")]
    format: Annotated[str | None, JsonField("format; null if it cannot be read")]
    tensors: Annotated[int, JsonField("number of tensors")]
    nbytes: Annotated[int, JsonField("bytes of these tensors", name="bytes")]
    problems: Annotated[tuple[str, ...], JsonField("reasons why the checkpoint is not complete")]
    verdict: Annotated[Verdict, JsonField("`complete`, `damaged` or `unknown`")]
    read_failed: bool = False


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


@dataclass(frozen=True, slots=True)
class Inspection(
    Result,
    order="path format model_type candidates layout root parameters bytes verdict complete scope "
    f"reference problems {MISSING_FIELD} dtypes files assets metadata notes quantized "
    "dequantizable",
):
    """Description of a checkpoint or of a folder of checkpoints.

    Attributes:
        findings: Sources of :attr:`problems`; empty for a folder of checkpoints.
        read_failed: Whether the operating system failed a read.
        run: Result of ``ls`` for a folder with names of a training run.
    """

    path: Annotated[str, JsonField("path as given")]
    format: Annotated[str, JsonField("[format](formats.md), or `run` for a folder of checkpoints")]
    model_type: Annotated[
        str | None, JsonField("[model type](models.md) if exactly one matches, else null")
    ] = None
    candidates: Annotated[tuple[str, ...], JsonField("matching model types")] = ()
    layout: Annotated[str | None, JsonField("layout of the tensors")] = None
    root: Annotated[str, JsonField("prefix of the model's tensors, including the dot")] = ""
    parameters: Annotated[
        int,
        JsonField(
            "number of parameters: elements of the model's tensors, without optimizer "
            "state and aliases"
        ),
    ] = 0
    nbytes: Annotated[int, JsonField("bytes of all tensors; aliases count once", name="bytes")] = 0
    dtypes: Annotated[Mapping[str, DTypeUse], JsonField("totals by dtype, most bytes first")] = (
        field(default_factory=dict)
    )
    files: Annotated[
        Mapping[str, int], JsonField("data files, in natural order", to=list_file_sizes)
    ] = field(default_factory=dict)
    problems: Annotated[
        tuple[str, ...], JsonField("reasons why the checkpoint is not complete")
    ] = ()
    verdict: Annotated[Verdict, JsonField("`complete`, `damaged` or `unknown`")] = Verdict.COMPLETE
    scope: Annotated[Scope, JsonField(SCOPE)] = "structure"
    reference: Annotated[str | None, JsonField(REFERENCE)] = None
    findings: tuple[Finding, ...] = ()
    read_failed: bool = False
    lacks: Annotated[
        tuple[str, ...],
        JsonField("missing [tensors that the model type requires](../explanation/coverage.md)"),
    ] = ()
    tensors: Annotated[
        tuple[TensorInfo, ...],
        JsonField("tensors in the order of the checkpoint; with `--include`, matching tensors"),
    ] = ()
    blobs: Annotated[tuple[str, ...], JsonField("names of non-tensor values")] = ()
    values: Annotated[
        Mapping[str, Annotated[str, JsonField("value as written by Python")]],
        JsonField(
            "non-tensor values that are numbers or short strings; values in separate files are "
            "only included if they are nearest to the root, and never for a URL"
        ),
    ] = field(default_factory=dict)
    assets: Annotated[
        Mapping[str, int],
        JsonField("sidecar files: configuration, tokenizer, ...", to=list_file_sizes),
    ] = field(default_factory=dict)
    metadata: Annotated[
        Mapping[str, str],
        JsonField("metadata of the format: `__metadata__`, `metadata` of the index"),
    ] = field(default_factory=dict)
    notes: Annotated[tuple[str, ...], JsonField("further notes")] = ()
    quantized: Annotated[
        Mapping[str, Annotated[str, JsonField("human-readable quantization scheme")]],
        JsonField("quantized tensors, by dequantized name"),
    ] = field(default_factory=dict)
    dequantizable: Annotated[
        bool, JsonField("whether tensors are quantized and `--dequantize` supports all of them")
    ] = False
    checkpoints: Annotated[
        tuple[RunMember, ...], JsonField("checkpoints of a run folder, in natural order")
    ] = ()
    run: RunFolder | None = None
    fit: Annotated[
        Fit | None, JsonField("memory for inference; only with `--fit`", optional=True)
    ] = None

    @classmethod
    def from_members(
        cls, path: str, members: tuple[RunMember, ...], run: RunFolder | None = None
    ) -> Inspection:
        """Build the description of a folder of checkpoints."""
        problems = tuple(
            f"`{checkpoint.path}`: {checkpoint.problems[0]}"
            for checkpoint in members
            if checkpoint.problems
        )
        verdict = combine_verdicts(member.verdict for member in members)
        failed = any(checkpoint.read_failed for checkpoint in members)
        return cls(
            *(path, "run"),
            problems=problems,
            verdict=verdict,
            read_failed=failed,
            checkpoints=members,
            run=run,
        )

    @property
    def complete(self) -> Annotated[bool | None, JsonField(COMPLETE)]:
        """Whether nothing is missing, or None if that cannot be determined."""
        return is_complete(self.verdict, self.scope)
