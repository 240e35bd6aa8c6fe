"""Which part of a whole tensor a tensor-parallel rank has, as a rule says.

Source: ``ColumnParallelLinear`` and ``RowParallelLinear`` in
``megatron/core/tensor_parallel/layers.py``; for gated layers ``megatron/core/transformer/mlp.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptctl.catalog import Box
from ckptctl.errors import MappingError
from ckptctl.formats.megatron.rules import GATED, Rule

Shape = tuple[int, ...]
FIRST, SECOND = "linear_fc1", "linear_fc2"


class Division(NamedTuple):
    """How a tensor is divided.

    Attributes:
        local: Shape on one rank.
        dim: The dimension that ranks divide; None: each has all of it.
        parts: Lengths of the fused parts along *dim* on one rank.
        ranks: How many there are.
    """

    local: Shape
    dim: int | None
    parts: Shape
    ranks: int

    @property
    def shape(self) -> Shape:
        """Return the whole shape."""
        return tuple(
            size * (self.ranks if at == self.dim else 1) for at, size in enumerate(self.local)
        )

    def pieces(self, rank: int) -> Iterator[tuple[Box, Shape]]:
        """Yield the boxes of the whole tensor that *rank* has, and where in its own they begin."""
        if self.dim is None or self.local == self.shape:
            yield Box.whole(self.local), (0,) * len(self.local)
            return
        before = 0
        for length in filter(None, self.parts):
            offset = before * self.ranks + rank * length
            yield (
                Box(self._at(offset), tuple(self._with(length))),
                self._at(before),
            )
            before += length

    def _at(self, index: int) -> Shape:
        return tuple(index if at == self.dim else 0 for at in range(len(self.local)))

    def _with(self, length: int) -> Iterator[int]:
        return (length if at == self.dim else size for at, size in enumerate(self.local))


def partner_of(key: str) -> str:
    """Return the weight whose columns tell whether a layer is gated."""
    return key.replace(FIRST, SECOND).replace(".bias", ".weight")


def divide(
    key: str, local: Shape, rule: Rule, ranks: int, second: Shape | None, *, swiglu: bool
) -> Division:
    """Return how a tensor is divided.

    Args:
        key: Its name, for errors.
        local: Its shape on one rank.
        rule: The rule for it.
        ranks: The number of tensor-parallel ranks.
        second: The shape of :func:`partner_of` it on one rank, where there is one.
        swiglu: Whether the arguments say that layers are gated.

    Raises:
        MappingError: The rule does not fit its shape.
    """
    if rule.dim is None:
        return Division(local, None, (), ranks)
    if rule.dim >= len(local):
        raise _unfit(key, f"dimension {rule.dim} of {list(local)} is to be divided")
    length = local[rule.dim]
    count = _halves(key, length, second, swiglu) if rule.parts == GATED else rule.parts
    if isinstance(count, tuple):
        if sum(count) != length:
            raise _unfit(key, f"parts of {list(count)} do not make {length}")
        return Division(local, rule.dim, count, ranks)
    assert isinstance(count, int)
    if length % count:
        raise _unfit(key, f"{length} is to have {count} equal parts")
    return Division(local, rule.dim, (length // count,) * count, ranks)


def _halves(key: str, rows: int, second: Sequence[int] | None, swiglu: bool) -> int:
    """Return 2 where the first layer is twice as wide as the second takes, else 1."""
    if second is None or len(second) != 2 or FIRST not in key:
        raise _unfit(key, f"`{partner_of(key)}`, which would tell whether it is gated, is missing")
    if rows not in (second[1], 2 * second[1]):
        raise _unfit(key, f"it has {rows} rows, `{partner_of(key)}` {second[1]} columns")
    if swiglu and rows == second[1]:
        raise _unfit(key, "the argument `swiglu` is set, and it has no two halves")
    return 1 if rows == second[1] else 2


def _unfit(key: str, why: str) -> MappingError:
    return MappingError(f"the rule for `{key}` does not fit it", where="--rules", why=why)
