"""What GGUF files hold: the tensors of their headers, and what their metadata says of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.errors import DamagedError, UnsupportedError, listed
from ckptctl.formats.gguf.files import parts_of
from ckptctl.formats.gguf.header import Header, Many, Stored, read_header
from ckptctl.formats.sidecar_files import beside
from ckptctl.planner.configs.gguf import FACTORS, described, sizes_of
from ckptctl.planner.quantization.ggml import BLOCKS, PLAIN
from ckptctl.storage.files import SourceFiles, source_files

CONFIG = "config.json"
MAX_FACTORS = 1 << 12


def read(path: Path, name: str) -> Catalog:
    """Return the catalog of the file or folder *path*; see :meth:`Format.read`."""
    root = path if path.is_dir() else path.parent
    names = parts_of(root, path)
    with source_files(root) as files:
        headers = {file: read_header(files, file) for file in names}
        _require_all(root, headers)
        sizes = {file: files.size(file) for file in names}
        tensors = _tensors(root, headers)
        config, notes = _config(files, headers, tensors)
    around = beside(root, names, alone=path.is_file())
    found = around.catalog(root, name)
    own = CONFIG in found.documents
    documents = found.documents if own or not config else {**found.documents, CONFIG: config}
    return replace(
        found,
        path=str(path),
        files=sizes,
        tensors=tensors,
        documents=documents,
        stated={names[0]: sizes_of(config)} if own and config else {},
        notes=() if own else notes,
    )


def _require_all(root: Path, headers: Mapping[str, Header]) -> None:
    """Refuse files that are not the parts of one model, or not all of its tensors."""
    first, *_ = headers.values()
    total = first.metadata.get("split.tensors.count")
    found = sum(len(header.tensors) for header in headers.values())
    for place, (name, header) in enumerate(headers.items()):
        told = header.metadata.get("split.no", place), header.metadata.get("split.count")
        if told[0] != place or told[1] not in (None, len(headers)):
            why = (
                f"its header states part {told[0]} of {told[1]}, counted from 0; expected "
                f"{place} of {len(headers)}"
            )
            raise DamagedError(
                "the files do not belong to one model", where=str(root / name), why=why
            )
    if isinstance(total, int) and len(headers) > 1 and total != found:
        raise DamagedError(
            "tensors are missing", where=str(root), why=f"found {found:,} of {total:,}"
        )


def _tensors(root: Path, headers: Mapping[str, Header]) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    of: dict[str, str] = {}
    for file, header in headers.items():
        for one in header.tensors:
            entry = _entry(file, one)
            if of.setdefault(one.name, file) != file:
                why = f"it is in {listed([of[one.name], file])}"
                raise DamagedError(f"duplicate tensor `{one.name}`", where=str(root), why=why)
            if entry.name in found:
                why = (
                    f"without its type suffix, `{one.name}` in {file} has the same name as "
                    "another tensor"
                )
                raise UnsupportedError(f"duplicate tensor `{entry.name}`", where=str(root), why=why)
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
        raise UnsupportedError(f"`{FACTORS}` is malformed", where=str(files.root), why=why)
    extent = entry.extents[0]
    data = files.read(extent.file, extent.offset, extent.nbytes)
    return list(memoryview(data).cast("f"))
