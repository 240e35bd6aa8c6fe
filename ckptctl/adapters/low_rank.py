"""Compute low-rank factors of weight changes by singular value decomposition.

Truncating the decomposition gives the closest matrix of a rank in the Frobenius norm (Eckart and
Young, 1936).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptctl.errors import RefusedError, format_option

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors B and A whose product approximates a weight change.

    Attributes:
        a: Factor A, ``[rank, columns]``, scaled by the square roots of the singular values.
        b: Factor B, ``[rows, rank]``, scaled in the same way.
        relative_error: Frobenius norm of the error of B A, divided by the norm of the change.
        relative_change: Frobenius norm of the change, divided by the norm of the base.
    """

    a: torch.Tensor
    b: torch.Tensor
    relative_error: float
    relative_change: float

    @property
    def rank(self) -> int:
        """Rank of the factors, i.e. the number of singular values that are kept."""
        return len(self.a)


@dataclass(frozen=True, slots=True)
class WeightChange:
    """Difference between a fine-tuned weight and its base weight.

    Attributes:
        delta: The difference ``[rows, columns]``, in float32 or float64.
        base_norm: Frobenius norm of the base weight.
    """

    delta: torch.Tensor
    base_norm: float


def subtract_weights(
    base: torch.Tensor, tuned: torch.Tensor, device: torch.device | None = None
) -> WeightChange:
    """Return ``tuned - base`` for two floating-point weights ``[rows, columns]``.

    The difference is on *device*, or on the device of the weights if it is None.
    """
    import torch

    wide = torch.float64 if torch.float64 in (base.dtype, tuned.dtype) else torch.float32
    wide_base = base.to(device).to(wide)
    return WeightChange(tuned.to(device).to(wide) - wide_base, torch.linalg.norm(wide_base).item())


def compute_factors(
    name: str, change: WeightChange, *, rank: int | None, energy: float | None, dtype: str
) -> Factors:
    """Factor a nonzero change on its device, overwriting *change* to save memory.

    Args:
        name: Tensor name for errors.
        change: The difference of two weights, overwritten here.
        rank: Number of singular values to keep, or None to keep as many as *energy* requires.
        energy: Minimum fraction of the sum of squared singular values to keep.
        dtype: Name of the torch dtype of the factors. Reported errors include rounding to it.

    Raises:
        RefusedError: An element is infinite or NaN.
    """
    import torch

    delta, base_norm = change.delta, change.base_norm
    if not delta.isfinite().all():
        raise RefusedError(
            "a weight contains infinite or NaN elements",
            where=f"tensor `{name}`",
            why="the change of such elements has no singular values",
        )
    u, values, vh = torch.linalg.svd(delta, full_matrices=False)
    term_count = rank if rank is not None else _count_terms(values, energy or 1.0)
    term_count = min(term_count, len(values))
    root_values = values[:term_count].sqrt()
    torch_dtype = getattr(torch, dtype)
    b = (u[:, :term_count] * root_values).to(torch_dtype).contiguous()
    a = (root_values[:, None] * vh[:term_count]).to(torch_dtype).contiguous()
    del u, vh
    if not all(factor.float().isfinite().all() for factor in (a, b)):  # fp8 has no isfinite
        raise RefusedError(
            f"the factors of a change exceed the range of {dtype}",
            where=f"tensor `{name}`",
            hint=f"omit {format_option('--dtype')} to write the factors in fp32",
        )
    change_norm = torch.linalg.norm(delta).item()
    residual_norm = torch.linalg.norm(
        delta.addmm_(b.to(delta.dtype), a.to(delta.dtype), alpha=-1)
    ).item()
    relative_change = change_norm / base_norm if base_norm else float("inf")
    return Factors(a.cpu(), b.cpu(), residual_norm / change_norm, relative_change)


