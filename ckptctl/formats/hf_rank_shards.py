"""Safetensors that every rank wrote for itself, as torch's ``HuggingFaceStorageWriter`` does.

Source: ``torch/distributed/checkpoint/hf_storage.py`` (``save_distributed=True``), ``_hf_utils.py``
(file names, keys) and ``filesystem.py`` (``_write_files_from_queue``). Rank N writes
``shard-{N+1}-model-{i}-of-{n}.safetensors``; ``DCP_SHARDING_INFO`` in its header says where in the
whole each of its tensors begins. There is no index, and the size of the whole is recorded nowhere:
it is where the furthest shard ends, empty ones included.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NoReturn

from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.errors import CoverageError, DamagedError, FormatError, listed
from ckptctl.formats.assets import documents, left_behind, side_files
from ckptctl.formats.base import AS_IT_IS, Format, ReadOptions, Sniff
from ckptctl.formats.hf_files import INDEX, SHARD
from ckptctl.planner.boxes import coverage
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.json_reader import loads, read_json
from ckptctl.storage.safetensors_header import MAX_HEADER, read_header

OFFSETS = "DCP_SHARDING_INFO"
SHARDED = "sharded"


class HfRankShardsFormat(Format):
    """A directory of ``shard-*-model-*-of-*.safetensors``."""

    name = "hf-rank-shards"
    title = "safetensors of every rank, by torch's HuggingFaceStorageWriter (read only)"

    def sniff(self, path: Path) -> Sniff | None:
        """See :meth:`Format.sniff`."""
        found = len(_shards(path)) if path.is_dir() else 0
        return Sniff(f"{found} files shard-*-model-*.safetensors") if found else None

    def read(self, path: Path, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        shards = _shards(path) if path.is_dir() else {}
        ranks = _require_all(path, shards)
        with SourceFiles(path) as files:
            parts: dict[str, _Parts] = {}
            for name in shards:
                _take(parts, files, name)
            tensors = {key: part.entry(key) for key, part in parts.items()}
            sizes = {name: files.size(name) for name in shards}
        for entry in tensors.values():
            _require_whole(entry, path)
        index = path.parent / f"model{INDEX}"
        compared = path.name == SHARDED and index.is_file()
        return Catalog(
            root=str(path),
            path=str(path),
            format=self.name,
            files=sizes,
            tensors=tensors,
            assets=side_files(path),
            documents=documents(path),
            notes=(
                *(_compared(path, tensors) if compared else (_uncompared(ranks),)),
                *left_behind(path, exclude=set(sizes)),
            ),
        )


@dataclass(slots=True)
class _Parts:
    """One tensor, as far as it was found."""

    dtype: str
    file: str
    shape: tuple[int, ...]
    extents: dict[Box, Extent] = field(default_factory=dict)

    def entry(self, name: str) -> TensorEntry:
        """Return the tensor; empty shards have told how far it reaches and hold nothing."""
        extents = tuple(
            extent for box, extent in self.extents.items() if box.numel or 0 in self.shape
        )
        return TensorEntry(name, self.dtype, self.shape, extents, (name,))


def _take(parts: dict[str, _Parts], files: SourceFiles, name: str) -> None:
    """Add the tensors of one file."""
    header = read_header(files, name)
    where = str(files.root / name)
    offsets = _offsets(header.metadata, header.tensors.keys(), where)
    for key, (dtype, sizes, begin, end) in header.tensors.items():
        start = offsets[key]
        if len(start) != len(sizes):
            _fail(f"`{key}` has {len(sizes)} dimensions and {len(start)} offsets", where)
        reach = tuple(map(sum, zip(start, sizes, strict=True)))
        known = parts.setdefault(key, _Parts(dtype, name, reach))
        if known.dtype != dtype or len(known.shape) != len(reach):
            raise DamagedError(
                f"two ranks disagree on `{key}`",
                where=where,
                why=f"it is {dtype} with {len(reach)} dimensions there, "
                f"{known.dtype} with {len(known.shape)} in `{known.file}`",
                hint="the files belong to different saves",
            )
        known.shape = tuple(map(max, known.shape, reach))
        extent = Extent(Box(start, sizes), name, begin, end - begin)
        before = known.extents.setdefault(extent.box, extent)
        if before is not extent and extent.nbytes:
            raise DamagedError(
                f"{extent.box} of `{key}` is in two shards",
                where=where,
                why=f"it is in `{before.file}` as well",
                hint="torch writes every part once: one of the files is a copy, or of another save",
            )


def _offsets(
    metadata: Mapping[str, str], names: Collection[str], where: str
) -> dict[str, tuple[int, ...]]:
    """Return where each tensor of a file begins."""
    text = metadata.get(OFFSETS)
    if text is None:
        _fail(f"its header has no {OFFSETS}", where)
    info = loads(text.encode(), where=where, max_bytes=MAX_HEADER)
    if not isinstance(info, dict) or info.keys() != set(names):
        _fail(f"{OFFSETS} does not list the tensors of the file", where)
    return {key: _start(key, value, where) for key, value in info.items()}


def _start(key: str, value: object, where: str) -> tuple[int, ...]:
    start = value.get("saved_offsets") if isinstance(value, dict) else None
    if not isinstance(start, list) or not all(map(_is_position, start)):
        _fail(f"the offsets of `{key}` are no list of positions", where)
    return tuple(start)


def _is_position(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _fail(why: str, where: str) -> NoReturn:
    raise DamagedError("this is not a rank's shard as torch writes it", where=where, why=why)


def _shards(path: Path) -> dict[str, re.Match[str]]:
    """Return the shards by name, in order."""
    matches = (SHARD.fullmatch(item.name) for item in sorted(path.glob("shard-*.safetensors")))
    return {match[0]: match for match in matches if match}


def _require_all(path: Path, shards: Mapping[str, re.Match[str]]) -> int:
    """Check that each rank has each of its files.

    Returns:
        The number of ranks.

    Raises:
        DamagedError: One is missing, or they are of different saves.
        FormatError: There are none.
    """
    if not shards:
        raise FormatError(
            "there are no shards of single ranks here",
            where=str(path),
            why="expected shard-00001-model-00001-of-00001.safetensors",
        )
    totals = sorted({match[3] for match in shards.values()})
    if len(totals) > 1:
        examples = [next(name for name, m in shards.items() if m[3] == total) for total in totals]
        raise DamagedError(
            "these shards are of different saves", where=str(path), why=listed(examples)
        )
    ranks, files = max(int(match[1]) for match in shards.values()), int(totals[0])
    missing = _missing(shards, ranks, files)
    if missing or len(shards) != ranks * files:
        count = ranks * files - len(shards)
        raise DamagedError(
            f"{count:,} of {ranks * files:,} shards are missing"
            if count > 0
            else "these shards have impossible numbers",
            where=str(path),
            why=f"there is no {listed(missing)}" if missing else listed(list(shards)),
            hint="copy the missing files; every rank writes its own",
        )
    return ranks


def _missing(shards: Collection[str], ranks: int, files: int, most: int = 6) -> list[str]:
    missing: list[str] = []
    for rank, file in product(_numbers(ranks), _numbers(files)):
        name = f"shard-{rank:05d}-model-{file:05d}-of-{files:05d}.safetensors"
        if name not in shards:
            missing.append(name)
        if len(missing) == most:
            break
    return missing


def _numbers(last: int) -> range:
    return range(1, last + 1)


def _require_whole(entry: TensorEntry, path: Path) -> None:
    boxes = [extent.box for extent in entry.extents]
    if sum(box.numel for box in boxes) == entry.numel:
        return
    found = coverage(entry.shape, boxes)
    wrong = found.holes or found.overlaps
    raise CoverageError(
        f"the shards of `{entry.name}` do not tile it",
        where=f"{path}, tensor `{entry.name}`, shape {list(entry.shape)}",
        why=f"{listed([str(box) for box in wrong])} "
        + ("is in none of the files" if found.holes else "is in more than one file"),
        hint=f"it lies in {listed(_files(entry))}: one of them is of another save",
    )


def _files(entry: TensorEntry) -> Sequence[str]:
    return list(dict.fromkeys(extent.file for extent in entry.extents))


def _uncompared(ranks: int) -> str:
    return (
        f"made of the shards of {ranks} ranks: their files record neither the number of ranks nor "
        "the size of the whole, so nothing would tell if the last ranks' were missing"
    )


def _compared(path: Path, tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    """Compare with the index that torch's consolidation has written beside ``sharded/``.

    Only it can tell that the last ranks' files are missing: the others look like a whole.
    """
    name = f"model{INDEX}"
    where = str(path.parent / name)
    with SourceFiles(path.parent) as files:
        index = read_json(files, name)
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        yield f"`../{name}` is no index, so nothing was compared with it"
        return
    lacking = sorted(index["weight_map"].keys() - tensors.keys())
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    here = sum(entry.nbytes for entry in tensors.values())
    if lacking or (type(total) is int and total > here):
        raise DamagedError(
            "the last ranks' shards are missing",
            where=str(path),
            why=f"no shard has {listed(lacking)}, which {where} lists"
            if lacking
            else f"the shards hold {here:,} bytes, {where} says {total:,}",
            hint="copy the missing files; or convert the directory above, which torch consolidated",
        )
    if total != here:
        yield f"`../{name}` says {total} bytes, the shards hold {here:,}: it is not their sum"


FORMAT = HfRankShardsFormat()
