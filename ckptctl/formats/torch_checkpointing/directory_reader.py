"""Read ``torch_checkpointing`` directories.

A rank's file describes the DTensors in it, so ``metadata.pkl`` is not required. That file exists
only if an item has a resharder, and is then compared with the ranks' files. Version ``2.0`` of it
contains only builtins, so it is unpickled without allowing any class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from ckptctl import dtypes
from ckptctl.catalog import Box, Catalog, TensorEntry
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import FormatError, UnsupportedError, quote_names
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.shared.findings import FaultCollector
from ckptctl.formats.shared.indexes import read_metadata_file
from ckptctl.formats.shared.joined_tensors import ONE_SAVE_HINT
from ckptctl.formats.shared.leaves import flatten_object, join_path
from ckptctl.formats.shared.rank_merge import RankMerger
from ckptctl.formats.sidecar_files import scan_sidecar_files
from ckptctl.formats.torch_checkpointing.item_files import ITEM_FILE, METADATA, NAME, is_item_file
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import parse_json as loads_json
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.paths import is_present, require_relative
from ckptctl.storage.pickles.pickle_reader import load_pickle
from ckptctl.storage.read_ahead import list_zip_ends, prefetch_items
from ckptctl.storage.schema import (
    NOT_EMPTY,
    MalformedError,
    MismatchError,
    Natural,
    Schema,
    read_as,
    wrap_malformed_errors,
)
from ckptctl.tree import TreePath

if TYPE_CHECKING:
    from ckptctl.formats.shared.stored_leaves import Leaves

VERSION = "2.0"
MAX_METADATA_BYTES = 1 << 30
Keys: TypeAlias = tuple[str | int, ...]
MAX_RAW_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class DescribedTensor(Schema):
    """The dtype and global shape of a tensor that ``metadata.pkl`` records."""

    dtype: object
    global_shape: tuple[Natural, ...]

    @property
    def dtype_and_shape(self) -> tuple[str, tuple[int, ...]]:
        """Name of the torch dtype, such as ``bfloat16``, and global shape."""
        return str(self.dtype).removeprefix("torch."), self.global_shape


@dataclass(frozen=True, slots=True)
class _Group(Schema):
    """Ranks for which ``metadata.pkl`` records the same sharding of a tensor."""

    sharding_metadata: dict[str, object]
    ranks: tuple[Natural, ...]


@dataclass(frozen=True, slots=True)
class _Item(Schema):
    """Schema of a top-level item in ``metadata.pkl``."""

    nested_path_to_metadata: dict[str, Annotated[tuple[_Group, ...], NOT_EMPTY]]
    rank_to_layout_info: dict[Natural, dict[str, object] | None]


@dataclass(frozen=True, slots=True)
class ItemMetadata:
    """A top-level item of the checkpoint, such as ``model``, as ``metadata.pkl`` records it.

    Attributes:
        tensors: Tensors by their keys relative to the item.
        ranks: Ranks that store a shard of these tensors.
        files: Recorded file name of each rank, which may differ from the default name.
    """

    tensors: Mapping[Keys, DescribedTensor]
    ranks: frozenset[int]
    files: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Metadata:
    """Parsed ``metadata.pkl``, or the default values if the file is missing or unreadable.

    Attributes:
        version: Recorded version of the metadata.
        world: World size, or 0 if it is unknown.
        items: Top-level items by name, or empty for versions other than 2.0.
    """

    version: str = VERSION
    world: int = 0
    items: Mapping[str, ItemMetadata] = field(default_factory=dict)


@dataclass(slots=True)
class _DirectoryFiles:
    """Files of a checkpoint directory.

    Attributes:
        metadata: Parsed ``metadata.pkl``.
        world: World size.
        items: File name of each rank, by item name and rank.
        skipped_raw_files: Names of ``.bin`` files that are too large to be read as a value.
    """

    metadata: Metadata
    world: int = 0
    items: dict[str, dict[int, str]] = field(default_factory=dict)
    skipped_raw_files: list[str] = field(default_factory=list)


def read_catalog(path: TreePath, options: ReadOptions) -> Catalog:
    """Read the catalog of the directory *path*."""
    faults = FaultCollector(path, options.partial)
    with source_files(path) as files:
        merger = RankMerger(files, faults, list_replicas=options.replicas)
        directory = _find_item_files(files, merger)
        leaves = _merge_items(files, directory, merger)
        names = {name for ranks in directory.items.values() for name in ranks.values()}
        sizes = faults.read_sizes(files, sorted(names))
    return Catalog(
        root=path,
        path=path,
        format=NAME,
        files=sizes,
        tensors=leaves.tensors,
        blobs=leaves.blobs,
        others=scan_sidecar_files(path, {*names, *directory.skipped_raw_files, METADATA}).others,
        notes=(*leaves.notes, *_list_notes(directory, merger)),
        replicas=merger.replicas,
        findings=tuple(faults.findings),
        lost=faults.lost,
    )


def _find_item_files(files: SourceFiles, merger: RankMerger) -> _DirectoryFiles:
    """Find the files of every item, and check that those listed in ``metadata.pkl`` exist."""
    has_metadata = (files.root / METADATA).is_file()
    metadata = (
        merger.faults.try_read(METADATA, lambda _: _read_metadata(files)) if has_metadata else None
    )
    directory = _DirectoryFiles(metadata or Metadata())
    for path in sorted(files.root.iterdir()):
        match = ITEM_FILE.fullmatch(path.name)
        if not match or not is_present(path) or not is_item_file(match):
            continue
        name, rank = match["item"], int(match["rank"])
        if match["kind"] == "bin" and path.stat().st_size > MAX_RAW_BYTES:
            directory.skipped_raw_files.append(path.name)
            continue
        existing = directory.items.setdefault(name, {}).setdefault(rank, path.name)
        if existing != path.name:
            raise UnsupportedError(
                f"two files contain item `{name}` of rank {rank}",
                where=str(files.root),
                why=quote_names([existing, path.name]),
            )
    items = directory.metadata.items
    for name, item in items.items():
        directory.items.setdefault(name, {}).update(item.files)
    highest = max((rank for ranks in directory.items.values() for rank in ranks), default=-1)
    directory.world = directory.metadata.world or highest + 1
    if highest >= directory.world:
        raise UnsupportedError(
            "found files of more ranks than the checkpoint has",
            where=str(files.root),
            why=f"rank {highest}, but the world size is {directory.world}",
            hint="remove the files left over from an earlier save",
        )
    for name, item in items.items():
        _check_item_files(merger, directory, name, item.ranks or range(directory.world))
    return directory


def _merge_items(files: SourceFiles, directory: _DirectoryFiles, merger: RankMerger) -> Leaves:
    for name, ranks in directory.items.items():
        for rank, file in prefetch_items(
            files, sorted(ranks.items()), lambda rank_and_file: list_zip_ends(rank_and_file[1])
        ):
            merger.add_file(rank, (name,), file, _read_item_leaves(files, name, file))
    leaves = merger.merge_leaves()
    described = directory.metadata.items
    if not described:
        merger.require_related_files(str(files.root))
    for name, item in described.items():
        _add_lost_tensors(name, item, leaves, merger)
        _require_metadata_match(name, item, leaves, str(files.root / METADATA))
    world = max(directory.world, max(merger.ranks, default=-1) + 1)
    for name in directory.items.keys() - described.keys():
        if not _is_only_on_rank_0(directory, name) or name in merger.get_first_keys():
            _check_item_files(merger, directory, name, range(world))
    return leaves


def _add_lost_tensors(name: str, item: ItemMetadata, leaves: Leaves, merger: RankMerger) -> None:
    """Add tensors of the item *name* that are only in unusable files to *leaves*, as lost.

    Their dtypes and shapes come from ``metadata.pkl``.
    """
    unusable_files = [gap.file for gap in merger.unusable_files if gap.prefix == (name,)]
    for path, description in item.tensors.items() if unusable_files else ():
        full_path = (name, *path)
        key = join_path(full_path)
        dtype, shape = description.dtype_and_shape
        if key not in leaves.tensors and dtype in dtypes.BY_NAME:
            leaves.tensors[key] = TensorEntry(key, dtype, shape, (), full_path)
            merger.faults.lost[key] = ((Box.whole(shape), unusable_files[0]),)


def _is_only_on_rank_0(directory: _DirectoryFiles, name: str) -> bool:
    """Return whether only rank 0 has a file of the item *name*.

    Many trainers save values that are equal on all ranks only on rank 0.
    """
    return directory.world > 1 and directory.items[name].keys() == {0}


def _check_item_files(
    merger: RankMerger, directory: _DirectoryFiles, name: str, required_ranks: Collection[int]
) -> None:
    """Raise an error, or add findings in a partial read, for missing files of the item *name*.

    In a partial read, the missing files are also removed from *directory*.
    """
    file_names = directory.items[name]
    existing = {
        rank: file for rank, file in file_names.items() if is_present(merger.faults.root / file)
    }
    kind = Path(next(iter(file_names.values()), "a.pt")).suffix
    merger.check_rank_files(
        (name,),
        existing,
        {*required_ranks, *file_names},
        lambda rank: file_names.get(rank, f"{name}_{rank}{kind}"),
        f" of item `{name}`",
    )
    directory.items[name] = existing


def _read_item_leaves(files: SourceFiles, item: str, file: str) -> Iterator[tuple[KeyPath, object]]:
    """Yield the path and value of every leaf in *file*, one rank's file of *item*.

    The suffix of the file determines how it is read.
    """
    from ckptctl.formats.shared.rank_archive import read_rank_file
    from ckptctl.formats.shared.stored_leaves import is_stored_tensor

    if file.endswith(".json"):
        where = str(files.root / file)
        content: Iterator[tuple[KeyPath, object]]
        content = flatten_object(read_json(files, file), is_stored_tensor, where=where)
    elif file.endswith(".bin"):
        content = iter([((), files.read(file, 0, files.size(file)))])
    elif file.endswith(".safetensors"):
        raise FormatError(
            f"item `{item}` is stored as safetensors of local shards",
            where=str(files.root / file),
            why="only items of `torch.save`, JSON and raw bytes are supported",
            hint="consolidate it with torch_checkpointing and read the result",
        )
    else:
        content = read_rank_file(files, file)
    for path, leaf in content:
        yield (item, *path), leaf


def _require_metadata_match(name: str, item: ItemMetadata, leaves: Leaves, where: str) -> None:
    """Raise if the tensors of the item *name* differ from those that ``metadata.pkl`` records."""
    entries = {
        tuple(entry.path[1:]): entry for entry in leaves.tensors.values() if entry.path[0] == name
    }
    unmatched = [
        path
        for path in (*entries, *item.tensors)
        if path not in entries or path not in item.tensors
    ]
    if unmatched:
        path = unmatched[0]
        present_in, absent_from = (
            ("the files", METADATA) if path in entries else (METADATA, "the files")
        )
        raise UnsupportedError(
            f"{METADATA} and the files of item `{name}` list different tensors",
            where=where,
            why=f"`{'.'.join(map(str, path))}` is in {present_in} but not in {absent_from}",
            hint=ONE_SAVE_HINT,
        )
    for path, description in item.tensors.items():
        entry, expected = entries[path], description.dtype_and_shape
        if (entry.dtype, entry.shape) != expected:
            raise UnsupportedError(
                f"`{entry.name}` does not match {METADATA}",
                where=where,
                why=f"it is {entry.dtype} {list(entry.shape)}, expected {expected[0]} "
                f"{list(expected[1])}",
                hint=ONE_SAVE_HINT,
            )


def _list_notes(directory: _DirectoryFiles, merger: RankMerger) -> Iterator[str]:
    reported_heads = {gap.prefix for gap in merger.unusable_files}
    rank_0_items = [
        name
        for name in directory.items
        if _is_only_on_rank_0(directory, name) and (name,) not in reported_heads
    ]
    if rank_0_items:
        yield f"only rank 0 has {quote_names(rank_0_items)}"
    if directory.skipped_raw_files:
        yield f"skipped large raw files: {quote_names(directory.skipped_raw_files)}"
    if (version := directory.metadata.version) != VERSION:
        yield f"{METADATA} has version {version} and was not compared with the files"


def _read_metadata(files: SourceFiles) -> Metadata:
    """Read ``metadata.pkl`` with an unpickler that allows no classes, and parse it."""
    from ckptctl.formats.shared.rank_archive import MAX_WORLD_SIZE

    where, content = (
        str(files.root / METADATA),
        read_metadata_file(files, METADATA, MAX_METADATA_BYTES),
    )
    root = load_pickle(content, where=where, table={})
    with wrap_malformed_errors("this is not the metadata of torch_checkpointing", where):
        content_by_key = read_as(dict[str, object], root)
        world, version = content_by_key.get("world_size"), str(content_by_key.get("version", "1.0"))
        if type(world) is not int or not 0 < world <= MAX_WORLD_SIZE:
            raise MismatchError(f"an integer from 1 to {MAX_WORLD_SIZE}", world, "world_size")
        items = content_by_key.get("metadata") if version == VERSION else {}
        item_records = read_as(dict[str, _Item], items, "metadata").items()
        return Metadata(
            version,
            world,
            {name: _parse_item(record, world, where) for name, record in item_records},
        )


def _parse_item(item: _Item, world: int, where: str) -> ItemMetadata:
    tensors: dict[Keys, DescribedTensor] = {}
    ranks: set[int] = set()
    for path, groups in item.nested_path_to_metadata.items():
        described = [
            read_as(DescribedTensor, group.sharding_metadata.get("data"), f"{path}.data")
            for group in groups
        ]
        if any(tensor.dtype_and_shape != described[0].dtype_and_shape for tensor in described):
            raise MalformedError(f"`{path}` has several shapes or dtypes")
        # A path is written as compact JSON: ``["state",0,"exp_avg"]``.
        keys = read_as(Keys, loads_json(path.encode(), where=where), path)
        tensors[keys] = described[0]
        ranks.update(*(group.ranks for group in groups))
    layouts = item.rank_to_layout_info
    if max((*ranks, *layouts), default=0) >= world:
        raise MalformedError(f"a rank is outside the world size {world}")
    files = {
        rank: require_relative(read_as(str, layout.get("file_path"), "file_path"), where)
        for rank, layout in layouts.items()
        if layout is not None
    }
    return ItemMetadata(tensors, frozenset(ranks), files)
