"""What is left of a checkpoint whose reader refuses it: every fault by name, and the rest read.

A reader stops at the first fault. For the two forms that have an index apart from the data, the
index is gone through here file by file, so that everything that is missing can be named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptctl.catalog import Box, Catalog, Finding, TensorEntry
from ckptctl.errors import CkptError, listed
from ckptctl.formats.dcp import catalog_of, read_metadata
from ckptctl.formats.dcp_metadata import METADATA, Leaf, decode
from ckptctl.formats.hf_files import INDEX, main_files
from ckptctl.formats.hf_shards import (
    checked_index,
    keys_by_file,
    read_bin,
    read_shard,
    require_agreement,
)
from ckptctl.ops.verification import of_error
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.json_reader import read_json


@dataclass(slots=True)
class Partial:
    """What could be read.

    Attributes:
        catalog: The tensors and boxes in files that can be used.
        findings: What is wrong with the others.
        lost: For each tensor the boxes that lie in those.
    """

    catalog: Catalog
    findings: list[Finding] = field(default_factory=list)
    lost: dict[str, list[tuple[Box, str]]] = field(default_factory=dict)


def partial(path: Path, format: str) -> Partial | None:
    """Read what can be read of *path*; None: nothing, or it is of another form.

    Args:
        path: An absolute path whose reader raised an error.
        format: Its format.
    """
    readers = {"dcp": _dcp, "hf": _hf}
    if format not in readers or not path.is_dir():
        return None
    try:
        with SourceFiles(path) as files:
            return readers[format](files)
    except CkptError:
        return None


def _dcp(files: SourceFiles) -> Partial | None:
    leaves = decode(read_metadata(files, METADATA), str(files.root / METADATA))
    ends: dict[str, int] = {}
    for leaf in leaves.values():
        for _, item in leaf.items:
            ends[item.file] = max(ends.get(item.file, 0), item.offset + item.nbytes)
    sizes = {file: _size(files, file) for file in sorted(ends)}
    kept = {name: _usable(leaf, sizes) for name, leaf in leaves.items()}
    findings = [
        _unusable(file, end, size, leaves)
        for file, end in ends.items()
        if isinstance(size := sizes[file], str) or end > size
    ]
    found = Partial(
        catalog_of(files, {n: leaf for n, leaf in kept.items() if leaf.dtype or leaf.items}, "dcp"),
        findings,
    )
    for name, leaf in leaves.items():
        gone = [pair for pair in leaf.items if pair not in kept[name].items]
        if leaf.dtype:
            found.lost[name] = [(box, item.file) for box, item in gone if box is not None]
        elif gone:
            why = f"it lies in `{gone[0][1].file}`, which cannot be used"
            findings.append(Finding("a value is missing", why, "error", gone[0][1].file, name))
    return found


def _size(files: SourceFiles, name: str) -> int | str:
    """Return the size of a file, or why there is none."""
    try:
        return files.size(name)
    except CkptError as error:
        return error.what


def _usable(leaf: Leaf, sizes: Mapping[str, int | str]) -> Leaf:
    items = tuple(
        (box, item)
        for box, item in leaf.items
        if isinstance(size := sizes[item.file], int) and item.offset + item.nbytes <= size
    )
    return leaf if len(items) == len(leaf.items) else replace(leaf, items=items)


def _unusable(file: str, end: int, size: int | str, leaves: Mapping[str, Leaf]) -> Finding:
    inside = [name for name, leaf in leaves.items() if any(i.file == file for _, i in leaf.items)]
    held = f"it holds parts of {listed(inside, 2)}"
    if isinstance(size, str):
        return Finding("a data file is missing", held, file=file)
    why = f"{end:,} bytes are needed, the file has {size:,}; {held}"
    return Finding("a data file is truncated", why, file=file)


def _hf(files: SourceFiles) -> Partial | None:
    main = main_files(files.root)
    if len(main) != 1 or not main[0].endswith((INDEX, ".bin.index.json")):
        return None
    where = str(files.root / main[0])
    weight_map, metadata = checked_index(read_json(files, main[0]), where)
    empty = Catalog(str(files.root), str(files.root), "hf", {}, {}, metadata=metadata)
    found = Partial(empty)
    tensors: dict[str, TensorEntry] = {}
    sizes: dict[str, int] = {}
    for name, expected in keys_by_file(weight_map).items():
        try:
            sizes[name] = files.size(name)
            shard = _shard(files, name)
            tensors |= {key: entry for key, entry in shard.items() if key in expected}
            require_agreement(expected, shard, name, where)
        except CkptError as error:
            found.findings.append(replace(of_error(error, files.root), file=name))
            found.findings += [
                Finding("a tensor is missing", "the index places it there", "error", name, key)
                for key in sorted(expected - tensors.keys())
            ]
    found.catalog = replace(empty, files=sizes, tensors=tensors)
    return found


def _shard(files: SourceFiles, name: str) -> Mapping[str, TensorEntry]:
    if name.endswith(".safetensors"):
        return read_shard(files, name)[0]
    return read_bin(files, name).tensors
