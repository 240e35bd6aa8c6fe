"""``metadata.pkl`` of ``torch_checkpointing``: which tensors each item has, and its files.

Source: torch_checkpointing 0.1.1, version ``2.0`` of the file: a pickle of builtins alone, read
with a machine that knows no class at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from ckptctl.formats.shared.indexes import malformed, mapping, read_whole
from ckptctl.records import dataclass
from ckptctl.storage import json_reader
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.paths import contained
from ckptctl.storage.pickles.inert import check_tree
from ckptctl.storage.pickles.reader import loads

METADATA = "metadata.pkl"
VERSION = "2.0"
MAX_METADATA = 1 << 30
MAX_WORLD = 1 << 20
Keys = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """What the metadata says about one tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ItemMetadata:
    """One top-level item of the checkpoint.

    Attributes:
        tensors: Its tensors by their keys below the item.
        ranks: The ranks that hold any of it.
        files: For a rank its file, where that is not the usual one.
    """

    tensors: Mapping[Keys, DescribedTensor]
    ranks: frozenset[int]
    files: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The whole file.

    Attributes:
        version: As recorded.
        world: Number of ranks.
        items: Items by name; of versions other than 2.0 none.
    """

    version: str
    world: int
    items: Mapping[str, ItemMetadata] = field(default_factory=dict)


def read_metadata(files: SourceFiles) -> Metadata:
    """Read ``metadata.pkl``."""
    where, content = str(files.root / METADATA), read_whole(files, METADATA, MAX_METADATA)
    root = loads(content, where=where, table={})
    check_tree(root, limit=max(1_000_000, 8 * len(content)), where=where)
    with malformed("this is not the metadata of torch_checkpointing", where):
        return _metadata(root, where)


def _metadata(root: object, where: str) -> Metadata:
    fields = mapping(root)
    world = fields["world_size"]
    if type(world) is not int or not 0 < world <= MAX_WORLD:
        raise ValueError(f"a world of {world!r} ranks")
    version = str(fields.get("version", "1.0"))
    if version != VERSION:
        return Metadata(version, world)
    items = mapping(fields["metadata"]).items()
    return Metadata(
        version, world, {str(name): _item(value, world, where) for name, value in items}
    )


def _item(value: object, world: int, where: str) -> ItemMetadata:
    fields = mapping(value)
    tensors: dict[Keys, DescribedTensor] = {}
    ranks: set[int] = set()
    for path, groups in mapping(fields["nested_path_to_metadata"]).items():
        if not isinstance(groups, list) or not groups:
            raise TypeError(f"`{path}` is described by nothing")
        described = {_described(mapping(group)) for group in groups}
        if len(described) > 1:
            raise ValueError(f"`{path}` has several shapes or dtypes")
        tensors[_keys(path, where)] = described.pop()
        for group in groups:
            ranks.update(_ranks(group["ranks"], world))
    return ItemMetadata(
        tensors, frozenset(ranks), _files(fields["rank_to_layout_info"], world, where)
    )


def _described(group: Mapping[object, object]) -> DescribedTensor:
    data = mapping(mapping(group["sharding_metadata"])["data"])
    shape = data["global_shape"]
    if not isinstance(shape, list | tuple) or any(type(n) is not int or n < 0 for n in shape):
        raise TypeError("a shape is not one")
    return DescribedTensor(str(data["dtype"]).removeprefix("torch."), tuple(shape))


def _keys(path: object, where: str) -> Keys:
    """Return the keys of a path written as compact JSON: ``["state",0,"exp_avg"]``."""
    keys = json_reader.loads(str(path).encode(), where=where)
    if not isinstance(keys, list) or not all(isinstance(key, str | int) for key in keys):
        raise TypeError(f"`{path}` is not a list of keys")
    return tuple(keys)


def _ranks(value: object, world: int) -> tuple[int, ...]:
    if not isinstance(value, tuple | list):
        raise TypeError("ranks are not a sequence")
    if any(type(rank) is not int or not 0 <= rank < world for rank in value):
        raise ValueError(f"a rank lies outside the world of {world}")
    return tuple(value)


def _files(value: object, world: int, where: str) -> dict[int, str]:
    found: dict[int, str] = {}
    for rank, layout in mapping(value).items():
        (number,) = _ranks((rank,), world)
        if layout is not None:
            path = mapping(layout)["file_path"]
            if not isinstance(path, str):
                raise TypeError("a file path is not text")
            found[number] = contained(path, where)
    return found
