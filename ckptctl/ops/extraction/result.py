"""What :func:`ckptctl.extract` took out of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from ckptctl.records import dataclass
from ckptctl.results import JsonField, Result
from ckptctl.storage.out_of_range import OUT_OF_RANGE, OutOfRange


@dataclass(frozen=True, slots=True)
class Extracted:
    """One tensor, or a slice of it."""

    name: Annotated[str, JsonField("name, in the layout that was asked for")]
    sources: Annotated[tuple[str, ...], JsonField("names in the checkpoint")]
    dtype: Annotated[str, JsonField("dtype, after a cast")]
    shape: Annotated[tuple[int, ...], JsonField("shape of what was taken")]
    whole: Annotated[tuple[int, ...], JsonField("shape of the tensor")]
    nbytes: Annotated[int, JsonField("bytes of what was taken", name="bytes")]
    preview: Annotated[
        str | None,
        JsonField(
            "its first and last values as text; null: a file was written, or many tensors were "
            "named"
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Extraction(Result):
    """What was taken out of a checkpoint."""

    source: Annotated[str, JsonField("the checkpoint as it was named")]
    output: Annotated[str | None, JsonField("the file that was written")]
    tensors: Annotated[tuple[Extracted, ...], JsonField("what was taken")]
    nbytes: Annotated[int, JsonField("size of the file; 0: none was written", name="bytes")]
    bytes_read: Annotated[int, JsonField("bytes of elements that were read")]
    notes: Annotated[tuple[str, ...], JsonField("what the user should know")] = ()
    out_of_range: Annotated[Mapping[str, OutOfRange], OUT_OF_RANGE] = field(default_factory=dict)
