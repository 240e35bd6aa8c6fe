"""Safetensors files written by each rank, as torch's ``HuggingFaceStorageWriter`` does.

Source: ``torch/distributed/checkpoint/hf_storage.py`` (``save_distributed=True``), ``_hf_utils.py``
(file names, keys) and ``filesystem.py`` (``_write_files_from_queue``). Rank N writes
``shard-{N+1}-model-{i}-of-{n}.safetensors``; ``DCP_SHARDING_INFO`` in its header has the offset of
each shard in the global tensor. There is no index, and the global shape is not recorded. It is
computed from the end of the last shard, including empty shards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.catalog import Box, Catalog, Extent, Finding, TensorEntry
from ckptctl.errors import (
    CoverageError,
    DamagedError,
    FormatError,
    UnsupportedError,
    UsageError,
    quote_names,
    spell_option,
)
from ckptctl.formats.base import AS_IT_IS, Format, Listing, ReadOptions
from ckptctl.formats.hf.hf_files import INDEX, SHARD
from ckptctl.formats.shared.findings import Faults, Lost
from ckptctl.formats.shared.indexes import integers
from ckptctl.formats.shared.joined_tensors import (
    JoinedTensor,
    ranks_disagree_error,
    tensor_entries,
)
from ckptctl.formats.sidecar_files import beside
from ckptctl.planner.boxes import compute_coverage
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import parse_json, read_json
from ckptctl.storage.read_ahead import prefetch_heads
from ckptctl.storage.safetensors_header import MAX_HEADER_BYTES, SafetensorsHeader, read_header
from ckptctl.storage.schema import MalformedError, find_member, malformed_errors, read_as
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

OFFSETS = "DCP_SHARDING_INFO"
SHARDED = "sharded"
Offsets = Mapping[str, tuple[int, ...]]
INVALID = "this is not a valid per-rank shard"


class HfRankShardsFormat(Format):
    """A directory of ``shard-*-model-*-of-*.safetensors``."""

    name = "hf-rank-shards"
    title = "per-rank safetensors of torch's HuggingFaceStorageWriter"
    recognized = "`shard-N-model-I-of-M.safetensors`"
    marks = SHARD
    wholeness = (
        "every rank up to the highest has all of its M files (missing last ranks are detected "
        "only with `--ranks` or the consolidated checkpoint's index); their boxes tile every "
        "tensor"
    )
    choices = frozenset({"ranks"})
    tested = "torch 2.13 (2-3 ranks)"
    proof = (
        "reading: checkpoints of torch 2.13 on 2 ranks equal the live model "
        "(tests/contract/test_rank_shards.py); reading: checkpoints on 3 ranks equal the live "
        "tensors, including integers and 0-d tensors, where torch's own consolidation fails "
        "(tests/integration/test_rank_local.py)"
    )

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        found = len(_shards(listing))
        return f"{pluralize(found, 'file')} shard-*-model-*.safetensors" if found else None

    def read(self, path: TreePath, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        shards = _shards(Listing(path))
        ranks = _ranks(path, shards, asked.ranks)
        files_each = int(next(iter(shards.values()))[3])
        faults = Faults(path, asked.partial)
        _require_all(shards, ranks, files_each, faults)
        joined: dict[str, JoinedTensor] = {}
        sizes: dict[str, int] = {}
        with source_files(path) as files:
            for name in prefetch_heads(files, shards):
                header = faults.read(name, lambda name: _read_header(files, name))
                if header is not None:
                    _take(joined, *header, name, str(path / name))
                    sizes[name] = files.size(name)
        for tensor in joined.values():
            if 0 not in tensor.shape:  # empty shards only determine the global shape
                tensor.extents = {box: e for box, e in tensor.extents.items() if box.numel}
        tensors = tensor_entries(joined)
        for entry in tensors.values():
            _require_whole(entry, path, partial=bool(faults.findings))
        sure = faults.findings or asked.ranks
        uncompared = (
            f"found the shards of {pluralize(ranks, 'rank')} (neither the world size nor tensor "
            "sizes are recorded, so missing last ranks cannot be detected); set "
            f"{spell_option('--ranks N')} to check"
        )
        notes: tuple[str, ...] = () if sure else (uncompared,)
        if path.name == SHARDED and (path.parent / f"model{INDEX}").is_file():
            notes = tuple(_compared(tensors, faults, _name(ranks + 1, 1, files_each)))
        around = beside(path, shards)
        return replace(
            around.catalog(path, self.name),
            files=sizes,
            tensors=tensors,
            notes=notes,
            findings=tuple(faults.findings),
            lost=_doubtful(tensors, faults.findings),
        )


def _doubtful(tensors: Mapping[str, TensorEntry], findings: Sequence[Finding]) -> Lost:
    """Return the tensors that may continue in unusable files, which are all but 0-d tensors.

    Only its shards show how far a tensor reaches. An empty box at the end of the known shards
    stands for possible further ones.
    """
    file = next((found.file for found in findings if found.file), None)
    return {
        name: ((Box(entry.shape, (0,) * len(entry.shape)), file),)
        for name, entry in tensors.items()
        if file is not None and entry.shape
    }


def _take(
    joined: dict[str, JoinedTensor],
    header: SafetensorsHeader,
    offsets: Offsets,
    name: str,
    where: str,
) -> None:
    """Add the tensors of one file."""
    for key, (dtype, sizes, begin, end) in header.tensors.items():
        start = offsets[key]
        if len(start) != len(sizes):
            raise UnsupportedError(
                INVALID,
                where=where,
                why=f"`{key}` has {pluralize(len(sizes), 'dimension')} and "
                f"{pluralize(len(start), 'offset')}",
            )
        reach = tuple(map(sum, zip(start, sizes, strict=True)))
        known = joined.setdefault(key, JoinedTensor(dtype, reach, (key,), name))
        if known.dtype != dtype or len(known.shape) != len(reach):
            why = (
                f"it is {dtype} with {pluralize(len(reach), 'dimension')} in this file, "
                f"{known.dtype} with {len(known.shape)} in `{known.file}`"
            )
            raise ranks_disagree_error(key, where, why)
        known.shape = tuple(map(max, known.shape, reach))
        extent = Extent(Box(start, sizes), name, begin, end - begin)
        before = known.add(extent)
        if before is not None and extent.nbytes:
            raise UnsupportedError(
                f"{extent.box} of `{key}` is in two shards",
                where=where,
                why=f"it is also in `{before.file}`",
                hint="remove the file that is a copy or belongs to another save",
            )


def _read_header(files: SourceFiles, name: str) -> tuple[SafetensorsHeader, Offsets]:
    """Read the header of one file and the offset of each shard in its global tensor."""
    header = read_header(files, name)
    where = str(files.root / name)
    with malformed_errors(INVALID, where):
        text = header.metadata.get(OFFSETS)
        if text is None:
            raise MalformedError(f"the header does not contain {OFFSETS}")
        info = parse_json(text.encode(), where=where, max_bytes=MAX_HEADER_BYTES)
        places = read_as(dict[str, dict[str, object]], info, OFFSETS)
        if places.keys() != header.tensors.keys():
            raise MalformedError(f"{OFFSETS} does not match the tensors of the file")
        return header, {key: integers(one.get("saved_offsets")) for key, one in places.items()}


def _shards(listing: Listing) -> dict[str, re.Match[str]]:
    """Return the shards in a folder by name, in order."""
    names = listing.names if listing.is_folder else ()
    return {name: match for name in names if (match := SHARD.fullmatch(name))}


def _ranks(path: TreePath, shards: Mapping[str, re.Match[str]], said: int | None) -> int:
    """Return the world size, which is *said* or else the highest rank found."""
    if not shards:
        raise FormatError(
            "no per-rank shards were found",
            where=str(path),
            why="expected shard-00001-model-00001-of-00001.safetensors",
        )
    totals = sorted({match[3] for match in shards.values()})
    if len(totals) > 1:
        examples = [next(name for name, m in shards.items() if m[3] == total) for total in totals]
        raise UnsupportedError(
            "the shards belong to different saves", where=str(path), why=quote_names(examples)
        )
    last = max(int(match[1]) for match in shards.values())
    if said is not None and last > said:
        raise UsageError(
            f"{spell_option(f'--ranks {said}')}, but there are shards of rank {last}",
            where=str(path),
            why="file names count ranks from 1",
        )
    return said or last


def _require_all(
    shards: Mapping[str, re.Match[str]], ranks: int, files: int, faults: Faults
) -> None:
    """Raise, or add a finding, if files of ranks are missing."""
    wanted = range(ranks * files)

    def named(number: int) -> str:
        return _name(number // files + 1, number % files + 1, files)

    numbers = {files * (int(m[1]) - 1) + int(m[2]) - 1: name for name, m in shards.items()}
    present = {n for n, name in numbers.items() if n in wanted and named(n) == name}
    hint = "copy the missing files from the nodes of the other ranks"
    if len(present) == ranks * files != len(shards):
        what, why = "the shard numbers are inconsistent", quote_names(list(shards))
        raise UnsupportedError(what, where=str(faults.root), why=why, hint=hint)
    faults.require_all(present, wanted, named, "shards", hint)


def _name(rank: int, file: int, total: int) -> str:
    return f"shard-{rank:05d}-model-{file:05d}-of-{total:05d}.safetensors"


def _require_whole(entry: TensorEntry, path: TreePath, *, partial: bool) -> None:
    boxes = [extent.box for extent in entry.extents]
    if sum(box.numel for box in boxes) == entry.numel:
        return
    found = compute_coverage(entry.shape, boxes)
    if partial and not found.overlaps:
        return
    wrong = found.holes or found.overlaps
    kind = CoverageError if found.holes else UnsupportedError
    raise kind(
        f"the shards of `{entry.name}` leave a gap or overlap",
        where=f"{path}, tensor `{entry.name}`, shape {list(entry.shape)}",
        why=f"{quote_names([str(box) for box in wrong])} "
        + ("is not in any file" if found.holes else "is in more than one file"),
        hint="replace files of other saves: "
        f"{quote_names(list(dict.fromkeys(e.file for e in entry.extents)))}",
    )


def _compared(tensors: Mapping[str, TensorEntry], faults: Faults, following: str) -> Iterator[str]:
    """Compare the shards with the index that torch's consolidation wrote next to ``sharded/``.

    Only the index shows whether files of the last ranks are missing; the remaining files look
    complete. *following* is the name that the next file would have.
    """
    name, folder = f"model{INDEX}", faults.root.parent
    where = str(folder / name)
    with source_files(folder) as files:
        index = read_json(files, name)
    weight_map = find_member(dict[str, object], index, "weight_map")
    if weight_map is None:
        yield f"`../{name}` is not an index and was not compared"
        return
    lacking = sorted(weight_map.keys() - tensors.keys())
    total = find_member(int, index, "metadata", "total_size")
    here = sum(entry.nbytes for entry in tensors.values())
    if lacking or (total or 0) > here:
        file = next((one.file for one in faults.findings if one.file), following)
        error = DamagedError(
            "the last ranks' shards are missing",
            where=str(faults.root),
            why=f"no shard has {quote_names(lacking)}, which are listed in {where}"
            if lacking
            else f"the shards have {pluralize(here, 'byte')}, but {where} states {total:,}",
            hint="copy the missing files, or convert the consolidated checkpoint in the parent "
            "directory",
        )
        if not faults.findings:
            faults.unreadable(error, file)
        for key in lacking:
            faults.nowhere(str(key), "the index lists it", file)
    elif total != here:
        yield f"`../{name}` states {total} bytes, but the shards have {here:,}"


FORMAT = HfRankShardsFormat()
