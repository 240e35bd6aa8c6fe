"""Which bytes and tensors checksums prove: those that a right one covers, and no wrong one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from ckptctl.catalog import TensorEntry

Span = tuple[str, int, int]
"""A file, the first byte, and the one behind the last."""
Pairs = list[tuple[int, int]]


class Proof:
    """The bytes of each file that are proven.

    Args:
        right: Spans whose checksum is right; they may overlap.
        wrong: Spans whose checksum is not.
        compared: Whether checksums of any data are recorded.
    """

    def __init__(
        self, right: Iterable[Span], wrong: Iterable[Span], compared: bool = False
    ) -> None:
        self.compared = compared
        bad = _joined(wrong)
        spans = {file: _less(some, bad.get(file, ())) for file, some in _joined(right).items()}
        self._spans: Mapping[str, Pairs] = spans

    def nbytes(self) -> dict[str, int]:
        """How much of each file is proven."""
        return {file: sum(end - start for start, end in some) for file, some in self._spans.items()}

    def tensors(self, entries: Iterable[TensorEntry]) -> int:
        """How many of *entries*, the bytes of which are located, are proven as a whole."""
        return sum(
            not entry.unsupported
            and all(self._has(one.file, one.offset, one.nbytes) for one in entry.extents)
            for entry in entries
        )

    def _has(self, file: str, offset: int, nbytes: int) -> bool:
        spans = self._spans.get(file, [])
        place = bisect_right(spans, offset, key=lambda pair: pair[0]) - 1
        return not nbytes or (place >= 0 and offset + nbytes <= spans[place][1])


def _joined(spans: Iterable[Span]) -> dict[str, Pairs]:
    """Return the spans of each file in order; those that touch are one."""
    found: dict[str, Pairs] = {}
    for file, start, end in sorted(spans):
        known = found.setdefault(file, [])
        if known and start <= known[-1][1]:
            known[-1] = known[-1][0], max(end, known[-1][1])
        else:
            known.append((start, end))
    return found


def _less(spans: Pairs, gone: Sequence[tuple[int, int]]) -> Pairs:
    """Return what is left of *spans* without *gone*; both in order and apart."""
    left: Pairs = []
    rest = iter(gone)
    hole = next(rest, None)
    for start, end in spans:
        while hole and hole[1] <= start:
            hole = next(rest, None)
        while hole and hole[0] < end:
            if start < hole[0]:
                left.append((start, hole[0]))
            start = min(hole[1], end)
            if hole[1] > end:
                break
            hole = next(rest, None)
        if start < end:
            left.append((start, end))
    return left
