"""Read the shards of a Hugging Face model, and compare their tensors with the index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.errors import CkptError, DamagedError, UnsupportedError, format_option, quote_names
from ckptctl.formats.shared.findings import FaultCollector
from ckptctl.formats.shared.indexes import read_file_sizes
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.paths import require_relative
from ckptctl.storage.read_ahead import prefetch_heads
from ckptctl.storage.safetensors_header import read_safetensors_header, unread_reason
from ckptctl.storage.schema import (
    NOT_EMPTY,
    Schema,
    read_as,
    read_nested_or_none,
    wrap_malformed_errors,
)
from ckptctl.units import pluralize

if TYPE_CHECKING:
    from ckptctl.formats.shared.stored_leaves import Leaves


@dataclass(frozen=True, slots=True)
class _Index(Schema):
    """Schema of ``model.safetensors.index.json``."""

    weight_map: Annotated[dict[str, str], NOT_EMPTY]


ShardContent = tuple[dict[str, TensorEntry], Mapping[str, str]]
"""Tensors of one safetensors file by key, and the metadata in its header."""


def read_shard(files: SourceFiles, name: str) -> ShardContent:
    """Read the tensor entries and metadata from the header of the safetensors file *name*."""
    header = read_safetensors_header(files, name, allow_unknown_dtypes=True)
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


def merge_shard_metadata(
    shard_strings: Iterable[Mapping[str, str]],
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Merge the header metadata of shards, without keys whose values differ between shards.

    The second result is a note that lists these keys, or empty if there are none.
    """
    agreed: dict[str, str] = {}
    differing: dict[str, None] = {}
    for strings in shard_strings:
        differing |= {
            key: None for key, text in strings.items() if agreed.setdefault(key, text) != text
        }
    note = f"metadata values differ between shards: {quote_names([*differing])}"
    common = {key: text for key, text in agreed.items() if key not in differing}
    return common, (note,) if differing else ()


def read_torch_shard(files: SourceFiles, name: str) -> Leaves:
    """Read the ``torch.save`` file *name*, or raise if it contains non-tensor values."""
    from ckptctl.formats.shared.stored_leaves import read_leaves

    leaves = read_leaves(files, name)
    if leaves.blobs:
        raise UnsupportedError(
            "this file contains values other than tensors",
            where=str(files.root / name),
            why=quote_names(list(leaves.blobs)),
            hint=f"read it with {format_option('--from torch')}",
        )
    return leaves


def add_shard_tensors(
    tensors: dict[str, TensorEntry], shard_tensors: Mapping[str, TensorEntry], name: str
) -> None:
    """Add the tensors of the shard *name* to *tensors*, or raise if one is already present."""
    duplicates = [key for key in shard_tensors if key in tensors]
    if duplicates:
        other_file = tensors[duplicates[0]].extents[0].file
        raise UnsupportedError(
            f"`{duplicates[0]}` is in two shards", where=name, why=f"it is also in `{other_file}`"
        )
    tensors |= shard_tensors


def parse_index(index: object, where: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the ``weight_map`` of an index, and the string values in its ``metadata``."""
    with wrap_malformed_errors("malformed index", where):
        weight_map = read_as(_Index, index).weight_map
    for file in dict.fromkeys(weight_map.values()):
        require_relative(file, where)
    strings = read_nested_or_none(dict[str, object], index, "metadata") or {}
    return weight_map, {key: value for key, value in strings.items() if isinstance(value, str)}


def _find_unlisted_tensors(
    weight_map: Mapping[str, str], shard_tensors: Mapping[str, TensorEntry], name: str, where: str
) -> dict[str, TensorEntry]:
    """Return the tensors of the shard *name* that the index does not list.

    Raises an error if a tensor that the index assigns to this shard is missing, or if the index
    assigns a tensor of this shard to another one.
    """
    missing = sorted(
        key for key, file in weight_map.items() if file == name and key not in shard_tensors
    )
    if missing:
        raise DamagedError(
            f"`{name}` is missing {pluralize(len(missing), 'tensor')} listed in the index",
            where=where,
            why=quote_names(missing),
            hint="download the shard again",
        )
    misplaced = sorted(key for key in shard_tensors if weight_map.get(key, name) != name)
    if misplaced:
        raise UnsupportedError(
            f"`{name}` contains {pluralize(len(misplaced), 'tensor')} that the index places "
            "in other "
            "files",
            where=where,
            why=quote_names(misplaced),
        )
    return {key: entry for key, entry in shard_tensors.items() if key not in weight_map}


class IndexedShards(NamedTuple):
    """Tensors and metadata of all shards that an index lists.

    Attributes:
        tensors: Tensors of the readable shards, by key.
        metadata: Merged string metadata of the index and of the shards' headers.
        sizes: Sizes in bytes of the existing shards, by file name.
        notes: Messages for the user.
    """

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    sizes: dict[str, int]
    notes: list[str]


def read_shards(
    files: SourceFiles,
    weight_map: Mapping[str, str],
    index_metadata: Mapping[str, str],
    index_name: str,
    known_shards: Mapping[str, ShardContent],
    faults: FaultCollector,
) -> IndexedShards:
    """Read all shards that an index lists, and compare their tensors with the index.

    Args:
        files: Files of the checkpoint.
        weight_map: File name of each tensor according to the index, by key.
        index_metadata: String values in the ``metadata`` of the index.
        index_name: File name of the index.
        known_shards: Shards that were already read, by file name.
        faults: Collector of the problems found.
    """
    tensors: dict[str, TensorEntry] = {}
    sizes: dict[str, int] = {}
    all_strings, notes = [index_metadata], dict[str, None]()
    shards, where = defaultdict[str, set[str]](set), str(files.root / index_name)
    for key, file in weight_map.items():
        shards[file].add(key)
    if not faults.partial:
        read_file_sizes(files, shards, "shards", where, "download them again")
    for name in prefetch_heads(files, shards):
        expected = shards[name]
        usable: dict[str, TensorEntry] = {}
        try:
            sizes[name] = files.size(name)
            if name in known_shards or name.endswith(".safetensors"):
                shard, shard_strings = known_shards.get(name) or read_shard(files, name)
                all_strings.append(
                    {key: text for key, text in shard_strings.items() if key != "format"}
                )
            else:
                contents = read_torch_shard(files, name)
                shard, notes = contents.tensors, notes | dict.fromkeys(contents.notes)
            usable = {key: entry for key, entry in shard.items() if key in expected}
            usable |= _find_unlisted_tensors(weight_map, shard, name, where)
        except CkptError as error:
            faults.add_or_raise(error, name)
            for key in sorted(expected - usable.keys()):
                faults.add_missing_tensor(key, "the index places it in this file", name)
            faults.lost |= {key: ((Box.whole(t.shape), name),) for key, t in usable.items()}
        tensors |= usable
    agreed, differ = merge_shard_metadata(all_strings)
    ties = {key: original for key, original in agreed.items() if original in weight_map}
    for dropped, original in ties.items():
        if dropped not in weight_map and original not in tensors:
            why = f"the metadata records it as tied to `{original}`"
            faults.add_missing_tensor(dropped, why, weight_map[original])
    return IndexedShards(tensors, agreed, sizes, [*notes, *differ])
