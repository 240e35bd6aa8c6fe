"""Results of the commands for deltas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ckptctl.conversion.plan import Reasons
from ckptctl.results import JsonField, Result
from ckptctl.storage.outcome import OUT_OF_RANGE, OutOfRange


@dataclass(frozen=True, slots=True)
class DeltaResult(Result):
    """Result of making or squashing a delta."""

    sources: Annotated[tuple[str, ...], JsonField("absolute paths of the sources, in order")]
    output: Annotated[str, JsonField("absolute path of the delta")]
    model_type: Annotated[
        str | None, JsonField("[model type](models.md), or null if it is unknown")
    ]
    layout: Annotated[
        str | None, JsonField("layout in which the delta is stated, or null if it is unknown")
    ]
    tensors: Annotated[int, JsonField("number of tensors of the result")]
    changed: Annotated[
        tuple[str, ...], JsonField("tensors that the delta stores, by name in that layout")
    ]
    added: Annotated[tuple[str, ...], JsonField("tensors that only the result has")]
    removed: Annotated[tuple[str, ...], JsonField("tensors that only the base has")]
    assets: Annotated[
        tuple[str, ...], JsonField("configuration and tokenizer files that the delta stores")
    ]
    base_sha256: Annotated[str, JsonField("digest of the tensors of the base")]
    result_sha256: Annotated[str, JsonField("digest of the tensors of the result")]
    compression: Annotated[str, JsonField("`zstd` or `deflate`")]
    nbytes: Annotated[int, JsonField("size of the delta", name="bytes")]
    full_bytes: Annotated[int, JsonField("size of the tensors of the result")]
    left_out: Annotated[
        Reasons,
        JsonField(
            "values and files of the result that the delta does not include, such as optimizer "
            "state, by name"
        ),
    ]
    seconds: Annotated[float, JsonField("elapsed time")] = 0.0
    out_of_range: Annotated[Mapping[str, OutOfRange], OUT_OF_RANGE] = field(default_factory=dict)
    notes: Annotated[tuple[str, ...], JsonField("further notes")] = ()


@dataclass(frozen=True, slots=True)
class DeltaVerification(Result):
    """Result of verifying a delta, or a chain of deltas."""

    deltas: Annotated[tuple[str, ...], JsonField("absolute paths of the deltas, in order")]
    base: Annotated[
        str | None,
        JsonField("absolute path of `--base`, or null"),
    ]
    tensors: Annotated[int, JsonField("number of tensors of the result")]
    changed: Annotated[int, JsonField("number of tensors that differ from the base")]
    base_sha256: Annotated[str, JsonField("digest of the tensors of the base")]
    result_sha256: Annotated[str, JsonField("digest of the tensors of the result")]
    nbytes: Annotated[int, JsonField("size of the deltas", name="bytes")]
    left_out: Annotated[
        Reasons,
        JsonField(
            "values and files of the result that the deltas do not include, such as optimizer "
            "state, by name"
        ),
    ]
    seconds: Annotated[float, JsonField("elapsed time")] = 0.0
