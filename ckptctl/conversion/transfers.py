"""Planning of transfers, which copy stored tensors to boxes of output files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ckptctl import dtypes
from ckptctl.catalog import (
    Catalog,
    ComputedTensor,
    TensorEntry,
    build_computed_name,
    compute_row_major_strides,
    find_reachable_files,
    list_input_files,
)
from ckptctl.columns import get_extent_files
from ckptctl.file_identity import FileIdentity
from ckptctl.formats.base import OutputLayout, TensorPlace
from ckptctl.planner.copying.blocks import build_rearranged_file
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.planner.plan import RawCopy, Record, TargetBox, Transfer
from ckptctl.planner.strided import StridedTensor
from ckptctl.storage.files import source_files
from ckptctl.tree import TreePath


class Transfers(NamedTuple):
    """Transfers that write an output, with the virtual files that they may read, by name."""

    transfers: tuple[Transfer, ...]
    computed: Mapping[str, ComputedTensor]


def plan_transfers(
    catalog: Catalog,
    tensors: Mapping[str, ComposedTensor],
    output: OutputLayout,
    target_dtypes: Mapping[str, str],
) -> Transfers:
    """Plan one transfer for each tensor that *output* assigns to boxes of files."""
    computed, transfers = dict(catalog.computed), list[Transfer]()
    for key, composed in tensors.items():
        places = output.boxes.get(key)
        if not places:
            continue
        dtype = target_dtypes[key]
        tensor = build_target_tensor(catalog, composed, dtype, computed)
        itemsize = dtypes.get_itemsize(dtype)
        boxes = tuple(
            _build_target_box(place, output.records[place.record], itemsize) for place in places
        )
        transfers.append(Transfer(key, tensor, boxes))
    return Transfers(tuple(transfers), computed)


def build_target_tensor(
    catalog: Catalog, composed: ComposedTensor, dtype: str, computed: dict[str, ComputedTensor]
) -> StridedTensor:
    """Build a target tensor of *dtype* from elements of stored tensors.

    If the stored tensors have different dtypes, virtual files that cast them to *dtype* are added
    to *computed*.
    """
    read = {key: catalog.tensors[key] for key in composed.keys}
    if len({entry.dtype for entry in read.values()}) > 1:
        for key, entry in read.items():
            if entry.dtype != dtype:
                file = build_computed_name(f"{entry.name}@{dtype}")
                computed_tensor = build_rearranged_file(
                    catalog.root, StridedTensor.from_entry(entry).cast(dtype)
                )
                computed[file], read[key] = (
                    computed_tensor,
                    computed_tensor.to_entry(entry.name, entry.path, file),
                )
    return composed.bind_entries(read, dtype)


def _build_target_box(place: TensorPlace, record: Record, itemsize: int) -> TargetBox:
    box, strides = place.box, place.strides or compute_row_major_strides(place.box.sizes)
    steps = tuple([stride * itemsize for stride in strides])
    begin = record.offset + place.start * itemsize
    return TargetBox(record.file, begin, box.offsets, box.sizes, steps, place.record)


def list_read_entries(transfers: Iterable[Transfer]) -> list[TensorEntry]:
    """Return the stored tensors that *transfers* read, without duplicates."""
    entries = {
        id(entry): entry for transfer in transfers for entry in transfer.iterate_stored_tensors()
    }
    return list(entries.values())


def identify_read_files(
    root: TreePath,
    transfers: Sequence[Transfer],
    virtual: Mapping[str, ComputedTensor],
    raw: Sequence[RawCopy] = (),
) -> tuple[dict[str, ComputedTensor], dict[str, FileIdentity]]:
    """Find the virtual files that *transfers* read, and read the identities of real files.

    The identities include the files in *root* that virtual files and *raw* copies read.
    """
    entries = list_read_entries(transfers)
    read = dict.fromkeys(file for entry in entries for file in get_extent_files(entry.extents))
    computed = find_reachable_files(virtual, read)
    names = {name: None for name in read if name not in computed}
    names |= dict.fromkeys(
        sorted(file for place, file in list_input_files(computed) if place == root)
    )
    names |= dict.fromkeys(item.source for item in raw)
    return computed, read_identities(root, names)


def read_identities(root: TreePath, names: Iterable[str]) -> dict[str, FileIdentity]:
    """Read the identity of each file in *names*, which are relative to *root*."""
    with source_files(root) as files:
        return {name: files.read_identity(name) for name in names}
