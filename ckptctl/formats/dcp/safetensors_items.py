"""Data files that hold safetensors, as ``SerializationFormat.SAFETENSORS`` of torch writes them.

Source: ``torch/distributed/checkpoint/filesystem.py`` (``_write_files_from_queue``). Leaves that
are no tensors come first, in zips as ever. All tensors of the file come behind them, as one blob of
safetensors with a header; metadata gives each of them the offset of that blob and the length of its
elements. The header knows tensors by name alone: of several chunks of one the last is there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ckptctl.catalog import Extent, TensorEntry
from ckptctl.errors import DamagedError
from ckptctl.formats.dcp.metadata import MetadataLeaf
from ckptctl.formats.shared.findings import Faults
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.safetensors_header import SafetensorsHeader, read_header
from ckptctl.storage.zips.items import require_chunk

OFFSETS = "DCP_SHARDING_INFO"
_BEGIN = 9


def in_safetensors(
    files: SourceFiles,
    leaves: Sequence[MetadataLeaf],
    tensors: dict[str, TensorEntry],
    faults: Faults,
) -> dict[str, TensorEntry]:
    """Return the tensors of *leaves* that lie in safetensors, with the places of their elements."""
    headers: dict[tuple[str, int], SafetensorsHeader | None] = {}
    for extent in (one for leaf in leaves for one in tensors[leaf.name].extents):
        place = (extent.file, extent.offset)
        if place not in headers and _begins(files, *place):
            headers[place] = faults.read(
                extent.file, partial(read_header, files, start=extent.offset)
            )
    found: dict[str, TensorEntry] = {}
    for entry in (tensors[leaf.name] for leaf in leaves):
        extents = []
        for extent in entry.extents:
            place = (extent.file, extent.offset)
            header = headers.get(place)
            if header is not None:
                extents.append(_located(files, entry, extent, header))
            elif place in headers:
                gone = (*faults.lost.get(entry.name, ()), (extent.box, extent.file))
                faults.lost[entry.name] = gone
            else:
                extents.append(extent)
        if tuple(extents) != entry.extents:
            found[entry.name] = replace(entry, extents=tuple(extents))
    return found


def _begins(files: SourceFiles, name: str, offset: int) -> bool:
    """Return whether a safetensors header may begin there."""
    head = files.read_some(name, offset, _BEGIN)
    return head[8:] == b"{" and not head.startswith(b"PK\3\4")


def _located(
    files: SourceFiles, entry: TensorEntry, extent: Extent, header: SafetensorsHeader
) -> Extent:
    where = f"{files.root / extent.file}, at byte {extent.offset:,}"
    span = header.tensors.get(entry.name)
    if span is None:
        why = "the metadata lists it"
        raise DamagedError(f"`{entry.name}` is not in the safetensors file", where=where, why=why)
    dtype, shape, begin, end = span
    first = _first(header, entry.name)
    if first is not None and first != list(extent.box.offsets):
        raise DamagedError(
            f"a chunk of `{entry.name}` is missing",
            where=where,
            why=f"{extent.box} was overwritten by the chunk that starts at {first}; "
            "torch keeps one chunk of a tensor in each safetensors file",
        )
    require_chunk((dtype, shape), entry.name, entry.dtype, extent.box.sizes, lambda: where)
    return Extent(extent.box, extent.file, begin, end - begin)


def _first(header: SafetensorsHeader, name: str) -> object:
    """Return the offsets that the header has of a chunk; None: it has none."""
    try:
        return json.loads(header.metadata[OFFSETS])[name]["saved_offsets"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
