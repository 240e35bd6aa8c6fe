"""Locate the elements of each box inside the items that ``.metadata`` lists.

Each item is a ``torch.save`` zip in a ``.distcp`` file. The byte range of the zip is replaced with
the byte range of its raw elements. A checkpoint of a thousand ranks has a million
items, so the byte ranges of standard items, which have row-major elements and no checksum of a
longer range, are stored in columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from operator import itemgetter

from ckptctl.catalog import Extent, TensorEntry
from ckptctl.columns import NO_CRC, ExtentColumns, get_byte_ranges
from ckptctl.formats.shared.stored_leaves import make_extent
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.torch_tensors import UnreadableTensorError
from ckptctl.storage.read_ahead import FileOffset, prefetch_items
from ckptctl.storage.zips.items import (
    NeighborReader,
    read_item_by_pattern,
    require_matching_chunk,
    select_item_part,
    shift_tensor,
)
from ckptctl.storage.zips.zip_reader import StoredTensor
from ckptctl.tree import TreePath

ReadItem = Callable[[str, int, int], tuple[StoredTensor, int, int]]
"""Function that reads the item at ``(file, offset, length)``.

It returns a tensor, a number of bytes to add to the tensor's offset, and the CRC-32 of the
elements. The tensor may come from an earlier item with the same pattern. The CRC-32 is only valid
if the tensor has one. See
:func:`~ckptctl.storage.zips.items.read_item_by_pattern`.
"""
_ItemPosition = tuple[int, int, "_TensorLocator"]
"""Byte offset of an item in its file, index of its extent, and the locator of its tensor."""


class _TensorLocator:
    """Locator of one tensor's elements inside its items, which can be read in any order.

    Attributes:
        entry: Tensor with the extents of its items.
        unread: Reason why the elements cannot be read, or an empty string if they can.
    """

    __slots__ = ("_columns", "_crcs", "_extents_by_index", "_lengths", "_starts", "entry", "unread")

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self.unread = ""
        extents = entry.extents
        self._columns: ExtentColumns | None = None
        if (
            isinstance(extents, ExtentColumns)
            and extents.codec == "torch"
            and extents.parts is None
        ):
            self._columns = extents
        self._extents_by_index = dict(enumerate(extents)) if self._columns is None else {}
        self._starts, self._lengths, self._crcs = (
            array("q", bytes(0 if self._columns is None else 8 * len(extents))) for _ in range(3)
        )

    def locate_extent(self, extent_index: int, root: TreePath, read_item: ReadItem) -> None:
        """Read the item of extent *extent_index*, and record the byte range of its elements."""
        columns, entry = self._columns, self.entry
        if columns is None:
            self._extents_by_index[extent_index] = resolve_extent(
                root, read_item, entry, self._extents_by_index[extent_index]
            )
            return
        tensor, shift, crc32 = read_item(
            columns.files[extent_index], columns.starts[extent_index], columns.lengths[extent_index]
        )
        is_standard = tensor.strides is None and tensor.within is None
        if (
            not is_standard
            or tensor.dtype != entry.dtype
            or tensor.shape != columns.boxes.sizes[extent_index]
        ):
            self._extents_by_index[extent_index] = resolve_extent(
                root, read_item, entry, columns[extent_index]
            )
            return
        self._starts[extent_index] = tensor.offset + shift
        self._lengths[extent_index] = tensor.nbytes
        self._crcs[extent_index] = NO_CRC if tensor.crc32 is None else crc32

    def build_entry(self) -> TensorEntry:
        """Return the tensor with the extents of its raw elements.

        The tensor has no extents and is marked as unsupported if an item cannot be read.
        """
        if self.unread:
            return replace(self.entry, extents=(), unsupported=self.unread)
        columns = self._columns
        if columns is None:
            return replace(self.entry, extents=tuple(self._extents_by_index.values()))
        boxes_and_files, starts_and_lengths = (
            (columns.boxes, columns.files),
            (self._starts, self._lengths),
        )
        extents: Sequence[Extent] = ExtentColumns(
            *boxes_and_files, *starts_and_lengths, "raw", None, self._crcs
        )
        if self._extents_by_index:
            extents = tuple(
                self._extents_by_index.get(n, extent) for n, extent in enumerate(extents)
            )
        return replace(self.entry, extents=extents)


def locate_elements(
    files: SourceFiles, tensors: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Read all items of *tensors*, and replace their extents with the extents of raw elements.

    Items are read file by file, in the order of their offsets. If the elements of an item cannot be
    read, its tensor is marked as unsupported.

    Raises:
        CkptError: An item is damaged, or does not match the metadata.
    """
    locators = {name: _TensorLocator(entry) for name, entry in tensors.items()}
    read_uncached = partial(read_item_by_pattern, files, read=NeighborReader(files))
    # Several extents may be rows of one item (stacked tensors).
    read_item = lru_cache(maxsize=1)(read_uncached)
    by_file: dict[str, list[_ItemPosition]] = {}
    for locator in locators.values():
        for number, (file, start, _) in enumerate(get_byte_ranges(locator.entry.extents)):
            by_file.setdefault(file, []).append((start, number, locator))
    for file in [*by_file]:
        places = by_file.pop(file)
        places.sort(key=itemgetter(0))
        for _, number, locator in prefetch_items(
            files, places, partial(_iterate_prefetch_offsets, file)
        ):
            try:
                locator.locate_extent(number, files.root, read_item)
            except UnreadableTensorError as error:
                locator.unread = error.unsupported_message
    return {name: locator.build_entry() for name, locator in locators.items()}


def _iterate_prefetch_offsets(file: str, place: _ItemPosition) -> Iterator[FileOffset]:
    """Yield the first and last byte of an item's zip, where its headers are read."""
    start, number, locator = place
    extent = locator.entry.extents[number]
    if extent.codec != "raw":
        yield file, start
        yield file, start + extent.nbytes - 1


def resolve_extent(
    root: TreePath, read_item: ReadItem, entry: TensorEntry, extent: Extent
) -> Extent:
    """Read the item of *extent*, and return the extent of its raw elements.

    Raises:
        CkptError: The item is damaged, or does not match the metadata.
    """
    if extent.codec == "raw":
        return extent

    def describe_location() -> str:
        return f"{root / extent.file}, at byte {extent.offset:,}"

    tensor = shift_tensor(*read_item(extent.file, extent.offset, extent.nbytes))
    sizes = extent.part.shape if extent.part else extent.box.sizes
    require_matching_chunk(
        (tensor.dtype, tensor.shape), entry.name, entry.dtype, sizes, describe_location
    )
    return make_extent(
        select_item_part(tensor, extent.part, extent.box.sizes), extent.file, extent.box
    )
