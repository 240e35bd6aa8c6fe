"""What :func:`ckptctl.diff` finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptctl.storage.errors_between import Errors

Kind = Literal["shape", "dtype", "values"]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that both checkpoints have and that is not the same in them.

    Attributes:
        name: Its name in A.
        sources: The names in B of the tensors that hold it.
        shape_a: Its shape in A.
        shape_b: The shape that B's has, in A's layout.
        dtype_a: torch's name of its dtype in A.
        dtype_b: That in B.
        values: How its elements differ; None: they were not compared, or they are equal.
    """

    name: str
    sources: tuple[str, ...]
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    dtype_a: str
    dtype_b: str
    values: Errors | None = None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return what differs."""
        found: list[Kind] = []
        found += ["shape"] if self.shape_a != self.shape_b else []
        found += ["dtype"] if self.dtype_a != self.dtype_b else []
        found += ["values"] if self.values is not None else []
        return tuple(found)

    @property
    def order(self) -> tuple[bool, bool, float, float]:
        """Return what sorts the worst first: shapes, values that are not finite, errors."""
        values = self.values or Errors()
        worst = (values.max_abs or 0.0, values.max_rel or 0.0)
        return (self.shape_a == self.shape_b, not values.nonfinite, -worst[0], -worst[1])

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            "name": self.name,
            "sources": list(self.sources),
            "kinds": list(self.kinds),
            "shape_a": list(self.shape_a),
            "shape_b": list(self.shape_b),
            "dtype_a": self.dtype_a,
            "dtype_b": self.dtype_b,
            "values": self.values.to_json() if self.values else None,
        }


@dataclass(frozen=True, slots=True)
class LeafDifference:
    """A leaf that is no tensor and that both have with different values.

    Attributes:
        name: Its name in A.
        a: The value in A, in short.
        b: The value in B, in short.
    """

    name: str
    a: str
    b: str

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {"name": self.name, "a": self.a, "b": self.b}


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints.

    Attributes:
        path: As it was named.
        format: Its format.
        layout: Its layout, where names had to be mapped.
        only: Tensors that the other one does not have.
        only_leaves: Other leaves that it does not have.
        left_out: What was not compared, and why.
    """

    path: str
    format: str
    layout: str | None = None
    only: tuple[str, ...] = ()
    only_leaves: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            "path": self.path,
            "format": self.format,
            "layout": self.layout,
            "only": list(self.only),
            "only_leaves": list(self.only_leaves),
            "left_out": dict(self.left_out),
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """How two checkpoints differ.

    Attributes:
        a: The first one.
        b: The second one.
        model_type: The family, where names had to be mapped.
        structure: Whether values were left alone.
        compared: Tensors that both have.
        by_checksum: Those of them that recorded checksums show to be equal, unread.
        within: Those whose elements differ by no more than the tolerances allow.
        tensors: Those that differ, the worst first.
        compared_leaves: Other leaves that both have.
        leaves: Those that differ.
        bytes_read: Bytes of elements that were compared, of A.
        notes: What the user should know.
        seconds: Time it took.
    """

    a: Side
    b: Side
    model_type: str | None
    structure: bool
    compared: int
    by_checksum: int
    within: int
    tensors: tuple[TensorDifference, ...]
    compared_leaves: int
    leaves: tuple[LeafDifference, ...]
    bytes_read: int
    notes: tuple[str, ...]
    seconds: float

    @property
    def same(self) -> bool:
        """Return whether nothing differs of what was compared."""
        only = (*self.a.only, *self.b.only, *self.a.only_leaves, *self.b.only_leaves)
        return not (only or self.tensors or self.leaves)

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            "same": self.same,
            "a": self.a.to_json(),
            "b": self.b.to_json(),
            "model_type": self.model_type,
            "structure": self.structure,
            "compared": self.compared,
            "by_checksum": self.by_checksum,
            "within": self.within,
            "tensors": [one.to_json() for one in self.tensors],
            "compared_leaves": self.compared_leaves,
            "leaves": [one.to_json() for one in self.leaves],
            "bytes_read": self.bytes_read,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }
