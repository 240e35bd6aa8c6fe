"""Statistics of many tensors, read one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ckptctl.catalog import TensorEntry
from ckptctl.errors import CkptError
from ckptctl.ops.watch import Watch, one_of_many

if TYPE_CHECKING:
    from ckptctl.storage.compare import Readable
    from ckptctl.storage.statistics import Statistics

PASSES = 2
"""How often a tensor is read: a histogram needs to know its ends."""


def measured(
    files: Readable,
    entries: Iterable[TensorEntry],
    progress: Watch,
    bins: int,
    failed: Callable[[CkptError, TensorEntry], None] | None = None,
) -> dict[str, Statistics]:
    """Measure the *entries*, whose extents must be ``raw``; torch is imported here.

    A tensor with holes is measured as far as it is there; one whose dtype has no numbers is left
    out, as is one that *failed* is called with an error of.
    """
    from ckptctl.storage.statistics import measure

    entries = list(entries)
    found: dict[str, Statistics] = {}
    with progress(sum(map(_to_read, entries))) as advance:
        for entry in entries:
            try:
                with one_of_many(advance, _to_read(entry)) as seen:
                    statistics = measure(files, entry, bins=bins, seen=seen)
            except CkptError as error:
                if failed is None:
                    raise
                failed(error, entry)
            else:
                found |= {entry.name: statistics} if statistics else {}
    return found


def _to_read(entry: TensorEntry) -> int:
    return PASSES * sum(extent.nbytes for extent in entry.extents)
