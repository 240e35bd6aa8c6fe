"""GGUF: what llama.cpp runs, one file or several, metadata and tensors together.

A tensor whose elements are quantised has the name that it has in the file, a dot and its type, as
in ``blk.0.attn_q.weight.Q4_K``, and the bytes of its blocks as elements; ``--dequantize`` computes
the plain one. config.json is made of the metadata where none lies beside the file.

Sources: ``docs/gguf.md`` of ggml, ``gguf-split`` of llama.cpp for the names of several files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.errors import DamagedError, FormatError, UnsupportedError, listed
from ckptctl.formats.base import AS_IT_IS, Format, ReadOptions, Sniff
from ckptctl.formats.gguf.header import MAGIC, Header, Many, Stored, read_header
from ckptctl.formats.hf.files import main_files
from ckptctl.formats.sidecar_files import beside
from ckptctl.planner.configs.gguf import FACTORS, described
from ckptctl.planner.quantisation.ggml import BLOCKS, PLAIN
from ckptctl.storage.files import SourceFiles, source_files

CONFIG = "config.json"
SUFFIX = ".gguf"
MAX_FACTORS = 1 << 12
_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


class GgufFormat(Format):
    """Metadata and tensors in one file, or in several that are numbered."""

    name = "gguf"
    title = "GGUF: what llama.cpp runs, quantised or not"
    recognised = "a file that begins with `GGUF`; a folder with `*.gguf` and no other weights"
    marks = re.compile(r".*\.gguf\Z", re.DOTALL)
    wholeness = (
        "every tensor lies inside of its file, aligned and apart from the others; all files of "
        "`...-00001-of-0000N.gguf` are there, and as many tensors as they say"
    )
    proof = (
        "what the package gguf 0.19 writes is read as its own reader reads it, and dequantised bit "
        "for bit as it does; transformers reads the same files and computes the same logits as of "
        "what is converted (tests/oracle/test_gguf.py)"
    )
    layout = "gguf"

    def sniff(self, path: Path) -> Sniff | None:
        """See :meth:`Format.sniff`."""
        if path.is_file():
            return Sniff(path.name) if _is_gguf(path) else None
        found = _models(path)
        return Sniff(listed(found)) if found and not main_files(path) else None

    def read(self, path: Path, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        root = path if path.is_dir() else path.parent
        names = _parts(root, path)
        with source_files(root) as files:
            headers = {name: read_header(files, name) for name in names}
            _require_all(root, headers)
            sizes = {name: files.size(name) for name in names}
            tensors = _tensors(root, headers)
            config, notes = _config(files, headers, tensors)
        around = beside(root, names, alone=path.is_file())
        found = around.catalog(root, self.name)
        documents = {**({CONFIG: config} if config else {}), **found.documents}
        return replace(
            found,
            path=str(path),
            files=sizes,
            tensors=tensors,
            documents=documents,
            notes=notes,
        )


def _models(folder: Path) -> list[str]:
    """Return the GGUF files in a folder that hold a language model, not what sees pictures."""
    found = (item for item in folder.iterdir() if item.name.endswith(SUFFIX))
    return sorted(i.name for i in found if not i.name.startswith("mmproj") and _is_gguf(i))


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def _parts(root: Path, path: Path) -> list[str]:
    """Return the names of the files of one model."""
    names = [path.name] if path != root else _models(root)
    parts = [_PART.fullmatch(name) for name in names]
    first = parts[0] if parts else None
    if first is None and len(names) == 1:
        return names
    if first is None or any(one is None or one[1] != first[1] for one in parts):
        raise FormatError(
            f"{len(names)} GGUF files lie here, each of which may be a model",
            where=str(root),
            why=listed(names),
            hint="name the one that is meant",
        )
    count = int(first[3])
    wanted = [f"{first[1]}-{n:05d}-of-{first[3]}{SUFFIX}" for n in range(1, count + 1)]
    missing = [name for name in wanted if not (root / name).is_file()]
    if missing or not wanted:
        raise DamagedError(
            f"{len(missing):,} of {count:,} files are missing",
            where=str(root),
            why=listed(missing),
            hint="all of them are one model: copy the rest",
        )
    return wanted


def _require_all(root: Path, headers: Mapping[str, Header]) -> None:
    """Refuse files that are not the parts of one model, or not all of its tensors."""
    first, *_ = headers.values()
    total = first.metadata.get("split.tensors.count")
    found = sum(len(header.tensors) for header in headers.values())
    for place, (name, header) in enumerate(headers.items()):
        told = header.metadata.get("split.no", place), header.metadata.get("split.count")
        if told[0] != place or told[1] not in (None, len(headers)):
            why = f"it says that it is number {told[0]} of {told[1]}"
            raise DamagedError("these files are not one model", where=str(root / name), why=why)
    if isinstance(total, int) and len(headers) > 1 and total != found:
        raise DamagedError(
            "tensors are missing", where=str(root), why=f"{found:,} of {total:,} are there"
        )


def _tensors(root: Path, headers: Mapping[str, Header]) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for file, header in headers.items():
        for one in header.tensors:
            entry = _entry(file, one)
            if entry.name in found:
                why = "two files hold it"
                raise DamagedError(f"`{entry.name}` is there twice", where=str(root), why=why)
            found[entry.name] = entry
    return found


def _entry(file: str, one: Stored) -> TensorEntry:
    name, dtype, shape = one.name, PLAIN.get(one.kind), one.shape
    if dtype is None:
        block = BLOCKS[one.kind]
        name, dtype = f"{name}.{block.name}", "uint8"
        shape = (*shape[:-1], shape[-1] // block.elements * block.nbytes)
    extent = Extent(Box.whole(shape), file, one.offset, one.nbytes)
    return TensorEntry(name, dtype, shape, (extent,), (name,))


def _config(
    files: SourceFiles, headers: Mapping[str, Header], tensors: Mapping[str, TensorEntry]
) -> tuple[dict[str, object] | None, tuple[str, ...]]:
    """Return the config.json that the metadata amounts to; None: of a model that is not known."""
    metadata = next(iter(headers.values())).metadata
    values = {key: value for key, value in metadata.items() if not isinstance(value, Many)}
    counts = {key: value.count for key, value in metadata.items() if isinstance(value, Many)}
    return described(values, counts, tensors, _factors(files, tensors))


def _factors(files: SourceFiles, tensors: Mapping[str, TensorEntry]) -> Sequence[float] | None:
    """Return what the rotary frequencies are divided by; None: nothing is said."""
    entry = tensors.get(FACTORS)
    if entry is None:
        return None
    if entry.dtype != "float32" or not 0 < entry.numel <= MAX_FACTORS:
        why = f"{entry.dtype} {list(entry.shape)}"
        raise UnsupportedError(f"`{FACTORS}` is not understood", where=str(files.root), why=why)
    extent = entry.extents[0]
    data = files.read(extent.file, extent.offset, extent.nbytes)
    return list(memoryview(data).cast("f"))


FORMAT = GgufFormat()
