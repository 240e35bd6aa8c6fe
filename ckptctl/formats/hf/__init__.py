"""Hugging Face directories, with one safetensors file or indexed shards, or older ``.bin`` files.

Sources: the safetensors format specification; ``huggingface_hub/serialization`` for the index and
the names of shards; ``transformers/utils/__init__.py`` for the names of weight files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from ckptctl import dtypes
from ckptctl.catalog import Box, Catalog, TensorEntry
from ckptctl.errors import UnsupportedError, format_command, quote_names
from ckptctl.formats import torch_file
from ckptctl.formats.base import (
    DEFAULT_READ_OPTIONS,
    GB,
    Listing,
    OutputLayout,
    OutputRequest,
    OutputTensor,
    ReadOptions,
    TensorPlace,
    WritableFormat,
    make_constant_frame,
    make_content_file,
)
from ckptctl.formats.hf.hf_files import (
    BIN_FILES,
    INDEX_SUFFIX,
    RANK_FILE,
    derive_index,
    find_files_to_read,
    find_index_of_shard,
    find_main_files,
    list_torch_consolidation_notes,
    read_indexed_shards,
)
from ckptctl.formats.hf.shards import (
    ShardContent,
    add_shard_tensors,
    merge_shard_metadata,
    parse_index,
    read_shard,
    read_shards,
    read_torch_shard,
)
from ckptctl.formats.shared.findings import FaultCollector
from ckptctl.formats.sidecar_files import scan_sidecar_files
from ckptctl.planner.layouts import MLX
from ckptctl.planner.plan import OutputFile, Record
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.read_ahead import prefetch_heads
from ckptctl.storage.safetensors_header import encode_safetensors_header
from ckptctl.storage.schema import read_nested_or_none
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

PT_FORMAT = "pt"
"""Value of ``format`` in the metadata of safetensors headers, for all layouts except ``mlx``."""


class HfFormat(WritableFormat):
    """Safetensors or ``.bin`` weight files with ``config.json``, as transformers loads them."""

    name = "hf"
    other_names: ClassVar[tuple[str, ...]] = ("huggingface", "safetensors", "transformers", "vllm")
    title = "Hugging Face: safetensors (or pytorch_model*.bin, read only) with config.json"
    recognized = (
        "`*.safetensors` or `*.safetensors.index.json`; otherwise `pytorch_model.bin` or its "
        "index; not `adapter_model*`, `consolidated*` or per-rank files"
    )
    marks = re.compile(r".*\.safetensors|pytorch_model.*\.bin", re.DOTALL)
    wholeness = (
        "every file in the index exists and contains exactly the tensors that the index places "
        "in it; without an index, all N files `...-00001-of-0000N` exist; every file has the "
        "length that its header states"
    )
    tested = "safetensors, transformers (logits)"
    proof = (
        "reading: files of safetensors are read bit for bit (tests/contract/test_directions.py); "
        "writing: safetensors reads every dtype (tests/contract/test_dtypes.py); writing: "
        "transformers loads the output and computes the same logits (tests/oracle/test_logits.py)"
    )
    layout = "hf"
    other_layouts = True
    sharded = True
    single_file_bytes = 5 * GB
    ties = "one copy and a record of the tie if config.json ties them, otherwise written in full"
    stem: ClassVar[str] = "model"
    config_files: ClassVar[tuple[str, ...]] = ()
    records_ties = True
    keeps_metadata = True

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        if not listing.is_folder:
            name = listing.path.name
            if name.startswith(("adapter_model", "consolidated")) or RANK_FILE.fullmatch(name):
                return None
            is_weight_file = name.endswith((".safetensors", INDEX_SUFFIX)) or name in BIN_FILES
            return name if is_weight_file or torch_file.HF_BIN.fullmatch(name) else None
        main = find_main_files(listing)
        return quote_names(main) if main else None

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        root = path if path.is_dir() else path.parent
        if path.is_file() and (index_name := find_index_of_shard(path)):
            with source_files(root) as files:
                _require_no_update(read_json(files, index_name), index_name, root)
        names = find_files_to_read(path)
        main = names[0]
        with source_files(root) as files:
            if main.endswith("index.json"):
                return self._read_index(files, path, main, options.partial)
            if main.endswith(".bin"):
                contents = read_torch_shard(files, main)
                return self._build_catalog(
                    files, path, contents.tensors, {}, [main], contents.notes, None
                )
            return self._read_safetensors(files, path, names)

    def _read_safetensors(self, files: SourceFiles, path: TreePath, names: list[str]) -> Catalog:
        tensors: dict[str, TensorEntry] = {}
        shards_by_name = {name: read_shard(files, name) for name in prefetch_heads(files, names)}
        for name, (shard_tensors, _) in shards_by_name.items():
            add_shard_tensors(tensors, shard_tensors, name)
        agreed, differ = merge_shard_metadata(strings for _, strings in shards_by_name.values())
        unindexed_note = (
            () if len(names) == 1 else (f"{pluralize(len(names), 'shard')} without an index",)
        )
        return self._build_catalog(
            files, path, tensors, agreed, names, (*unindexed_note, *differ), None
        )

    def _read_index(
        self, files: SourceFiles, path: TreePath, index_name: str, partial: bool = False
    ) -> Catalog:
        faults = FaultCollector(files.root, partial)
        known_shards: dict[str, ShardContent] = {}
        index: object = None
        if not partial and files.find_digest(
            index_name
        ):  # the index can be derived from the shards
            known_shards = read_indexed_shards(files, index_name)
            index = derive_index(files, index_name, known_shards)
        index = index or read_json(files, index_name)
        _require_no_update(index, index_name, path)
        weight_map, strings = parse_index(index, str(files.root / index_name))
        indexed = read_shards(files, weight_map, strings, index_name, known_shards, faults)
        listed_tensors = {
            name: indexed.tensors[name] for name in weight_map if name in indexed.tensors
        }
        unlisted_tensors = {
            name: t for name, t in indexed.tensors.items() if name not in weight_map
        }
        notes = indexed.notes
        if unlisted_tensors:
            notes.append(
                f"the index does not list these tensors: {quote_names([*unlisted_tensors])}"
            )
        names = list(indexed.sizes)
        catalog = self._build_catalog(
            files,
            path,
            listed_tensors | unlisted_tensors,
            indexed.metadata,
            names,
            notes,
            index_name,
        )
        return replace(
            catalog,
            findings=tuple(faults.findings),
            lost=faults.lost,
            recorded_bytes=read_nested_or_none(int, index, "metadata", "total_size"),
        )

    def _build_catalog(
        self,
        files: SourceFiles,
        path: TreePath,
        tensors: dict[str, TensorEntry],
        metadata: Mapping[str, str],
        names: Sequence[str],
        notes: Iterable[str],
        index: str | None,
    ) -> Catalog:
        root = files.root
        used = {*names, index} if index else set(names)
        # Tensors that a writer skipped as shared are recorded as ``{skipped: kept}``.
        aliases = {
            dropped: replace(tensors[original], name=dropped, path=(dropped,), alias_of=original)
            for dropped, original in metadata.items()
            if original in tensors and dropped not in tensors and dropped != "format"
        }
        sidecars = scan_sidecar_files(
            root, {*used, *self.config_files}, is_single_file=path.is_file()
        )
        return replace(
            sidecars.start_catalog(root, self.name),
            path=path,
            files={name: files.size(name) for name in names},
            tensors=tensors | aliases,
            metadata=dict(metadata),
            notes=(*notes, *list_torch_consolidation_notes(root)),
        )

    def can_store(self, dtype: str) -> bool:
        """Return whether the safetensors format supports *dtype*."""
        return dtype in dtypes.BY_NAME and dtypes.BY_NAME[dtype].safetensors is not None

    def lay_out(self, request: OutputRequest) -> OutputLayout:
        """See :meth:`WritableFormat.lay_out`."""
        self.require_storable_dtypes(request.tensors)
        stored = [tensor for tensor in request.tensors if tensor.alias_of is None]
        aliases = {t.name: t.alias_of for t in request.tensors if t.alias_of is not None}
        by_name = {tensor.name: tensor for tensor in stored}
        # Only writing needs this module.
        from ckptctl.planner.balance import group_into_shards, group_names_by_file

        if request.like is not None:
            shards = group_names_by_file(
                [t.name for t in stored], request.like, len(request.like_files)
            )
        else:
            shards = group_into_shards(((t.name, t.nbytes) for t in stored), request.max_shard_size)
        names, count = request.like_files, len(shards)
        if not names or not all(name.endswith(".safetensors") for name in names):
            numbered = (f"{self.stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count))
            names = (f"{self.stem}.safetensors",) if count == 1 else tuple(numbered)
        format_mark = MLX if request.layout == MLX else PT_FORMAT
        builder = SafetensorsLayoutBuilder(
            aliases if len(shards) == 1 else {}, request.metadata, format_mark
        )
        for file, shard in zip(names, shards, strict=True):
            builder.add_file(file, [by_name[name] for name in shard])
        if len(names) > 1:
            placed = zip(names, shards, strict=True)
            index = {
                "metadata": {"total_size": sum(tensor.nbytes for tensor in stored), **aliases},
                "weight_map": {name: file for file, shard in placed for name in shard},
            }
            content = json.dumps(index, indent=2).encode() + b"\n"
            builder.files.append(make_content_file(f"{self.stem}{INDEX_SUFFIX}", content))
        why = "a safetensors file can only store tensors"
        request.notes.explain("skipped", {blob.name: why for blob in request.blobs})
        return OutputLayout(tuple(builder.files), tuple(builder.records), builder.boxes)


class SafetensorsLayoutBuilder:
    """Builder of the output files, records and boxes of a safetensors checkpoint.

    *aliases* maps the name of each tensor that is not written because it shares memory to the name
    of the written tensor. *mark* is the value of ``format`` in the metadata of the headers.
    """

    def __init__(
        self,
        aliases: Mapping[str, str],
        metadata: Mapping[str, str] | None = None,
        mark: str = PT_FORMAT,
    ) -> None:
        self.metadata = {**(metadata or {}), "format": mark, **aliases}
        self.files: list[OutputFile] = []
        self.records: list[Record] = []
        self.boxes: dict[str, tuple[TensorPlace, ...]] = {}

    def add_file(self, file: str, tensors: Sequence[OutputTensor]) -> None:
        """Add the output file *file*, with *tensors* in the given order if this aligns them."""
        tensors = _order_aligned(tensors)
        header, offsets = encode_safetensors_header(
            [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors], self.metadata
        )
        size = len(header)
        for tensor, offset in zip(tensors, offsets, strict=True):
            self.boxes[tensor.name] = (TensorPlace(Box.whole(tensor.shape), len(self.records)),)
            self.records.append(Record(tensor.name, file, offset, tensor.nbytes))
            size = offset + tensor.nbytes
        self.files.append(OutputFile(file, size, make_constant_frame(header)))


def _require_no_update(index: object, index_name: str, path: TreePath) -> None:
    """Raise if the index is that of a published update of weights."""
    if read_nested_or_none(str, index, "metadata", "delta_encoding") is not None:
        command = format_command("delta", "make", "BASE", path, "DELTA")
        raise UnsupportedError(
            "this is a published update of weights, not a checkpoint",
            where=str(path),
            why=f"{index_name} states `delta_encoding`, as slime and SGLang write it",
            hint=f"turn it into a delta with {command}",
        )


def _order_aligned(tensors: Sequence[OutputTensor]) -> Sequence[OutputTensor]:
    """Order *tensors* so that the offset of each tensor is a multiple of its element size.

    The given order is kept if possible, because the source can then be read sequentially.
    Otherwise, tensors are sorted by descending element size, as in ``prepare`` of safetensors'
    ``tensor.rs``.
    """
    position = 0
    for tensor in tensors:
        if position % dtypes.get_itemsize(tensor.dtype):
            return sorted(tensors, key=lambda candidate: -dtypes.get_itemsize(candidate.dtype))
        position += tensor.nbytes
    return tensors


FORMAT = HfFormat()
