"""What is left of a directory of write items some of whose files cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ckptctl.catalog import Box, Finding
from ckptctl.errors import CkptError, SourceNotFoundError, listed
from ckptctl.formats.dcp.metadata import Item, MetadataLeaf
from ckptctl.formats.shared.findings import of_error
from ckptctl.storage.files import SourceFiles

_Size = int | CkptError
"""How many bytes a file has, or why that is not known."""


@dataclass(slots=True)
class UsableItems:
    """What can be read, and what is wrong with the rest.

    Attributes:
        leaves: Every tensor with the items in files that can be used, and the other leaves there.
        findings: What is wrong with the other files, and the leaves that are lost with them.
        lost: For each tensor the boxes that lie in those, and the files.
    """

    leaves: dict[str, MetadataLeaf] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    lost: dict[str, tuple[tuple[Box, str], ...]] = field(default_factory=dict)


def usable(
    files: SourceFiles,
    leaves: Mapping[str, MetadataLeaf],
    unfit: Mapping[str, Finding] | None = None,
) -> UsableItems:
    """Go through the items file by file, so that everything that is missing is named."""
    unfit = unfit or {}
    ends: dict[str, int] = {}
    for leaf in leaves.values():
        for _, item in leaf.items:
            ends[item.file] = max(ends.get(item.file, 0), item.offset + item.nbytes)
    sizes = {file: -1 if file in unfit else _size(files, file) for file in sorted(ends)}
    found = UsableItems(findings=list(unfit.values()))
    for file, end in ends.items():
        size = sizes[file]
        if file not in unfit and (isinstance(size, CkptError) or end > size):
            found.findings.append(_unusable(file, end, size, leaves))
    for name, leaf in leaves.items():
        _take(found, name, leaf, sizes)
    return found


def _size(files: SourceFiles, name: str) -> _Size:
    """Return the size of a file, or why there is none."""
    try:
        return files.size(name)
    except CkptError as error:
        return error


def _take(found: UsableItems, name: str, leaf: MetadataLeaf, sizes: Mapping[str, _Size]) -> None:
    kept = tuple(pair for pair in leaf.items if _fits(pair[1], sizes[pair[1].file]))
    gone = [pair for pair in leaf.items if not _fits(pair[1], sizes[pair[1].file])]
    if leaf.dtype or kept:
        found.leaves[name] = replace(leaf, items=kept) if gone else leaf
    if leaf.dtype and gone:
        found.lost[name] = tuple((box, item.file) for box, item in gone if box is not None)
    elif gone:
        file = gone[0][1].file
        why = f"it lies in `{file}`, which cannot be used"
        found.findings.append(Finding("a value is missing", why, "error", file, name))


def _fits(item: Item, size: _Size) -> bool:
    return isinstance(size, int) and item.offset + item.nbytes <= size


def _unusable(file: str, end: int, size: _Size, leaves: Mapping[str, MetadataLeaf]) -> Finding:
    inside = [name for name, leaf in leaves.items() if any(i.file == file for _, i in leaf.items)]
    held = f"it holds parts of {listed(inside, 2)}"
    if isinstance(size, SourceNotFoundError):
        return Finding("a data file is missing", held, file=file)
    if isinstance(size, CkptError):
        return replace(of_error(size, file=file), why=held)
    why = f"{end:,} bytes are needed, the file has {size:,}; {held}"
    return Finding("a data file is truncated", why, file=file)
