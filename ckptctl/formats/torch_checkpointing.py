"""``torch_checkpointing`` directories: one file for each top-level item and rank.

Source: torch_checkpointing 0.1.1 (``<item>_<rank>.pt``, ``LayoutInfo``). A rank's file describes
its own DTensors, so that ``metadata.pkl``, which is there only if an item has a resharder, is
compared with them and not needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import DamagedError, FormatError, listed
from ckptctl.formats import rank_states
from ckptctl.formats.assets import left_behind
from ckptctl.formats.base import AS_IT_IS, Format, ReadOptions, Sniff
from ckptctl.formats.rank_archive import read_rank_file
from ckptctl.formats.rank_merge import RankMerger
from ckptctl.formats.structure import flatten
from ckptctl.formats.torch_checkpointing_metadata import (
    METADATA,
    VERSION,
    Item,
    Metadata,
    read_metadata,
)
from ckptctl.formats.torch_file import Contents, is_stored
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.json_reader import read_json

NAME = re.compile(
    r"(?P<item>[a-zA-Z0-9_-]+)_(?P<rank>\d{1,7})\.(?P<kind>pt|json|bin|safetensors)", re.ASCII
)
UNFINISHED = "tmp_"
MAX_RAW = 16 << 20


@dataclass(slots=True)
class _Found:
    """The files of a directory.

    Attributes:
        metadata: What ``metadata.pkl`` says, if there is one.
        world: Number of ranks.
        items: For each item the file of each rank.
        raw: Files that are too large for a leaf.
    """

    metadata: Metadata | None
    world: int = 0
    items: dict[str, dict[int, str]] = field(default_factory=dict)
    raw: list[str] = field(default_factory=list)


class TorchCheckpointingFormat(Format):
    """A directory with a file per item and rank."""

    name = "torch-checkpointing"
    title = "torch_checkpointing: one file per item and rank"

    def sniff(self, path: Path) -> Sniff | None:
        """See :meth:`Format.sniff`."""
        if not path.is_dir() or (path / ".metadata").exists():
            return None
        names = [item.name for item in path.iterdir() if item.is_file()]
        named = [name for name in names if (match := NAME.fullmatch(name)) and _is_own(match)]
        if METADATA in names:
            return Sniff(listed([METADATA, *sorted(named)[:1]])) if named else None
        visible = [name for name in names if not name.startswith(".")]
        if len(named) < len(visible) or not any(name.endswith("_0.pt") for name in named):
            return None
        return Sniff(listed(sorted(named), 2))

    def read(self, path: Path, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        if not path.is_dir():
            raise FormatError(
                "this is one file of many", where=str(path), hint="name the directory it is in"
            )
        if path.name.startswith(UNFINISHED):
            raise DamagedError(
                "the save was never finished",
                where=str(path),
                why=f"its directory still has the prefix `{UNFINISHED}`",
            )
        with SourceFiles(path) as files:
            found = _files_of(files)
            joined = _joined(files, found)
            names = {name for ranks in found.items.values() for name in ranks.values()}
            sizes = {name: files.size(name) for name in sorted(names)}
        return Catalog(
            root=str(path),
            path=str(path),
            format=self.name,
            files=sizes,
            tensors=joined.tensors,
            blobs=joined.blobs,
            notes=(
                *joined.notes,
                *_notes(found),
                *left_behind(path, exclude={*sizes, METADATA}),
            ),
        )


def _is_own(match: re.Match[str]) -> bool:
    return rank_states.parse(match.string) is None


def _files_of(files: SourceFiles) -> _Found:
    """Find the files of every item; those of items in the metadata must be complete."""
    described = (files.root / METADATA).is_file()
    found = _Found(read_metadata(files) if described else None)
    for path in sorted(files.root.iterdir()):
        match = NAME.fullmatch(path.name)
        if match and path.is_file() and _is_own(match):
            _place(found, match, files)
    items = found.metadata.items if found.metadata else {}
    for name, item in items.items():
        found.items.setdefault(name, {}).update(item.files)
    highest = max((rank for ranks in found.items.values() for rank in ranks), default=-1)
    found.world = found.metadata.world if found.metadata else highest + 1
    if highest >= found.world:
        raise DamagedError(
            "there are files of more ranks than the checkpoint has",
            where=str(files.root),
            why=f"rank {highest}, in a world of {found.world}",
            hint="files of an earlier save were left behind; remove them",
        )
    for name, item in items.items():
        _require(files, name, found.items[name], item.ranks or range(found.world), found.world)
    return found


def _place(found: _Found, match: re.Match[str], files: SourceFiles) -> None:
    name, rank = match["item"], int(match["rank"])
    if match["kind"] == "bin" and files.size(match.string) > MAX_RAW:
        found.raw.append(match.string)
        return
    twin = found.items.setdefault(name, {}).setdefault(rank, match.string)
    if twin != match.string:
        raise DamagedError(
            f"two files are item `{name}` of rank {rank}",
            where=str(files.root),
            why=listed([twin, match.string]),
        )


def _joined(files: SourceFiles, found: _Found) -> Contents:
    merger = RankMerger(files)
    for name, ranks in found.items.items():
        for rank, file in sorted(ranks.items()):
            merger.add(rank, file, _leaves(files, name, file))
    joined = merger.finish()
    described = found.metadata.items if found.metadata else {}
    if not described:
        merger.refuse_unrelated(str(files.root))
    for name, item in described.items():
        _compare(name, item, joined, str(files.root / METADATA))
    world = max(found.world, max(merger.ranks, default=-1) + 1)
    tensors = {str(entry.path[0]) for entry in joined.tensors.values()}
    for name in found.items.keys() - described.keys():
        if not _alone(found, name) or name in tensors:
            _require(files, name, found.items[name], range(world), world)
    return joined


def _alone(found: _Found, name: str) -> bool:
    """Whether rank 0 alone has an item, which many trainers do with what is the same everywhere."""
    return found.world > 1 and found.items[name].keys() == {0}


def _require(
    files: SourceFiles,
    name: str,
    ranks: Mapping[int, str],
    wanted: frozenset[int] | range,
    world: int,
) -> None:
    missing = [rank for rank in wanted if rank not in ranks]
    gone = [file for file in ranks.values() if not (files.root / file).is_file()]
    if missing or gone:
        names = gone + [f"{name}_{rank}.pt" for rank in missing]
        raise DamagedError(
            f"{len(names):,} of {world:,} ranks' files of item `{name}` are missing",
            where=str(files.root),
            why=listed(names),
            hint="every rank writes its own file; copy them from the nodes they are on",
        )


def _leaves(files: SourceFiles, item: str, file: str) -> Iterator[tuple[KeyPath, object]]:
    """Yield the leaves of one rank's file of an item, by what the file is."""
    if file.endswith(".json"):
        content: Iterator[tuple[KeyPath, object]] = flatten(read_json(files, file), is_stored)
    elif file.endswith(".bin"):
        content = iter([((), files.read(file, 0, files.size(file)))])
    elif file.endswith(".safetensors"):
        raise FormatError(
            f"item `{item}` is kept as safetensors of local shards",
            where=str(files.root / file),
            why="only items of `torch.save`, JSON and raw bytes are read",
            hint="consolidate it with torch_checkpointing and read the result",
        )
    else:
        content = read_rank_file(files, file)
    for path, leaf in content:
        yield (item, *path), leaf


