"""Safetensors files written by each rank, as torch's ``HuggingFaceStorageWriter`` does.

Source: ``torch/distributed/checkpoint/hf_storage.py`` (``save_distributed=True``), ``_hf_utils.py``
(file names, keys) and ``filesystem.py`` (``_write_files_from_queue``). Rank N writes
``shard-{N+1}-model-{i}-of-{n}.safetensors``; ``DCP_SHARDING_INFO`` in its header records the
offset of each shard in the global tensor. No index exists, and the global shape is not recorded, so
it is the maximum end index of all shards along each dimension, including empty shards.
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
    format_option,
    quote_names,
)
from ckptctl.formats.base import DEFAULT_READ_OPTIONS, Format, Listing, ReadOptions
from ckptctl.formats.hf.hf_files import INDEX_SUFFIX, RANK_SHARD
from ckptctl.formats.shared.findings import FaultCollector, Lost
from ckptctl.formats.shared.indexes import parse_integers
from ckptctl.formats.shared.joined_tensors import (
    JoinedTensor,
    make_tensor_entries,
    ranks_disagree_error,
)
from ckptctl.formats.sidecar_files import scan_sidecar_files
from ckptctl.planner.boxes import compute_coverage
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import parse_json, read_json
from ckptctl.storage.read_ahead import prefetch_heads
from ckptctl.storage.safetensors_header import (
    MAX_HEADER_BYTES,
    SafetensorsHeader,
    read_safetensors_header,
)
from ckptctl.storage.schema import (
    MalformedError,
    read_as,
    read_nested_or_none,
    wrap_malformed_errors,
)
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

OFFSETS_KEY = "DCP_SHARDING_INFO"
SHARDED_FOLDER = "sharded"
Offsets = Mapping[str, tuple[int, ...]]
INVALID_SHARD = "this is not a valid per-rank shard"


class HfRankShardsFormat(Format):
    """A directory of ``shard-*-model-*-of-*.safetensors`` files that all ranks wrote."""

    name = "hf-rank-shards"
    title = "per-rank safetensors of torch's HuggingFaceStorageWriter"
    recognized = "`shard-N-model-I-of-M.safetensors`"
    marks = RANK_SHARD
    wholeness = (
        "every rank up to the highest has all of its M files (missing last ranks are detected "
        "only with `--ranks` or the consolidated checkpoint's index); their boxes tile every "
        "tensor"
    )
    read_options = frozenset({"ranks"})
    tested = "torch 2.13 (2-3 ranks), transformers 5.24 (2 ranks)"
    proof = (
        "reading: checkpoints of torch 2.13 on 2 ranks equal the live model "
        "(tests/contract/test_rank_shards.py); reading: checkpoints on 3 ranks equal the live "
        "tensors, including integers and 0-d tensors, where torch's own consolidation fails "
        "(tests/integration/test_rank_local.py); reading: `save_pretrained` with "
        "`distributed_checkpoint=True` of transformers 5.24 on 2 ranks, with FSDP2 and with TP, "
        "equals the live model (tests/oracle/trainers/test_transformers_shards.py)"
    )

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        count = len(_match_shard_names(listing))
        return f"{pluralize(count, 'file')} shard-*-model-*.safetensors" if count else None

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        shards = _match_shard_names(Listing(path))
        ranks = _count_ranks(path, shards, options.ranks)
        files_per_rank = int(next(iter(shards.values()))[3])
        faults = FaultCollector(path, options.partial)
        _require_shards(shards, ranks, files_per_rank, faults)
        merged: dict[str, JoinedTensor] = {}
        sizes: dict[str, int] = {}
        with source_files(path) as files:
            for name in prefetch_heads(files, shards):
                header = faults.try_read(name, lambda name: _read_shard_header(files, name))
                if header is not None:
                    _add_shard_tensors(merged, *header, name, str(path / name))
                    sizes[name] = files.size(name)
        for tensor in merged.values():
            if 0 not in tensor.shape:  # empty shards only determine the global shape
                tensor.extents = {box: e for box, e in tensor.extents.items() if box.numel}
        tensors = make_tensor_entries(merged)
        for entry in tensors.values():
            _require_coverage(entry, path, partial=bool(faults.findings))
        is_certain = faults.findings or options.ranks
        uncertainty_note = (
            f"found the shards of {pluralize(ranks, 'rank')} (neither the world size nor tensor "
            "sizes are recorded, so missing last ranks cannot be detected); set "
            f"{format_option('--ranks N')} to check"
        )
        notes: tuple[str, ...] = () if is_certain else (uncertainty_note,)
        if path.name == SHARDED_FOLDER and (path.parent / f"model{INDEX_SUFFIX}").is_file():
            notes = tuple(
                _compare_with_index(
                    tensors, faults, _format_shard_name(ranks + 1, 1, files_per_rank)
                )
            )
        sidecars = scan_sidecar_files(path, shards)
        return replace(
            sidecars.start_catalog(path, self.name),
            files=sizes,
            tensors=tensors,
            notes=notes,
            findings=tuple(faults.findings),
            lost=_find_open_ended_tensors(tensors, faults.findings),
        )


def _find_open_ended_tensors(
    tensors: Mapping[str, TensorEntry], findings: Sequence[Finding]
) -> Lost:
    """Return the tensors that may have further shards in an unusable file.

    The global shape is computed from the shards, so every tensor except 0-d tensors may be larger
    than the readable shards show. An empty box at their end represents possible further shards.
    """
    file = next((finding.file for finding in findings if finding.file), None)
    return {
        name: ((Box(entry.shape, (0,) * len(entry.shape)), file),)
        for name, entry in tensors.items()
        if file is not None and entry.shape
    }


def _add_shard_tensors(
    tensors: dict[str, JoinedTensor],
    header: SafetensorsHeader,
    offsets: Offsets,
    name: str,
    where: str,
) -> None:
    """Add the shards in the file *name* to *tensors*, at *offsets* in the global tensors."""
    for key, (dtype, sizes, begin, end) in header.tensors.items():
        start = offsets[key]
        if len(start) != len(sizes):
            raise UnsupportedError(
                INVALID_SHARD,
                where=where,
                why=f"`{key}` has {pluralize(len(sizes), 'dimension')} and "
                f"{pluralize(len(start), 'offset')}",
            )
        end_indices = tuple(map(sum, zip(start, sizes, strict=True)))
        tensor = tensors.setdefault(key, JoinedTensor(dtype, end_indices, (key,), name))
        if tensor.dtype != dtype or len(tensor.shape) != len(end_indices):
            why = (
                f"it is {dtype} with {pluralize(len(end_indices), 'dimension')} in this file, "
                f"{tensor.dtype} with {len(tensor.shape)} in `{tensor.file}`"
            )
            raise ranks_disagree_error(key, where, why)
        tensor.shape = tuple(map(max, tensor.shape, end_indices))
        extent = Extent(Box(start, sizes), name, begin, end - begin)
        earlier = tensor.add_extent(extent)
        if earlier is not None and extent.nbytes:
            raise UnsupportedError(
                f"{extent.box} of `{key}` is in two shards",
                where=where,
                why=f"it is also in `{earlier.file}`",
                hint="remove the file that is a copy or belongs to another save",
            )


def _read_shard_header(files: SourceFiles, name: str) -> tuple[SafetensorsHeader, Offsets]:
    """Read the header of the file *name*, and the offset of each shard in its global tensor."""
    header = read_safetensors_header(files, name)
    where = str(files.root / name)
    with wrap_malformed_errors(INVALID_SHARD, where):
        text = header.metadata.get(OFFSETS_KEY)
        if text is None:
            raise MalformedError(f"the header does not contain {OFFSETS_KEY}")
        info = parse_json(text.encode(), where=where, max_bytes=MAX_HEADER_BYTES)
        info_by_key = read_as(dict[str, dict[str, object]], info, OFFSETS_KEY)
        if info_by_key.keys() != header.tensors.keys():
            raise MalformedError(f"{OFFSETS_KEY} does not match the tensors of the file")
        return header, {
            key: parse_integers(place.get("saved_offsets")) for key, place in info_by_key.items()
        }


def _match_shard_names(listing: Listing) -> dict[str, re.Match[str]]:
    """Map the sorted names of the shard files in a folder to the regex matches of the names."""
    names = listing.names if listing.is_folder else ()
    return {name: match for name in names if (match := RANK_SHARD.fullmatch(name))}


def _count_ranks(path: TreePath, shards: Mapping[str, re.Match[str]], requested: int | None) -> int:
    """Return the world size, which is *requested*, or the highest rank in file names if None.

    Ranks in file names start at 1.
    """
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
    highest_rank = max(int(match[1]) for match in shards.values())
    if requested is not None and highest_rank > requested:
        raise UsageError(
            f"{format_option(f'--ranks {requested}')}, but there are shards of rank {highest_rank}",
            where=str(path),
            why="file names count ranks from 1",
        )
    return requested or highest_rank


def _require_shards(
    shards: Mapping[str, re.Match[str]], ranks: int, files_per_rank: int, faults: FaultCollector
) -> None:
    """Raise an error, or add a finding in a partial read, if a shard file is missing."""
    required = range(ranks * files_per_rank)

    def format_name(number: int) -> str:
        return _format_shard_name(
            number // files_per_rank + 1, number % files_per_rank + 1, files_per_rank
        )

    numbers = {files_per_rank * (int(m[1]) - 1) + int(m[2]) - 1: name for name, m in shards.items()}
    present = {n for n, name in numbers.items() if n in required and format_name(n) == name}
    hint = "copy the missing files from the nodes of the other ranks"
    if len(present) == ranks * files_per_rank != len(shards):
        message, why = "the shard numbers are inconsistent", quote_names(list(shards))
        raise UnsupportedError(message, where=str(faults.root), why=why, hint=hint)
    faults.require_files(present, required, format_name, "shards", hint)


def _format_shard_name(rank: int, file: int, total: int) -> str:
    return f"shard-{rank:05d}-model-{file:05d}-of-{total:05d}.safetensors"


def _require_coverage(entry: TensorEntry, path: TreePath, *, partial: bool) -> None:
    boxes = [extent.box for extent in entry.extents]
    if sum(box.numel for box in boxes) == entry.numel:
        return
    report = compute_coverage(entry.shape, boxes)
    if partial and not report.overlaps:
        return
    bad_boxes = report.holes or report.overlaps
    kind = CoverageError if report.holes else UnsupportedError
    raise kind(
        f"the shards of `{entry.name}` leave a gap or overlap",
        where=f"{path}, tensor `{entry.name}`, shape {list(entry.shape)}",
        why=f"{quote_names([str(box) for box in bad_boxes])} "
        + ("is not in any file" if report.holes else "is in more than one file"),
        hint="replace files of other saves: "
        f"{quote_names(list(dict.fromkeys(e.file for e in entry.extents)))}",
    )


def _compare_with_index(
    tensors: Mapping[str, TensorEntry], faults: FaultCollector, next_file: str
) -> Iterator[str]:
    """Compare the shards with the index that torch's consolidation wrote next to ``sharded/``.

    If the files of the last ranks are missing, the remaining files look complete, so only the index
    reveals it. Yields notes for the user.

    Args:
        tensors: Global tensors, joined from the shards.
        faults: Problems of the checkpoint, to which missing files and tensors are added.
        next_file: Name of the shard file that would follow the last existing one.
    """
    name, folder = f"model{INDEX_SUFFIX}", faults.root.parent
    where = str(folder / name)
    with source_files(folder) as files:
        index = read_json(files, name)
    weight_map = read_nested_or_none(dict[str, object], index, "weight_map")
    if weight_map is None:
        yield f"`../{name}` is not an index and was not compared"
        return
    missing_keys = sorted(weight_map.keys() - tensors.keys())
    total = read_nested_or_none(int, index, "metadata", "total_size")
    actual_bytes = sum(entry.nbytes for entry in tensors.values())
    if missing_keys or (total or 0) > actual_bytes:
        file = next((finding.file for finding in faults.findings if finding.file), next_file)
        error = DamagedError(
            "the last ranks' shards are missing",
            where=str(faults.root),
            why=f"no shard has {quote_names(missing_keys)}, which are listed in {where}"
            if missing_keys
            else f"the shards have {pluralize(actual_bytes, 'byte')}, but {where} states {total:,}",
            hint="copy the missing files, or convert the consolidated checkpoint in the parent "
            "directory",
        )
        if not faults.findings:
            faults.add_or_raise(error, file)
        for key in missing_keys:
            faults.add_missing_tensor(str(key), "the index lists it", file)
    elif total != actual_bytes:
        yield f"`../{name}` states {total} bytes, but the shards have {actual_bytes:,}"


FORMAT = HfRankShardsFormat()