@dataclass(slots=True)
class StackedFactors:
    """Collects the factors of a stacked parameter matrix by matrix, in PEFT's layout.

    Attributes:
        shape: ``[matrices, rows, columns]``.
        parts: Number of linear layers concatenated along the rows, each of which is factored
            separately.
        dtype: Name of the torch dtype of the factors.
    """

    shape: tuple[int, ...]
    parts: int
    dtype: str
    _factors: dict[tuple[int, int], Factors] = field(default_factory=dict)
    _norms: list[tuple[float, float, float]] = field(default_factory=list)

    def add_change(
        self, name: str, expert: int, change: WeightChange, rank: int | None, energy: float | None
    ) -> None:
        """Factor the change of one expert's matrix and add the factors, overwriting *change*."""
        import torch

        for part, delta in enumerate(change.delta.chunk(self.parts)):
            change_norm = torch.linalg.norm(delta).item()
            if change_norm == 0:
                continue
            part_change = WeightChange(delta, change.base_norm)
            part_factors = compute_factors(
                name, part_change, rank=rank, energy=energy, dtype=self.dtype
            )
            self._factors[expert, part] = part_factors
            self._norms.append((part_factors.relative_error * change_norm, change_norm, 0.0))
        self._norms.append((0.0, 0.0, change.base_norm))

    def add_unchanged(self, base: torch.Tensor) -> None:
        """Add a matrix that fine-tuning did not change."""
        import torch

        self._norms.append((0.0, 0.0, torch.linalg.norm(base.float()).item()))

    @property
    def joined_factors(self) -> Factors | None:
        """Factors of the complete stack, or None if no matrix changed.

        Reading the property frees the collected factors.
        """
        import torch

        experts, rows, columns = self.shape
        ranks = [
            max(
                (
                    expert_factors.rank
                    for (_, part_number), expert_factors in self._factors.items()
                    if part_number == part
                ),
                default=0,
            )
            for part in range(self.parts)
        ]
        if not any(ranks):
            return None
        torch_dtype = getattr(torch, self.dtype)
        a = torch.zeros(experts, sum(ranks), columns, dtype=torch_dtype)
        b = torch.zeros(rows, sum(ranks), experts, dtype=torch_dtype)
        height = rows // self.parts
        for (number, part), expert_factors in self._factors.items():
            terms = slice(start := sum(ranks[:part]), start + expert_factors.rank)
            a[number, terms] = expert_factors.a
            b[part * height : (part + 1) * height, terms, number] = expert_factors.b
        self._factors.clear()
        residual_norm, change_norm, base_norm = (
            math.hypot(*norms) for norms in zip(*self._norms, strict=True)
        )
        change = change_norm / base_norm if base_norm else float("inf")
        return Factors(a.flatten(0, 1), b.flatten(1), residual_norm / change_norm, change)


def _count_terms(values: torch.Tensor, energy: float) -> int:
    """Return how many of the largest *values* reach the fraction *energy* of the sum of squares."""
    import torch

    squares = values.to(torch.float64).square()
    residual = squares.sum() - squares.cumsum(0)
    bound = (1 - energy) * squares.sum()
    return int((residual > bound).sum().item()) + 1


def are_equal(first_tensor: torch.Tensor, second_tensor: torch.Tensor) -> bool:
    """Return whether all elements of two tensors are equal or both NaN, regardless of dtype."""
    import torch

    if first_tensor.dtype == second_tensor.dtype and not first_tensor.is_floating_point():
        return bool(first_tensor.equal(second_tensor))
    common_dtype = torch.promote_types(first_tensor.dtype, second_tensor.dtype)
    first_values, second_values = first_tensor.to(common_dtype), second_tensor.to(common_dtype)
    return bool(
        ((first_values == second_values) | (first_values.isnan() & second_values.isnan())).all()
    )


def iterate_bytes(tensor: torch.Tensor) -> Iterator[bytes]:
    """Yield a tensor's row-major bytes in chunks of at most 8 MiB."""
    import torch

    content = tensor.contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, len(content), CHUNK_BYTES):
        yield content[start : start + CHUNK_BYTES].numpy().tobytes()