def _compare(name: str, item: Item, joined: Contents, where: str) -> None:
    """Compare the tensors of an item with what the metadata says about them."""
    own = {
        tuple(entry.path[1:]): entry for entry in joined.tensors.values() if entry.path[0] == name
    }
    strange = [
        path for path in (*own, *item.tensors) if path not in own or path not in item.tensors
    ]
    if strange:
        path = strange[0]
        here, there = ("the files", METADATA) if path in own else (METADATA, "the files")
        raise DamagedError(
            f"{METADATA} and the files of item `{name}` list different tensors",
            where=where,
            why=f"`{'.'.join(map(str, path))}` is in {here} and not in {there}",
            hint="they belong to different saves",
        )
    for path, said in item.tensors.items():
        entry = own[path]
        if (entry.dtype, entry.shape) != (said.dtype, said.shape):
            raise DamagedError(
                f"`{entry.name}` is not what {METADATA} says",
                where=where,
                why=f"it is {entry.dtype} {list(entry.shape)}, not {said.dtype} {list(said.shape)}",
                hint="they belong to different saves",
            )


def _notes(found: _Found) -> Iterator[str]:
    alone = [name for name in found.items if _alone(found, name)]
    if alone:
        yield f"rank 0 alone has {listed(alone)}"
    if found.raw:
        yield f"not carried along: {listed(found.raw)}"
    if found.metadata is not None and found.metadata.version != VERSION:
        version = found.metadata.version
        yield f"{METADATA} is of version {version} and was not compared with the files"


FORMAT = TorchCheckpointingFormat()
