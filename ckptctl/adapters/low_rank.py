"""Low-rank factors of a weight change, by singular value decomposition.

Truncating the decomposition gives the closest matrix of a rank in the Frobenius norm (Eckart and
Young, 1936).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptctl.errors import RefusedError, spell_option

if TYPE_CHECKING:
    import torch

PIECE = 8 << 20


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors B and A whose product approximates a change.

    Attributes:
        a: ``[rank, columns]``.
        b: ``[rows, rank]``; both factors contain the square roots of the singular values.
        error: Relative Frobenius error of their product.
        change: Frobenius norm of the change, divided by that of the base.
    """

    a: torch.Tensor
    b: torch.Tensor
    error: float
    change: float

    @property
    def rank(self) -> int:
        """Rank of the factors."""
        return len(self.a)


@dataclass(frozen=True, slots=True)
class LowRankChange:
    """Difference of a fine-tuned weight and its base.

    Attributes:
        delta: ``[rows, columns]``, in float32 or float64.
        base: Frobenius norm of the base weight.
    """

    delta: torch.Tensor
    base: float


def difference(base: torch.Tensor, tuned: torch.Tensor) -> LowRankChange:
    """Return ``tuned - base`` for two floating-point weights ``[rows, columns]``."""
    import torch

    wide = torch.float64 if torch.float64 in (base.dtype, tuned.dtype) else torch.float32
    first = base.to(wide)
    return LowRankChange(tuned.to(wide) - first, torch.linalg.norm(first).item())


def factors(
    name: str, change: LowRankChange, *, rank: int | None, energy: float | None, dtype: str
) -> Factors:
    """Factor a nonzero change, overwriting *change* to save memory.

    Args:
        name: Tensor name for errors.
        change: The difference of two weights, overwritten here.
        rank: Number of terms to keep, or None to keep as many as *energy* requires.
        energy: Least fraction of the sum of squares to keep.
        dtype: torch's name of the factors' dtype; reported errors include rounding to it.

    Raises:
        RefusedError: An element is infinite or NaN.
    """
    import torch

    delta, norm = change.delta, change.base
    if not delta.isfinite().all():
        raise RefusedError(
            "a weight contains infinite or NaN elements",
            where=f"tensor `{name}`",
            why="the change of such elements has no singular values",
        )
    u, values, vh = torch.linalg.svd(delta, full_matrices=False)
    kept = rank if rank is not None else _terms(values, energy or 1.0)
    kept = min(kept, len(values))
    root = values[:kept].sqrt()
    kind = getattr(torch, dtype)
    b = (u[:, :kept] * root).to(kind).contiguous()
    a = (root[:, None] * vh[:kept]).to(kind).contiguous()
    del u, vh
    if not all(factor.float().isfinite().all() for factor in (a, b)):  # fp8 has no isfinite
        raise RefusedError(
            f"the factors of a change exceed the range of {dtype}",
            where=f"tensor `{name}`",
            hint=f"omit {spell_option('--dtype')} to write the factors in fp32",
        )
    size = torch.linalg.norm(delta).item()
    lost = torch.linalg.norm(delta.addmm_(b.to(delta.dtype), a.to(delta.dtype), alpha=-1)).item()
    return Factors(a, b, lost / size, size / norm if norm else float("inf"))


@dataclass(slots=True)
class Stacking:
    """Factors of a stacked parameter's matrices, collected one by one in PEFT's layout.

    Attributes:
        shape: ``[matrices, rows, columns]``.
        parts: Number of layers concatenated along the rows; each gets its own terms.
        dtype: torch's name of the factors' dtype.
    """

    shape: tuple[int, ...]
    parts: int
    dtype: str
    _found: dict[tuple[int, int], Factors] = field(default_factory=dict)
    _norms: list[tuple[float, float, float]] = field(default_factory=list)

    def add(
        self, name: str, number: int, change: LowRankChange, rank: int | None, energy: float | None
    ) -> None:
        """Add a changed matrix, overwriting *change*."""
        import torch

        for part, delta in enumerate(change.delta.chunk(self.parts)):
            size = torch.linalg.norm(delta).item()
            if size == 0:
                continue
            own = LowRankChange(delta, change.base)
            made = factors(name, own, rank=rank, energy=energy, dtype=self.dtype)
            self._found[number, part] = made
            self._norms.append((made.error * size, size, 0.0))
        self._norms.append((0.0, 0.0, change.base))

    def keep(self, base: torch.Tensor) -> None:
        """Add a matrix without a change."""
        import torch

        self._norms.append((0.0, 0.0, torch.linalg.norm(base.float()).item()))

    @property
    def factors(self) -> Factors | None:
        """Factors of the whole stack at the largest rank of each part, or None if unchanged."""
        import torch

        experts, rows, columns = self.shape
        ranks = [
            max((one.rank for (_, of), one in self._found.items() if of == part), default=0)
            for part in range(self.parts)
        ]
        if not any(ranks):
            return None
        kind = getattr(torch, self.dtype)
        a = torch.zeros(experts, sum(ranks), columns, dtype=kind)
        b = torch.zeros(rows, sum(ranks), experts, dtype=kind)
        height = rows // self.parts
        for (number, part), one in self._found.items():
            terms = slice(start := sum(ranks[:part]), start + one.rank)
            a[number, terms] = one.a
            b[part * height : (part + 1) * height, terms, number] = one.b
        self._found.clear()
        lost, size, norm = (math.hypot(*each) for each in zip(*self._norms, strict=True))
        change = size / norm if norm else float("inf")
        return Factors(a.flatten(0, 1), b.flatten(1), lost / size, change)


def _terms(values: torch.Tensor, energy: float) -> int:
    """Return the least number of terms that contain *energy* of the sum of squares."""
    import torch

    squares = values.to(torch.float64).square()
    left = squares.sum() - squares.cumsum(0)
    bound = (1 - energy) * squares.sum()
    return int((left > bound).sum().item()) + 1


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors hold equal values (or NaN), regardless of dtype."""
    import torch

    if one.dtype == other.dtype and not one.is_floating_point():
        return bool(one.equal(other))
    kind = torch.promote_types(one.dtype, other.dtype)
    first, second = one.to(kind), other.to(kind)
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def pieces(tensor: torch.Tensor) -> Iterator[bytes]:
    """Yield a tensor's row-major bytes in chunks of at most 8 MiB."""
    import torch

    content = tensor.contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, len(content), PIECE):
        yield content[start : start + PIECE].numpy().tobytes()
