"""A kind that decompresses: elements of a write item of DCP that went through an extension.

``unpacked``: the input ``item`` is the bytes of the item; they hold one tensor of the file's dtype
and shape in a ``torch.save`` zip. Such bytes can only be read from their first on: the whole item
is decompressed once, into a temporary file, from which all threads of a run read. The items used
last are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ckptctl.catalog import Box, Computed, Extent, TensorEntry
from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.planner.strided import Strided
from ckptctl.storage.crc import crc_of
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.kinds import Inputs, Kind, rectangle
from ckptctl.storage.temporary import TemporaryFile
from ckptctl.storage.tensor_reader import TensorReader
from ckptctl.storage.zips.items import read_item_tensor, require_chunk
from ckptctl.storage.zstd import decompressed
from ckptctl.units import counted

KEPT_ITEMS = 64
KEPT_BYTES = 8 << 30
MOST_TIMES, MOST_MORE = 4, 64 << 20
"""How much longer than its elements an item may be: it may have a part of a larger storage."""


@dataclass(slots=True)
class _Item:
    """What one item holds, once it was asked for."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    files: TemporaryFile | None = None
    entry: TensorEntry | None = None

    @property
    def nbytes(self) -> int:
        return self.files.nbytes if self.files else 0


class _Items:
    """The items of the files below one root."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], _Item] = OrderedDict()

    def item(self, extent: Extent) -> _Item:
        """Return the item in *extent*, which may not be read yet; let go of those used longest ago.

        Whoever reads one of them goes on with it.
        """
        key = (extent.file, extent.offset)
        with self._lock:
            item = self._kept.setdefault(key, _Item())
            self._kept.move_to_end(key)
            total = sum(one.nbytes for one in self._kept.values())
            while len(self._kept) > 1 and (len(self._kept) > KEPT_ITEMS or total > KEPT_BYTES):
                total -= self._kept.popitem(last=False)[1].nbytes
            return item


_LOCK = threading.Lock()
_ITEMS: WeakKeyDictionary[SourceFiles, _Items] = WeakKeyDictionary()


def _unpacked(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    files, extent = inputs.files("item"), inputs.entry("item").extents[0]
    with _LOCK:
        items = _ITEMS.setdefault(files, _Items())
    item = items.item(extent)
    with item.lock:
        if item.entry is None:
            item.files, item.entry = _read(files, inputs.entry("item"), computed)
    assert item.files
    matrix = Strided.whole(item.entry).as_matrix()
    TensorReader(item.files, matrix).fill(rectangle(rows, columns), out)


def _read(
    files: SourceFiles, packed: TensorEntry, computed: Computed
) -> tuple[TemporaryFile, TensorEntry]:
    """Decompress an item, and look at all of it."""
    name, place = packed.name, packed.extents[0]
    where = f"{files.root / place.file}, at byte {place.offset:,}"
    room = TemporaryFile(files.root, place.file)
    most = MOST_TIMES * computed.extent("").nbytes + MOST_MORE
    for piece in decompressed(files, place.file, place.offset, place.nbytes):
        room.append([piece])
        if room.nbytes > most:
            why = f"more than {counted(most, 'byte')} for {computed.dtype} {list(computed.shape)}"
            raise UnsupportedError(f"an item of `{name}` is too long", where=where, why=why)
    found = read_item_tensor(room, place.file, 0, room.nbytes)
    require_chunk((found.dtype, found.shape), name, computed.dtype, computed.shape, lambda: where)
    whole = Box.whole(found.shape)
    extent = Extent(
        *(whole, place.file, found.offset, found.nbytes),
        strides=found.strides,
        crc32=found.crc32,
        within=found.within,
    )
    sum_ = extent.recorded
    if sum_ and crc_of(room, place.file, sum_.offset, sum_.nbytes) != sum_.crc32:
        why = f"the CRC-32 of `{name}` differs from the one in its zip"
        raise DamagedError("checksum mismatch", where=where, why=why)
    return room, TensorEntry(name, found.dtype, found.shape, (extent,), packed.path)


KINDS = {"unpacked": Kind(_unpacked, plain=lambda _: True)}
