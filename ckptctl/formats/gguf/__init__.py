"""GGUF, the format of llama.cpp, with metadata and tensors in one or several files.

The type of a quantized tensor is appended to its name, as in ``blk.0.attn_q.weight.Q4_K``. Its
elements are the bytes of the quantized blocks, and ``--dequantize`` computes the unquantized
tensor. ``config.json`` is derived from the metadata if the folder has none.

Sources: ``docs/gguf.md`` of ggml, ``gguf-split`` of llama.cpp for the names of several files.
"""

from __future__ import annotations

import re

from ckptctl.catalog import Catalog
from ckptctl.errors import DamagedError, FormatError, quote_names
from ckptctl.formats.base import DEFAULT_READ_OPTIONS, Format, Listing, ReadOptions
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

SUFFIX = ".gguf"
_NUMBERED_FILE = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


def list_model_files(folder: TreePath) -> list[str]:
    """Return the sorted names of the GGUF files in *folder*, except vision projectors."""
    files = (item for item in folder.iterdir() if item.name.endswith(SUFFIX))
    return sorted(
        file.name for file in files if not file.name.startswith("mmproj") and is_gguf(file)
    )


def is_gguf(path: TreePath) -> bool:
    """Return whether *path* is a file that starts with the magic number of GGUF."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return bool(file.read(4) == b"GGUF")


def find_gguf_files(root: TreePath, path: TreePath) -> list[str]:
    """Return the names of all files of the model in *path*, in the order of their numbers.

    Args:
        root: Folder of the files.
        path: *root* itself, or one file in it. One file of a numbered set stands for the set.
    """
    names = [path.name] if path != root else list_model_files(root)
    parts = [_NUMBERED_FILE.fullmatch(name) for name in names]
    first = parts[0] if parts else None
    if first is None and len(names) == 1:
        return names
    if first is None or any(match is None or match[1] != first[1] for match in parts):
        raise FormatError(
            f"this folder contains {pluralize(len(names), 'GGUF file')}, and each may be a model",
            where=str(root),
            why=quote_names(names),
            hint="pass one of these files",
        )
    count = int(first[3])
    expected_names = [f"{first[1]}-{n:05d}-of-{first[3]}{SUFFIX}" for n in range(1, count + 1)]
    missing = [name for name in expected_names if not (root / name).is_file()]
    if missing or not expected_names:
        raise DamagedError(
            f"{len(missing):,} of {pluralize(count, 'file is', 'files are')} missing",
            where=str(root),
            why=quote_names(missing),
            hint="copy the remaining files of the model",
        )
    return expected_names


class GgufFormat(Format):
    """One GGUF file, or several numbered files that contain one model."""

    name = "gguf"
    title = "GGUF: llama.cpp's format, quantized or unquantized"
    recognized = "a file that starts with `GGUF`; a folder with `*.gguf` and no other weights"
    marks = re.compile(r".*\.gguf\Z", re.DOTALL)
    yields_to = frozenset({"hf"})
    wholeness = (
        "every tensor is inside its file, aligned, and does not overlap another one; all files of"
        " `...-00001-of-0000N.gguf` exist; the number of tensors matches the headers"
    )
    tested = "gguf 0.19, transformers (logits)"
    proof = (
        "reading: files of the package gguf 0.19 are read as by its own reader, and dequantized"
        " bit for bit (tests/oracle/test_gguf.py); reading: transformers computes the same logits"
        " from the same files and from the converted model (tests/oracle/test_gguf.py)"
    )
    layout = "gguf"
    self_described = True

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        if not listing.is_folder:
            return listing.path.name if is_gguf(listing.path) else None
        names = list_model_files(listing.path)
        return quote_names(names) if names else None

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        from ckptctl.formats.gguf.gguf_reader import read_catalog

        root = path if path.is_dir() else path.parent
        return read_catalog(path, find_gguf_files(root, path), self.name)


FORMAT = GgufFormat()
