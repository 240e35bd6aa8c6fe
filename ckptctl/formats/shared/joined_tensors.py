"""Join tensors whose boxes are in the files of several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import mul

from ckptctl import dtypes
from ckptctl.catalog import Box, Extent, TensorEntry, compute_row_major_strides
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import UnsupportedError
from ckptctl.formats.shared.indexes import Integers
from ckptctl.storage.pickles.torch_tensors import compute_layout
from ckptctl.tree import TreePath

ONE_SAVE_HINT = "restore the files of one save (these belong to different saves)"


@dataclass(slots=True)
class JoinedTensor:
    """A global tensor that is joined from the boxes in the files of several ranks.

    Attributes:
        dtype: Name of the torch dtype.
        shape: Global shape.
        path: Keys from the root of the saved object down to the tensor.
        file: First file that contains a box of the tensor.
        requires_grad: Value of ``requires_grad`` in the file.
        extents: First extent of each box, by box.
        copies: Extents of further copies of these boxes.
    """

    dtype: str
    shape: Integers
    path: KeyPath
    file: str
    requires_grad: bool = False
    extents: dict[Box, Extent] = field(default_factory=dict)
    copies: list[Extent] = field(default_factory=list)

    def add_extent(self, extent: Extent) -> Extent | None:
        """Add *extent*, and return the earlier extent of its box, or None if this is the first."""
        first = self.extents.setdefault(extent.box, extent)
        if first is extent:
            return None
        if extent.nbytes:
            self.copies.append(extent)
        return first


def make_tensor_entries(tensors: Mapping[str, JoinedTensor]) -> dict[str, TensorEntry]:
    """Map the names of joined tensors to their catalog entries.

    A tensor with the same dtype, shape and extents as an earlier one becomes an alias of it.
    """
    entries: dict[str, TensorEntry] = {}
    first_names: dict[object, str] = {}
    for name, tensor in tensors.items():
        extents = tuple(tensor.extents.values())
        stored = any(extent.nbytes for extent in extents)
        alias = (
            first_names.setdefault((tensor.dtype, tensor.shape, extents), name) if stored else name
        )
        entries[name] = TensorEntry(
            name,
            tensor.dtype,
            tensor.shape,
            extents,
            tensor.path,
            alias_of=None if alias == name else alias,
            requires_grad=tensor.requires_grad,
        )
    return entries


def make_standalone_entry(name: str, dtype: str, extent: Extent) -> TensorEntry:
    """Build the catalog entry of a tensor that has only the elements of *extent*."""
    box = Box.whole(extent.box.sizes)
    return TensorEntry(name, dtype, box.sizes, (replace(extent, box=box),), (name,))


def slice_extent(extent: Extent, dtype: str, shape: Integers, start: Integers, box: Box) -> Extent:
    """Return the extent of *box*, whose elements are a slice of a rank's local tensor.

    Args:
        extent: Extent of the local tensor.
        dtype: Name of the torch dtype.
        shape: Shape of the local tensor.
        start: Index of the first element of the box in the local tensor, one per dimension.
        box: Index ranges of the box in the global tensor.
    """
    if box.sizes == shape:
        return extent if extent.box is box else replace(extent, box=box)
    strides, itemsize = (
        extent.strides or compute_row_major_strides(shape),
        dtypes.get_itemsize(dtype),
    )
    _, span, dense = compute_layout(box.sizes, strides)
    return Extent(
        box,
        extent.file,
        extent.offset + sum(map(mul, start, strides)) * itemsize,
        span * itemsize,
        strides=None if dense else strides,
        within=extent.recorded_checksum,
    )


def ranks_disagree_error(name: str, where: TreePath | str, why: str) -> UnsupportedError:
    """Build the error for a tensor whose descriptions on two ranks contradict each other."""
    message = f"two ranks disagree on `{name}`"
    return UnsupportedError(message, where=str(where), why=why, hint=ONE_SAVE_HINT)
