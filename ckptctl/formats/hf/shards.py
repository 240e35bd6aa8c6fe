"""Read the shards of a Hugging Face model, and compare them with the index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.errors import CkptError, DamagedError, UnsupportedError, quote_names, spell_option
from ckptctl.formats.shared.findings import Faults
from ckptctl.formats.shared.indexes import sizes_of
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.paths import require_relative
from ckptctl.storage.read_ahead import prefetch_heads
from ckptctl.storage.safetensors_header import read_header, unread_reason
from ckptctl.storage.schema import NOT_EMPTY, Schema, find_member, malformed_errors, read_as
from ckptctl.units import pluralize

if TYPE_CHECKING:
    from ckptctl.formats.shared.stored_leaves import Leaves


@dataclass(frozen=True, slots=True)
class _Index(Schema):
    """Content of ``model.safetensors.index.json``."""

    weight_map: Annotated[dict[str, str], NOT_EMPTY]


ReadShard = tuple[dict[str, TensorEntry], Mapping[str, str]]
"""The tensors of one file, and its metadata."""


def read_shard(files: SourceFiles, name: str) -> ReadShard:
    """Read the tensors and metadata of one safetensors file."""
    header = read_header(files, name, unread=True)
    tensors: dict[str, TensorEntry] = {}
    for key, (dtype, shape, begin, end) in header.tensors.items():
        if key in header.unread:
            tensors[key] = TensorEntry.build_unreadable(
                key, dtype, shape, (key,), unread_reason(dtype)
            )
            continue
        extent = Extent(Box.whole(shape), name, begin, end - begin)
        tensors[key] = TensorEntry(key, dtype, shape, (extent,), (key,))
    return tensors, header.metadata


def agreed_strings(
    found: Iterable[Mapping[str, str]],
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Merge metadata without the keys that differ between files, and return a note on these."""
    agreed: dict[str, str] = {}
    apart: dict[str, None] = {}
    for strings in found:
        apart |= {
            key: None for key, text in strings.items() if agreed.setdefault(key, text) != text
        }
    note = f"metadata values differ between shards: {quote_names([*apart])}"
    kept = {key: text for key, text in agreed.items() if key not in apart}
    return kept, (note,) if apart else ()


def read_bin(files: SourceFiles, name: str) -> Leaves:
    """Read a ``torch.save`` file, or raise if it contains anything but tensors."""
    from ckptctl.formats.shared.stored_leaves import read_leaves

    found = read_leaves(files, name)
    if found.blobs:
        raise UnsupportedError(
            "this file contains values other than tensors",
            where=str(files.root / name),
            why=quote_names(list(found.blobs)),
            hint=f"read it with {spell_option('--from torch')}",
        )
    return found


def merge(tensors: dict[str, TensorEntry], found: Mapping[str, TensorEntry], name: str) -> None:
    """Add the tensors *found* in the shard *name* to *tensors*, or raise on duplicates."""
    twice = [key for key in found if key in tensors]
    if twice:
        other = tensors[twice[0]].extents[0].file
        raise UnsupportedError(
            f"`{twice[0]}` is in two shards", where=name, why=f"it is also in `{other}`"
        )
    tensors |= found


def checked_index(index: object, where: str) -> tuple[dict[str, str], dict[str, str]]:
    """Parse an index into the file of each tensor and the strings of its metadata."""
    with malformed_errors("malformed index", where):
        weight_map = read_as(_Index, index).weight_map
    for file in dict.fromkeys(weight_map.values()):
        require_relative(file, where)
    strings = find_member(dict[str, object], index, "metadata") or {}
    return weight_map, {key: value for key, value in strings.items() if isinstance(value, str)}


def _unnamed(
    weight_map: Mapping[str, str], found: Mapping[str, TensorEntry], name: str, where: str
) -> dict[str, TensorEntry]:
    """Return the tensors of a shard that its index does not list, or raise on contradictions."""
    missing = sorted(key for key, file in weight_map.items() if file == name and key not in found)
    if missing:
        raise DamagedError(
            f"`{name}` is missing {pluralize(len(missing), 'tensor')} listed in the index",
            where=where,
            why=quote_names(missing),
            hint="download the shard again",
        )
    others = sorted(key for key in found if weight_map.get(key, name) != name)
    if others:
        raise UnsupportedError(
            f"`{name}` contains {pluralize(len(others), 'tensor')} that the index places in other "
            "files",
            where=where,
            why=quote_names(others),
        )
    return {key: entry for key, entry in found.items() if key not in weight_map}


class IndexedShards(NamedTuple):
    """Content of the shards of an index.

    Attributes:
        tensors: Tensors of readable shards.
        metadata: Strings of the index and of the shards' headers.
        sizes: Sizes in bytes of the existing shards.
        notes: Messages for the user.
    """

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    sizes: dict[str, int]
    notes: list[str]


def read_shards(
    files: SourceFiles,
    weight_map: Mapping[str, str],
    strings: Mapping[str, str],
    main: str,
    known: Mapping[str, ReadShard],
    faults: Faults,
) -> IndexedShards:
    """Read all shards and compare them with the index."""
    tensors: dict[str, TensorEntry] = {}
    sizes: dict[str, int] = {}
    found, notes = [strings], dict[str, None]()
    shards, where = defaultdict[str, set[str]](set), str(files.root / main)
    for key, file in weight_map.items():
        shards[file].add(key)
    if not faults.partial:
        sizes_of(files, shards, "shards", where, "download them again")
    for name in prefetch_heads(files, shards):
        expected = shards[name]
        kept: dict[str, TensorEntry] = {}
        try:
            sizes[name] = files.size(name)
            if name in known or name.endswith(".safetensors"):
                shard, said = known.get(name) or read_shard(files, name)
                found.append({key: text for key, text in said.items() if key != "format"})
            else:
                contents = read_bin(files, name)
                shard, notes = contents.tensors, notes | dict.fromkeys(contents.notes)
            kept = {key: entry for key, entry in shard.items() if key in expected}
            kept |= _unnamed(weight_map, shard, name, where)
        except CkptError as error:
            faults.unreadable(error, name)
            for key in sorted(expected - kept.keys()):
                faults.nowhere(key, "the index places it in this file", name)
            faults.lost |= {key: ((Box.whole(t.shape), name),) for key, t in kept.items()}
        tensors |= kept
    agreed, differ = agreed_strings(found)
    ties = {key: original for key, original in agreed.items() if original in weight_map}
    for dropped, original in ties.items():
        if dropped not in weight_map and original not in tensors:
            why = f"the metadata records it as tied to `{original}`"
            faults.nowhere(dropped, why, weight_map[original])
    return IndexedShards(tensors, agreed, sizes, [*notes, *differ])
