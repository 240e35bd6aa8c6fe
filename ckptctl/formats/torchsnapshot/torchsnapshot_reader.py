"""Read the manifest of a snapshot, and the tensors and objects of all ranks.

The manifest maps ``rank/path/of/the/leaf`` to the location of each leaf. Source: torchsnapshot
0.1.0, ``manifest.py``, ``flatten.py``, ``partitioner.py``, and the main branch (df45917) for
DTensors. The YAML manifests of older versions are not supported.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple
from urllib.parse import unquote

from ckptctl import dtypes
from ckptctl.catalog import Box, Catalog, Finding, Index
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import (
    CkptError,
    DamagedError,
    FormatError,
    SourceNotFoundError,
    UnsupportedError,
)
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.shared.findings import MISSING_TENSOR_MESSAGE, UNUSABLE_ERRORS, FaultCollector
from ckptctl.formats.shared.indexes import ByteRange, parse_integers, require_tiled_files
from ckptctl.formats.shared.leaves import build_nested_object, flatten_object, join_path
from ckptctl.formats.shared.rank_archive import LocalShard, ShardedPart
from ckptctl.formats.shared.rank_merge import RankMerger
from ckptctl.formats.shared.stored_leaves import (
    NO_CHECKSUMS,
    is_stored_tensor,
    refuse_hidden_tensors,
)
from ckptctl.formats.sidecar_files import scan_sidecar_files
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.paths import require_relative
from ckptctl.storage.pickles.torch_tensors import MAX_RANK
from ckptctl.storage.schema import (
    MalformedError,
    MismatchError,
    Natural,
    Schema,
    read_as,
    size_between,
    wrap_malformed_errors,
)
from ckptctl.storage.zips.items import read_item_tensor
from ckptctl.storage.zips.zip_reader import StoredTensor, read_archive
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

METADATA = ".snapshot_metadata"
_Leaf = tuple[str, KeyPath, object]
_Sizes = Mapping[str, int]
"""Sizes of the data files in bytes, by file name."""
_RANK_SHARDED_TYPES = ("ShardedTensor", "DTensor")
SHARDED_TYPES = (*_RANK_SHARDED_TYPES, "ChunkedTensor")
MAX_METADATA_BYTES = 1 << 30
PRIMITIVE_TYPES = ("int", "str", "bool", "bytes", "float")
_DICT_TYPES = ("dict", "OrderedDict")
_YAML = re.compile(rb"[a-z_]+:")
Fields = Mapping[str, object]
Sizes = Annotated[tuple[Natural, ...], size_between(0, MAX_RANK)]


def read_catalog(path: TreePath, options: ReadOptions, name: str) -> Catalog:
    """Read the catalog of the snapshot in the folder *path*, with *name* as its format name."""
    where = str(path / METADATA)
    with source_files(path) as files:
        merger = RankMerger(files, faults := FaultCollector(path, options.partial))
        with wrap_malformed_errors("this is not the metadata of torchsnapshot", where):
            entries, rank_notes = read_manifest(files)
            sizes = read_file_sizes(files, entries, where, faults)
            leaves_by_entry = [(e, _read_entry(files, sizes, faults, e)) for e in entries]
            for rank, file, keys, leaf in _join_plain_lists(leaves_by_entry):
                merger.add_leaves(rank, file, [(keys, leaf)])
        leaves = merger.merge_leaves()
    sidecars = scan_sidecar_files(path, sizes)
    return replace(
        sidecars.start_catalog(path, name),
        files={file: size for file, size in sizes.items() if file not in faults.unusable_files},
        tensors=leaves.tensors,
        blobs=leaves.blobs,
        notes=(NO_CHECKSUMS, *rank_notes, *leaves.notes),
        findings=tuple(faults.findings),
        lost=faults.lost,
    )


def _read_entry(
    files: SourceFiles, sizes: _Sizes, faults: FaultCollector, entry: ManifestEntry
) -> list[_Leaf]:
    """Read the leaves of *entry*, or return an empty list and add a finding if it is unreadable."""
    name = join_path(entry.path)
    lost_boxes = tuple(
        (box, stored.file) for box, stored in entry.parts if stored.file in faults.unusable_files
    )
    if lost_boxes and len(lost_boxes) == len(entry.parts):
        message, file = (
            "a value is missing" if entry.kind == "object" else MISSING_TENSOR_MESSAGE,
            lost_boxes[0][1],
        )
        why = f"it is stored in `{file}`, which cannot be used"
        faults.findings.append(Finding(message, why, "error", file, name))
        return []
    if lost_boxes:
        faults.lost[name] = lost_boxes
        entry = entry._replace(
            parts=[p for p in entry.parts if p[1].file not in faults.unusable_files]
        )
    try:
        return list(_read_leaves(files, sizes, entry))
    except UNUSABLE_ERRORS as error:
        faults.add_or_raise(error, tensor=name)
        return []


def _join_plain_lists(
    leaves_by_entry: Sequence[tuple[ManifestEntry, Sequence[_Leaf]]],
) -> Iterator[tuple[int, str, KeyPath, object]]:
    """Yield the rank, file, path and value of every leaf.

    A list without tensors and dictionaries is a leaf, as in other formats. The items of a list stay
    separate if some of them are missing on a rank.
    """
    separate: set[KeyPath] = set()
    positions: dict[tuple[int, KeyPath], set[int]] = {}
    for entry, leaves in leaves_by_entry:
        values = [leaf for _, path, leaf in leaves if path == entry.path]
        is_plain = len(values) == 1 and not isinstance(values[0], dict | StoredTensor | ShardedPart)
        for depth, key in enumerate(entry.path):
            if not isinstance(key, Index):
                continue
            positions.setdefault((entry.rank, entry.path[:depth]), set()).add(int(key))
            if not is_plain or not all(isinstance(k, Index) for k in entry.path[depth:]):
                separate.add(entry.path[:depth])
    for (_, path), numbers in positions.items():
        if max(numbers) >= len(numbers):
            separate.update(path[:depth] for depth in range(len(path) + 1))
    joined: dict[tuple[int, KeyPath], list[tuple[KeyPath, object]]] = {}
    for entry, leaves in leaves_by_entry:
        outermost = next(
            (
                entry.path[:depth]
                for depth, key in enumerate(entry.path)
                if isinstance(key, Index) and entry.path[:depth] not in separate
            ),
            None,
        )
        for file, path, leaf in leaves:
            if outermost is None:
                yield entry.rank, file, path, leaf
            else:
                items = joined.setdefault((entry.rank, outermost), [])
                items.append((path[len(outermost) :], leaf))
    for (rank, path), items in joined.items():
        yield rank, "", path, build_nested_object(items)


def _read_leaves(
    files: SourceFiles, sizes: _Sizes, entry: ManifestEntry
) -> Iterator[tuple[str, KeyPath, object]]:
    """Yield the file name, path and value of every leaf of *entry*.

    The file name is empty for values in the manifest itself.
    """
    kind, path, shape = entry.kind, entry.path, entry.shape
    if kind in PRIMITIVE_TYPES:
        yield "", path, parse_primitive(entry.fields)
    elif kind == "empty":
        yield "", path, entry.fields["value"]
    elif kind not in ("Tensor", "object", *SHARDED_TYPES):
        raise UnsupportedError(
            f"entries of type `{kind}` are not supported", where=f"`{join_path(path)}`"
        )
    for box, stored in entry.parts:
        first, last = stored.byte_range or (0, sizes[stored.file])
        if kind == "object":
            where = str(files.root / stored.file)
            archive = read_archive(files, stored.file, first, last - first)
            for subpath, leaf in flatten_object(archive.root, is_stored_tensor, where=where):
                if not is_stored_tensor(leaf):
                    refuse_hidden_tensors(leaf, join_path((*path, *subpath)), where)
                yield stored.file, (*path, *subpath), leaf
            continue
        tensor = _read_tensor(files, stored, first, last - first, join_path(path))
        if kind == "Tensor":
            yield stored.file, path, tensor
            continue
        dtype = entry.parts[0][1].dtype
        if (tensor.dtype, tensor.shape) != (dtype, box.sizes):
            raise ValueError(f"a shard of `{join_path(path)}` has a different dtype or shape")
        piece = LocalShard(box, tensor, (0,) * len(shape))
        yield stored.file, path, ShardedPart(dtype, shape, (piece,), False, None, frozenset())


def _read_tensor(
    files: SourceFiles, stored: StoredRange, first: int, nbytes: int, name: str
) -> StoredTensor:
    if stored.serializer == "torch_save":
        return read_item_tensor(files, stored.file, first, nbytes)
    if stored.serializer != "buffer_protocol":
        raise UnsupportedError(
            f"the serializer `{stored.serializer}` is not supported", where=f"tensor `{name}`"
        )
    needed = Box.whole(stored.shape).numel * dtypes.get_itemsize(stored.dtype)
    if needed != nbytes:
        raise ValueError(f"`{name}` needs {pluralize(needed, 'byte')} but has {nbytes:,}")
    place = f"{stored.file}:{first}"
    return StoredTensor(stored.dtype, stored.shape, None, first, nbytes, None, place, False)


@dataclass(frozen=True, slots=True)
class _Manifest(Schema):
    """Schema of ``.snapshot_metadata``."""

    world_size: Natural
    manifest: dict[str, dict[str, object]]


@dataclass(frozen=True, slots=True)
class _Shard(Schema):
    """Schema of a shard or chunk in the manifest, with its location in ``tensor``."""

    offsets: Sizes
    sizes: Sizes
    tensor: dict[str, object]


class ManifestEntry(NamedTuple):
    """A tensor, object or primitive value in the manifest.

    Attributes:
        rank: Rank that saved the value, or the lowest of these ranks if it is sharded.
        path: Keys from the root of the rank's state down to the value.
        kind: Type in the manifest, or ``empty`` for an empty dictionary or list.
        fields: Fields of the entry in the manifest.
        parts: Boxes of a tensor on all ranks, or one box for an object, each with its location.
        shape: Global shape of a sharded tensor, or empty.
    """

    rank: int
    path: KeyPath
    kind: str
    fields: Fields
    parts: list[tuple[Box, StoredRange]]
    shape: tuple[int, ...]


class StoredRange(NamedTuple):
    """Location of a tensor or an object in a data file.

    Attributes:
        file: Name of the file.
        byte_range: Offsets of the first byte and of the end, or None for the complete file.
        serializer: Name of the serializer, ``buffer_protocol`` or ``torch_save``.
        dtype: Name of the torch dtype, or empty for objects.
        shape: Shape of the tensor or shard, or empty for objects.
    """

    file: str
    byte_range: tuple[int, int] | None
    serializer: str
    dtype: str
    shape: tuple[int, ...]


def read_manifest(files: SourceFiles) -> tuple[list[ManifestEntry], list[str]]:
    """Read the entries of all ranks from the manifest, sorted by rank, and notes about ranks.

    The shards of a tensor on all ranks are combined into one entry.
    """
    where = str(files.root / METADATA)
    if _YAML.match(files.read(METADATA, 0, min(files.size(METADATA), 64))):
        raise FormatError(
            "the metadata is not JSON",
            where=where,
            why="old versions of torchsnapshot wrote YAML",
            hint="take the snapshot again with torchsnapshot 0.1.0 or later",
        )
    content = read_as(_Manifest, read_json(files, METADATA, MAX_METADATA_BYTES))
    entries = _return_moved_entries(content.manifest, content.world_size)
    ranks = {path: _parse_rank(path, content.world_size) for path in entries}
    children = _map_children(entries)
    # Only rank 0 has the items of a list if they are equal on all ranks.
    replicated_parents = {
        _remove_rank(path.rpartition("/")[0])
        for path, fields in entries.items()
        if _is_replicated(fields)
    }
    sharded: dict[KeyPath, ManifestEntry] = {}
    regular: list[ManifestEntry] = []
    for path in sorted(entries, key=lambda entry_path: ranks[entry_path]):
        fields = entries[path]
        kind = str(fields["type"])
        if kind in (*_DICT_TYPES, "list"):
            _check_manifest_keys(path, fields, children, where)
            is_filled = path in children or _remove_rank(path) in replicated_parents
            if is_filled or fields.get("keys"):
                continue
            kind, fields = "empty", {"value": {} if kind in _DICT_TYPES else []}
        else:
            _require_container(path, entries, where)
        entry = ManifestEntry(ranks[path], _parse_path(path, entries), kind, fields, [], ())
        if kind in SHARDED_TYPES:
            parts = read_as(list[_Shard], fields.get("shards", fields.get("chunks")), "shards")
            boxes = [(Box(p.offsets, p.sizes), _parse_range("Tensor", p.tensor)) for p in parts]
            if kind in _RANK_SHARDED_TYPES:
                entry = sharded.setdefault(entry.path, entry)
            else:
                regular.append(entry)
            entry.parts.extend(boxes)
        else:
            regular.append(entry)
            if kind in ("Tensor", "object"):
                stored = _parse_range(kind, fields)
                entry.parts.append((Box.whole(stored.shape), stored))
    world, idle = content.world_size, content.world_size - len(set(ranks.values()))
    note = f"the manifest has no entries of {idle:,} of {pluralize(world, 'rank')}"
    notes = [note] if idle else []
    all_entries = map(_add_global_shape, (*regular, *sharded.values()))
    return sorted(all_entries, key=lambda entry: entry.rank), notes


def _add_global_shape(entry: ManifestEntry) -> ManifestEntry:
    """Return *entry* with its recorded global shape, or the shape that its shards span if None."""
    if entry.kind not in SHARDED_TYPES:
        return entry
    if not entry.parts:
        raise MalformedError(f"`{join_path(entry.path)}` has no shards")
    if (shape := entry.fields.get("shape")) is not None:
        return entry._replace(shape=parse_integers(shape))
    boxes = (box for box, _ in entry.parts)
    ends = zip(*(map(sum, zip(b.offsets, b.sizes, strict=True)) for b in boxes), strict=True)
    return entry._replace(shape=tuple(map(max, ends)))


def _parse_rank(path: str, world: int) -> int:
    head = path.partition("/")[0]
    if not head.isascii() or not head.isdigit() or int(head) >= world:
        raise MalformedError(f"`{path}` does not start with a rank below {world}")
    return int(head)


def _is_replicated(fields: Fields) -> bool:
    """Return whether torchsnapshot moves an entry to rank 0, because all ranks have its value."""
    if fields["type"] == "DTensor":
        dim_map = read_as(list[list[int]], fields.get("dim_map", [[]]), "dim_map")
        return all(mesh_dims[:1] == [-1] for mesh_dims in dim_map)
    return fields.get("replicated") is True


def _return_moved_entries(entries: Mapping[str, Fields], world: int) -> Mapping[str, Fields]:
    """Return *entries* with each DTensor of rank 0 below a dictionary that lists it.

    torchsnapshot moves fully replicated DTensors to rank 0, even if their device mesh does not
    contain rank 0. The dictionary that lists such a DTensor is another rank's.
    """
    moved_paths = [
        path
        for path, fields in entries.items()
        if path.startswith("0/") and fields["type"] == "DTensor" and _is_replicated(fields)
    ]
    if not moved_paths:
        return entries
    lists: dict[str, str] = {}
    dictionaries: dict[str, str] = {}
    for container, fields in sorted(entries.items(), key=lambda item: _parse_rank(item[0], world)):
        if fields["type"] == "list":
            lists.setdefault(_remove_rank(container), container)
        for name in _encode_keys(fields) if fields["type"] in _DICT_TYPES else ():
            dictionaries.setdefault(f"{_remove_rank(container)}/{name}", container)
    returned_paths: dict[str, str] = {}
    for path in moved_paths:
        parent, _, name = path.rpartition("/")
        container = dictionaries.get(_remove_rank(path)) or lists.get(_remove_rank(parent), parent)
        if (returned_path := f"{container}/{name}") not in entries:
            returned_paths[path] = returned_path
    return {returned_paths.get(path, path): fields for path, fields in entries.items()}


def _encode_keys(fields: Fields) -> dict[str, None]:
    """Return the keys that the entry of a dictionary lists, as they are in paths."""
    keys = read_as(list[object], fields.get("keys", []), "keys")
    return {str(key).replace("%", "%25").replace("/", "%2F"): None for key in keys}


def _map_children(entries: Mapping[str, Fields]) -> dict[str, set[str]]:
    """Map each path in the manifest to the names directly below it.

    Each path is a key of the result twice: as it is, and with an empty string in place of the rank.
    """
    children: dict[str, set[str]] = {}
    for path in entries:
        head, _, last = path.rpartition("/")
        children.setdefault(head, set()).add(last)
        children.setdefault(_remove_rank(head), set()).add(last)
    return children


def _remove_rank(path: str) -> str:
    return "/" + path.partition("/")[2]


def _check_manifest_keys(
    path: str, fields: Fields, children: Mapping[str, set[str]], where: str
) -> None:
    """Raise if the keys that a dictionary lists are not the names below it.

    A value that all ranks have may be stored below the path of another rank.
    """
    names = _encode_keys(fields)
    shared_names = children.get(_remove_rank(path), set())
    missing = next((name for name in names if name not in shared_names), None)
    if missing is not None:
        raise UnsupportedError(
            f"`{path}/{missing}` is not in the manifest",
            where=where,
            why=f"`{path}` lists this key",
        )
    if "keys" in fields and (unlisted := children.get(path, set()) - names.keys()):
        raise DamagedError(
            f"`{path}` does not list the key `{min(unlisted)}`",
            where=where,
            why=f"the manifest contains `{path}/{min(unlisted)}`",
        )


def _require_container(path: str, entries: Mapping[str, Fields], where: str) -> None:
    """Raise if the dictionary or list of a value is not in the manifest."""
    container = path.rpartition("/")[0]
    if "/" in container and container not in entries:
        raise DamagedError(
            f"`{container}` is not in the manifest",
            where=where,
            why=f"the manifest contains `{path}`",
        )


def _parse_path(path: str, entries: Mapping[str, Fields]) -> KeyPath:
    tokens = path.split("/")
    keys: list[str | int] = []
    for position in range(1, len(tokens)):
        key, parent = unquote(tokens[position]), entries.get("/".join(tokens[:position]), {})
        listed_keys = parent.get("keys")
        if parent.get("type") == "list":
            keys.append(Index(int(key)))
        elif isinstance(listed_keys, list) and key not in listed_keys and key.lstrip("-").isdigit():
            keys.append(int(key))
        else:
            keys.append(key)
    return tuple(keys)


def _parse_range(kind: str, fields: Fields) -> StoredRange:
    """Parse the location, dtype and shape in *fields* of a ``Tensor`` or ``object`` entry."""
    location = fields.get("location")
    if not isinstance(location, str):
        raise MismatchError("a string", location, "location")
    dtype = str(fields.get("dtype", "")).removeprefix("torch.")
    if kind == "Tensor" and dtype not in dtypes.BY_NAME:
        raise UnsupportedError(f"tensors of dtype `{dtype}` are not supported", where=location)
    recorded = fields.get("byte_range")
    first, last = (0, 0) if recorded is None else parse_integers(recorded)
    if last < first:
        raise MalformedError(f"a byte range of `{location}` ends before it starts")
    return StoredRange(
        require_relative(location, METADATA),
        None if recorded is None else (first, last),
        str(fields["serializer"]),
        dtype,
        parse_integers(fields.get("shape", [])),
    )


def parse_primitive(fields: Fields) -> object:
    """Parse the value in *fields* of an ``int``, ``str``, ``bool``, ``bytes`` or ``float``."""
    kind, text = fields["type"], str(fields["serialized_value"])
    if kind == "int":
        return int(text)
    if kind == "bool":
        return {"True": True, "False": False}[text]
    if kind == "str":
        return text
    raw = base64.b64decode(text, validate=True)
    if kind == "bytes":
        return raw
    if len(raw) != 8:
        raise MalformedError("a float does not have 8 bytes")
    value: float = struct.unpack("<d", raw)[0]
    return value


def read_file_sizes(
    files: SourceFiles, entries: Sequence[ManifestEntry], where: str, faults: FaultCollector
) -> dict[str, int]:
    """Map the names of data files to sizes in bytes, and compare them with the byte ranges.

    Missing, truncated or contradicting files raise an error, or become findings in *faults*.
    """
    sizes: dict[str, int] = {}
    ranges: dict[str, list[ByteRange]] = {}
    truncated: dict[str, tuple[int, str]] = {}
    for entry in entries:
        for _, stored in entry.parts:
            file = stored.file
            if file not in sizes:
                size = faults.try_read(file, lambda file: _read_size(files, file), (CkptError,))
                if size is None:
                    continue
                sizes[file] = size
            first, last = stored.byte_range or (0, sizes[file])
            if last > sizes[file]:
                truncated[file] = max(truncated.get(file, (0, "")), (last, join_path(entry.path)))
            elif stored.serializer == "buffer_protocol":
                byte_range = ByteRange(file, first, last - first, join_path(entry.path))
                ranges.setdefault(file, []).append(byte_range)
    for file, (needed, tensor) in truncated.items():
        error = DamagedError(
            f"`{file}` is truncated",
            where=f"{files.root / file}, `{tensor}`",
            why=f"{pluralize(needed, 'byte is', 'bytes are')} needed, but the file has "
            f"{sizes[file]:,}",
        )
        faults.add_or_raise(error, file)
    for file in ranges:
        faults.try_read(
            file,
            lambda file: require_tiled_files(ranges[file], {file: sizes[file]}, where),
            (CkptError,),
        )
    return sizes


def _read_size(files: SourceFiles, file: str) -> int:
    try:
        return files.size(file)
    except SourceNotFoundError:
        raise DamagedError(
            "a data file is missing",
            where=str(files.root),
            why=f"`{file}`, which {METADATA} lists",
            hint="copy the missing file from the node of its rank",
        ) from None
