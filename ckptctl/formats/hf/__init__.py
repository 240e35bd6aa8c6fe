"""Hugging Face directories of safetensors, in one file or indexed shards, and older ``.bin``.

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
from ckptctl.errors import quote_names
from ckptctl.formats import torch_file
from ckptctl.formats.base import (
    AS_IT_IS,
    GB,
    Listing,
    OutputLayout,
    OutputRequest,
    OutputTensor,
    ReadOptions,
    TensorPlace,
    WritableFormat,
    constant,
    document,
)
from ckptctl.formats.hf.hf_files import (
    BIN,
    INDEX,
    OF_RANK,
    files_to_read,
    main_files,
    proven,
    shards_of,
    torch_consolidated,
)
from ckptctl.formats.hf.shards import (
    ReadShard,
    agreed_strings,
    checked_index,
    merge,
    read_bin,
    read_shard,
    read_shards,
)
from ckptctl.formats.shared.findings import Faults
from ckptctl.formats.sidecar_files import beside
from ckptctl.planner.layouts import MLX
from ckptctl.planner.plan import OutputFile, Record
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.read_ahead import prefetch_heads
from ckptctl.storage.safetensors_header import encode_header
from ckptctl.storage.schema import find_member
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

PT = "pt"
"""The ``format`` in headers, except for layout ``mlx``."""


class HfFormat(WritableFormat):
    """Safetensors with ``config.json``."""

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
    one_file = 5 * GB
    ties = "one copy and a record of the tie if config.json ties them, otherwise written in full"
    stem: ClassVar[str] = "model"
    described_in: ClassVar[tuple[str, ...]] = ()
    records_ties = True
    keeps_metadata = True

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        if not listing.is_folder:
            name = listing.path.name
            if name.startswith(("adapter_model", "consolidated")) or OF_RANK.fullmatch(name):
                return None
            named = name.endswith((".safetensors", INDEX)) or name in BIN
            return name if named or torch_file.HF_BIN.fullmatch(name) else None
        main = main_files(listing)
        return quote_names(main) if main else None

    def read(self, path: TreePath, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        root = path if path.is_dir() else path.parent
        names = files_to_read(path)
        main = names[0]
        with source_files(root) as files:
            if main.endswith("index.json"):
                return self._read_index(files, path, main, asked.partial)
            if main.endswith(".bin"):
                whole = read_bin(files, main)
                return self._catalog(files, path, whole.tensors, {}, [main], whole.notes, None)
            return self._read_safetensors(files, path, names)

    def _read_safetensors(self, files: SourceFiles, path: TreePath, names: list[str]) -> Catalog:
        tensors: dict[str, TensorEntry] = {}
        read = {name: read_shard(files, name) for name in prefetch_heads(files, names)}
        for name, (found, _) in read.items():
            merge(tensors, found, name)
        agreed, differ = agreed_strings(strings for _, strings in read.values())
        loose = () if len(names) == 1 else (f"{pluralize(len(names), 'shard')} without an index",)
        return self._catalog(files, path, tensors, agreed, names, (*loose, *differ), None)

    def _read_index(
        self, files: SourceFiles, path: TreePath, main: str, partial: bool = False
    ) -> Catalog:
        faults = Faults(files.root, partial)
        known: dict[str, ReadShard] = {}
        index: object = None
        if not partial and files.find_digest(main):  # the index can be derived from the shards
            known = shards_of(files, main)
            index = proven(files, main, known)
        index = index or read_json(files, main)
        weight_map, strings = checked_index(index, str(files.root / main))
        found = read_shards(files, weight_map, strings, main, known, faults)
        ordered = {name: found.tensors[name] for name in weight_map if name in found.tensors}
        extra = {name: t for name, t in found.tensors.items() if name not in weight_map}
        notes = found.notes
        if extra:
            notes.append(f"the index does not list these tensors: {quote_names([*extra])}")
        names = list(found.sizes)
        catalog = self._catalog(files, path, ordered | extra, found.metadata, names, notes, main)
        return replace(
            catalog,
            findings=tuple(faults.findings),
            lost=faults.lost,
            recorded_bytes=find_member(int, index, "metadata", "total_size"),
        )

    def _catalog(
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
            dropped: replace(tensors[kept], name=dropped, path=(dropped,), alias_of=kept)
            for dropped, kept in metadata.items()
            if kept in tensors and dropped not in tensors and dropped != "format"
        }
        around = beside(root, {*used, *self.described_in}, alone=path.is_file())
        return replace(
            around.catalog(root, self.name),
            path=path,
            files={name: files.size(name) for name in names},
            tensors=tensors | aliases,
            metadata=dict(metadata),
            notes=(*notes, *torch_consolidated(root)),
        )

    def holds(self, dtype: str) -> bool:
        """Return whether safetensors has a code for *dtype*."""
        return dtype in dtypes.BY_NAME and dtypes.BY_NAME[dtype].safetensors is not None

    def lay_out(self, request: OutputRequest) -> OutputLayout:
        """See :meth:`WritableFormat.lay_out`."""
        self.refuse_unheld(request.tensors)
        kept = [tensor for tensor in request.tensors if tensor.alias_of is None]
        aliases = {t.name: t.alias_of for t in request.tensors if t.alias_of is not None}
        by_name = {tensor.name: tensor for tensor in kept}
        # Only writing needs this module.
        from ckptctl.planner.balance import group_by_file, group_into_shards

        if request.like is not None:
            shards = group_by_file([t.name for t in kept], request.like, len(request.like_files))
        else:
            shards = group_into_shards(((t.name, t.nbytes) for t in kept), request.max_shard_size)
        names, count = request.like_files, len(shards)
        if not names or not all(name.endswith(".safetensors") for name in names):
            numbered = (f"{self.stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count))
            names = (f"{self.stem}.safetensors",) if count == 1 else tuple(numbered)
        mark = MLX if request.layout == MLX else PT
        writer = SafetensorsWriter(aliases if len(shards) == 1 else {}, request.metadata, mark)
        for file, shard in zip(names, shards, strict=True):
            writer.add(file, [by_name[name] for name in shard])
        if len(names) > 1:
            placed = zip(names, shards, strict=True)
            index = {
                "metadata": {"total_size": sum(tensor.nbytes for tensor in kept), **aliases},
                "weight_map": {name: file for file, shard in placed for name in shard},
            }
            content = json.dumps(index, indent=2).encode() + b"\n"
            writer.files.append(document(f"{self.stem}{INDEX}", content))
        why = "a safetensors file can only store tensors"
        request.notes.explain("skipped", {blob.name: why for blob in request.blobs})
        return OutputLayout(tuple(writer.files), tuple(writer.records), writer.boxes)


class SafetensorsWriter:
    """Builder of files, records and boxes.

    *aliases* maps each tensor that is skipped as shared to the kept one. *mark* is the ``format``
    of the headers.
    """

    def __init__(
        self,
        aliases: Mapping[str, str],
        metadata: Mapping[str, str] | None = None,
        mark: str = PT,
    ) -> None:
        self.metadata = {**(metadata or {}), "format": mark, **aliases}
        self.files: list[OutputFile] = []
        self.records: list[Record] = []
        self.boxes: dict[str, tuple[TensorPlace, ...]] = {}

    def add(self, file: str, tensors: Sequence[OutputTensor]) -> None:
        """Lay out one file with *tensors*, in their order if all are aligned in it."""
        tensors = _aligned(tensors)
        header, offsets = encode_header(
            [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors], self.metadata
        )
        size = len(header)
        for tensor, offset in zip(tensors, offsets, strict=True):
            self.boxes[tensor.name] = (TensorPlace(Box.whole(tensor.shape), len(self.records)),)
            self.records.append(Record(tensor.name, file, offset, tensor.nbytes))
            size = offset + tensor.nbytes
        self.files.append(OutputFile(file, size, constant(header)))


def _aligned(tensors: Sequence[OutputTensor]) -> Sequence[OutputTensor]:
    """Order *tensors* so that each starts at a multiple of its dtype's size.

    The given order, in which the source can be read sequentially, is kept if possible. Otherwise,
    tensors are sorted by descending size of the dtype, as in stock writers (``prepare`` in
    safetensors' ``tensor.rs``).
    """
    position = 0
    for tensor in tensors:
        if position % dtypes.itemsize(tensor.dtype):
            return sorted(tensors, key=lambda one: -dtypes.itemsize(one.dtype))
        position += tensor.nbytes
    return tensors


FORMAT = HfFormat()
