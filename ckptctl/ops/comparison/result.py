"""What :func:`ckptctl.diff` finds."""

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
"""The verdict where nothing differs: it claims no more than its evidence shows."""


@dataclass(frozen=True, slots=True)
class TensorDifference(Result, order="name sources kinds"):
    """One tensor that both checkpoints have and that is not the same in them."""

    name: Annotated[str, JsonField("name in A")]
    sources: Annotated[tuple[str, ...], JsonField("names in B")]
    shape_a: Annotated[tuple[int, ...], JsonField("shape in A")]
    shape_b: Annotated[tuple[int, ...], JsonField("shape of B's in the layout of A")]
    dtype_a: Annotated[str, JsonField("dtype in A")]
    dtype_b: Annotated[
        str, JsonField("dtype in B; several, joined by commas, where its parts differ")
    ]
    values: Annotated[
        Errors | None, JsonField("how the elements differ; null: not compared, or equal")
    ] = None

    @property
    def kinds(self) -> Annotated[tuple[Kind, ...], JsonField()]:
        """What differs: `shape`, `dtype`, `values`."""
        found: list[Kind] = []
        found += ["shape"] if self.shape_a != self.shape_b else []
        found += ["dtype"] if self.dtype_a != self.dtype_b else []
        found += ["values"] if self.values is not None else []
        return tuple(found)

    @property
    def has_several_dtypes(self) -> bool:
        """Return whether parts of B's tensor have several dtypes; then no elements are compared."""
        return "," in self.dtype_b

    @property
    def order(self) -> tuple[bool, bool, float, float]:
        """Return what sorts the worst first: shapes, values that are not finite, errors."""
        values = self.values or Errors()
        worst = (values.max_abs or 0.0, values.max_rel or 0.0)
        return (self.shape_a == self.shape_b, not values.nonfinite, -worst[0], -worst[1])


@dataclass(frozen=True, slots=True)
class LeafDifference:
    """A leaf that is no tensor and that both have with different values."""

    name: Annotated[str, JsonField("name in A")]
    a: Annotated[str, JsonField("value in A, in short")]
    b: Annotated[str, JsonField("value in B, in short")]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints."""

    path: Annotated[str, JsonField("as it was named")]
    format: Annotated[str, JsonField("[format](formats.md)")]
    layout: Annotated[str | None, JsonField("layout; null: names did not have to be mapped")] = None
    only: Annotated[tuple[str, ...], JsonField("tensors that only this one has")] = ()
    only_leaves: Annotated[
        tuple[str, ...], JsonField("leaves that are no tensors and that only this one has")
    ] = ()
    left_out: Annotated[
        Mapping[str, Annotated[str, JsonField("the reason")]],
        JsonField("what was not compared"),
    ] = field(default_factory=dict)
    bytes_read: Annotated[
        int, JsonField("bytes of tensors that were read from its files, each time they were read")
    ] = 0


@dataclass(frozen=True, slots=True)
class Difference(Result, order="same verdict evidence"):
    """How two checkpoints differ."""

    a: Annotated[Side, JsonField("the first checkpoint")]
    b: Annotated[Side, JsonField("the second checkpoint")]
    model_type: Annotated[str | None, JsonField("[model type](models.md), where names were mapped")]
    structure: Annotated[bool, JsonField("whether only names, shapes and dtypes were compared")]
    compared: Annotated[int, JsonField("tensors that both have")]
    by_checksum: Annotated[
        int,
        JsonField(
            "those of them of which only recorded checksums were compared, and match: their data "
            "was not read; 0 without `--quick`"
        ),
    ]
    within: Annotated[
        int, JsonField("those whose elements differ by no more than the tolerances allow")
    ]
    tensors: Annotated[
        tuple[TensorDifference, ...],
        JsonField(
            "those that differ: other shapes first, then values that are not finite, then by "
            "`max_abs`, the largest first"
        ),
    ]
    compared_leaves: Annotated[int, JsonField("leaves that are no tensors and that both have")]
    leaves: Annotated[tuple[LeafDifference, ...], JsonField("those that differ")]
    notes: Annotated[tuple[str, ...], JsonField("what else a reader should know")]
    seconds: Annotated[float, JsonField("time that it took")]
    bitwise: Annotated[
        bool,
        JsonField(
            "whether elements were compared by their bits alone, because torch is not installed: "
            "then `nonfinite` is 0, `max_abs` and `max_rel` are null, and `worst` is the first"
        ),
    ] = False

    @property
    def evidence(
        self,
    ) -> Annotated[
        Evidence,
        JsonField(
            "what the verdict is made from: `data`, all that is compared was read; `checksums`, "
            "the data of `by_checksum` tensors was not; `structure`, no data was"
        ),
    ]:
        """Return what the verdict is made from."""
        if self.structure:
            return "structure"
        return "checksums" if self.by_checksum else "data"

    @property
    def verdict(
        self,
    ) -> Annotated[ComparisonVerdict, JsonField("the answer, which says what was not read")]:
        """Return the answer in words; it claims no more than the evidence shows."""
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
            "false: something differs, and the exit code is 1; true: all that is compared was read "
            "and is equal; null: nothing differs, but not all data was read, see `evidence`"
        ),
    ]:
        """Return whether nothing differs, or None if the data was not read to prove that."""
        known: Mapping[ComparisonVerdict, bool] = {"the same": True, "different": False}
        return known.get(self.verdict)
