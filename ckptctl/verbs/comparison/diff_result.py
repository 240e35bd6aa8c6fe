"""Result of :func:`ckptctl.diff`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ckptctl.results import JsonField, Result
from ckptctl.storage.compare import Errors

Kind = Literal["shape", "dtype", "values"]
Evidence = Literal["data", "checksums", "structure"]
ComparisonVerdict = Literal[
    "different",
    "the same",
    "recorded checksums match; data not read",
    "the same structure; data not read",
]
_NO_DIFFERENCE: Mapping[Evidence, ComparisonVerdict] = {
    "data": "the same",
    "checksums": "recorded checksums match; data not read",
    "structure": "the same structure; data not read",
}
"""Verdict if no difference was found, by the evidence that was compared."""


@dataclass(frozen=True, slots=True)
class TensorDifference(Result, order="name sources kinds"):
    """Difference between two versions of one tensor."""

    name: Annotated[str, JsonField("name in A")]
    sources: Annotated[tuple[str, ...], JsonField("names in B")]
    shape_a: Annotated[tuple[int, ...], JsonField("shape in A")]
    shape_b: Annotated[tuple[int, ...], JsonField("shape in B, in the layout of A")]
    dtype_a: Annotated[str, JsonField("dtype in A")]
    dtype_b: Annotated[str, JsonField("dtype in B; comma-separated if its parts differ")]
    values: Annotated[
        Errors | None, JsonField("differences between elements; null if equal or not compared")
    ] = None

    @property
    def kinds(self) -> Annotated[tuple[Kind, ...], JsonField()]:
        """Kinds of difference: `shape`, `dtype`, `values`."""
        kinds: list[Kind] = []
        kinds += ["shape"] if self.shape_a != self.shape_b else []
        kinds += ["dtype"] if self.dtype_a != self.dtype_b else []
        kinds += ["values"] if self.values is not None else []
        return tuple(kinds)

    @property
    def has_several_dtypes(self) -> bool:
        """Whether B stores the tensor in several dtypes, so that elements are not compared."""
        return "," in self.dtype_b

    @property
    def sort_key(self) -> tuple[bool, bool, float, float]:
        """Sort key. Different shapes come first, then non-finite values, then large errors."""
        values = self.values or Errors()
        worst = (values.max_abs or 0.0, values.max_rel or 0.0)
        return (self.shape_a == self.shape_b, not values.nonfinite, -worst[0], -worst[1])


@dataclass(frozen=True, slots=True)
class LeafDifference:
    """Non-tensor value that differs between the two checkpoints."""

    name: Annotated[str, JsonField("name in A")]
    a: Annotated[str, JsonField("value in A, shortened")]
    b: Annotated[str, JsonField("value in B, shortened")]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two compared checkpoints."""

    path: Annotated[str, JsonField("path as given")]
    format: Annotated[str, JsonField("[format](formats.md)")]
    layout: Annotated[str | None, JsonField("layout; null if names were not mapped")] = None
    only: Annotated[tuple[str, ...], JsonField("tensors only in this checkpoint")] = ()
    only_leaves: Annotated[
        tuple[str, ...], JsonField("non-tensor values only in this checkpoint")
    ] = ()
    left_out: Annotated[
        Mapping[str, Annotated[str, JsonField("reason")]],
        JsonField("tensors and values that were not compared"),
    ] = field(default_factory=dict)
    bytes_read: Annotated[
        int, JsonField("tensor bytes read from its files; repeated reads count again")
    ] = 0


@dataclass(frozen=True, slots=True)
class Difference(Result, order="same verdict evidence"):
    """Result of comparing two checkpoints."""

    a: Annotated[Side, JsonField("first checkpoint")]
    b: Annotated[Side, JsonField("second checkpoint")]
    model_type: Annotated[
        str | None, JsonField("[model type](models.md) if names were mapped, else null")
    ]
    structure: Annotated[bool, JsonField("whether only names, shapes and dtypes were compared")]
    compared: Annotated[int, JsonField("number of compared tensors: those in both checkpoints")]
    by_checksum: Annotated[
        int,
        JsonField(
            "number of tensors that were not read because their recorded checksums match; "
            "0 without `--quick`"
        ),
    ]
    within: Annotated[int, JsonField("number of tensors that differ within the tolerances")]
    tensors: Annotated[
        tuple[TensorDifference, ...],
        JsonField(
            "tensors that differ: first different shapes, then non-finite values, "
            "then by descending `max_abs`"
        ),
    ]
    compared_leaves: Annotated[int, JsonField("number of non-tensor values in both checkpoints")]
    leaves: Annotated[tuple[LeafDifference, ...], JsonField("values that differ")]
    notes: Annotated[tuple[str, ...], JsonField("further notes")]
    seconds: Annotated[float, JsonField("elapsed time")]
    bitwise: Annotated[
        bool,
        JsonField(
            "whether elements were compared only bitwise, because torch is not "
            "installed; `nonfinite` is then 0, `max_abs` and `max_rel` are null, and "
            "`worst` is the first difference"
        ),
    ] = False

    @property
    def evidence(
        self,
    ) -> Annotated[
        Evidence,
        JsonField(
            "basis of the verdict: `data` (all compared data was read), `checksums` "
            "(data of the `by_checksum` tensors was not read) or `structure` (no data "
            "was read)"
        ),
    ]:
        """Basis of the verdict."""
        if self.structure:
            return "structure"
        return "checksums" if self.by_checksum else "data"

    @property
    def verdict(
        self,
    ) -> Annotated[
        ComparisonVerdict, JsonField("result in words; states whether data was not read")
    ]:
        """Result in words, which claims no more than the evidence shows."""
        only = (*self.a.only, *self.b.only, *self.a.only_leaves, *self.b.only_leaves)
        if only or self.tensors or self.leaves:
            return "different"
        return _NO_DIFFERENCE[self.evidence]

    @property
    def same(
        self,
    ) -> Annotated[
        bool | None,
        JsonField(
            "true if all data was read and is equal; false if something differs (exit "
            "code 1); null if no difference was found, but some data was not read "
            "(see `evidence`)"
        ),
    ]:
        """Whether nothing differs, or None if some data was not read."""
        answers: Mapping[ComparisonVerdict, bool] = {"the same": True, "different": False}
        return answers.get(self.verdict)
