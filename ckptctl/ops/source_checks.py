"""Checksums of a source that no copy takes on its way.

A copy of all the bytes that a checksum was recorded of checks it as it reads. Bytes that are read
in parts (concatenated tensors, what a rank holds as several boxes), or by a computation, are not
checked by that: the plan reads such ranges once more, from end to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckptctl.catalog import Computed, Extent, TensorEntry, is_computed
from ckptctl.planner.plan import Check, Transfer


def unchecked(
    root: str,
    entries: Iterable[TensorEntry],
    transfers: Iterable[Transfer],
    computed: Mapping[str, Computed],
) -> tuple[Check, ...]:
    """Return the recorded checksums that *transfers* leave unchecked.

    Args:
        root: The directory of the source.
        entries: The tensors that are converted.
        transfers: What copies them.
        computed: The virtual files that transfers read.
    """
    taken = {
        (root, operand.file, operand.offset, operand.nbytes)
        for transfer in transfers
        for operand in transfer.source.operands
        if operand.crc32 is not None
    }
    found: dict[tuple[str, str, int, int], Check] = {}
    for directory, name, extent in _read(root, entries, computed):
        known = extent.recorded
        if known is None or not known.nbytes:
            continue
        place = (directory, extent.file, known.offset, known.nbytes)
        if place not in taken:
            found.setdefault(place, Check(*place, crc32=known.crc32, name=name))
    return tuple(found.values())


def _read(
    root: str, entries: Iterable[TensorEntry], computed: Mapping[str, Computed]
) -> Iterator[tuple[str, str, Extent]]:
    """Yield everything that is read of real files: ``(root, tensor, extent)``."""
    inputs = ((i.root, i.entry) for one in computed.values() for i in one.inputs.values())
    for directory, entry in (*((root, entry) for entry in entries), *inputs):
        for extent in entry.extents:
            if not is_computed(extent.file):
                yield directory, entry.name, extent
