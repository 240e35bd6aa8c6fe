"""What of a checkpoint is not whole: the positive evidence that ``--allow-missing`` goes by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import NamedTuple

from ckptctl.catalog import Box, Catalog, Finding, TensorEntry
from ckptctl.errors import (
    CkptError,
    CoverageError,
    UnsupportedError,
)
from ckptctl.ops.recognition.quantised import pairs
from ckptctl.ops.verification.items import resolved
from ckptctl.planner.boxes import check_coverage
from ckptctl.records import dataclass
from ckptctl.storage.files import source_files
from ckptctl.storage.zips.reader import read_archive


@dataclass(frozen=True, slots=True)
class Missing:
    """What of a checkpoint is not whole.

    Attributes:
        names: Tensors and other leaves, by their names in the checkpoint, and why.
        files: Files that cannot be used and of which nothing tells what they hold, and why.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.names or self.files)


def find_missing(catalog: Catalog) -> Missing:
    """What is not whole in a checkpoint read with ``partial``; looks at the header of each item."""
    _, wrong = resolved(replace(catalog, replicas={}))
    errors = [f for f in (*catalog.findings, *wrong) if f.severity != "warning"]
    names = {found.tensor: _reason(found) for found in errors if found.tensor}
    names = _in_mixed_files(catalog, wrong) | names
    for name, boxes in catalog.lost.items():
        if boxes:
            names.setdefault(name, _gone(boxes))
    for entry in catalog.tensors.values():
        if entry.name not in names and (why := _torn(entry)):
            names[entry.name] = why
    aliases = ((t.name, t.alias_of) for t in catalog.tensors.values() if t.alias_of)
    _spread(names, aliases, "it shares its memory with")
    if names:
        together = ((pair.weight, pair.scale) for pair in pairs(catalog))
        _spread(names, together, "it belongs together with")
    explained = {file for boxes in catalog.lost.values() for box, file in boxes if box.numel}
    explained |= {found.file for found in errors if found.tensor and found.file}
    unknown = [f for f in errors if not f.tensor and f.file not in explained]
    return Missing(names, {f.file or f.what: _reason(f) for f in unknown})


def _reason(found: Finding) -> str:
    return ": ".join(filter(None, (found.what, found.why)))


def _gone(boxes: Sequence[tuple[Box, str]]) -> str:
    """Say where what is missing is; an empty box stands for what may follow there."""
    known = next((file for box, file in boxes if box.numel), None)
    if known is None:
        return f"it may go on in `{boxes[0][1]}`, which cannot be used"
    return f"a part of it is in `{known}`, which cannot be used"


def _torn(entry: TensorEntry) -> str | None:
    try:
        check_coverage(entry)
    except (CoverageError, UnsupportedError) as error:
        return error.why or error.what
    return None


def _spread(names: dict[str, str], couples: Iterable[tuple[str, str]], why: str) -> None:
    """Add what goes with what is missing, in either direction."""
    couples = list(couples)
    grown = True
    while grown:
        grown = False
        for one, other in (*couples, *((b, a) for a, b in couples)):
            if one in names and other not in names:
                names[other] = f"{why} `{one}`"
                grown = True


class _StoredItem(NamedTuple):
    name: str
    file: str
    offset: int
    nbytes: int


def _in_mixed_files(catalog: Catalog, wrong: Sequence[Finding]) -> dict[str, str]:
    """All that lies in files nothing of which can be trusted, and why.

    A file of another rank or another save holds some items of the right dtype and shape by
    chance, with other values. One item that cannot be read is a damaged item; several, or one that
    is sound but another than it should be, or one in a file of another length, are another file.
    """
    bad: dict[str, list[str]] = defaultdict(list)
    for finding in wrong:
        if finding.severity == "error" and finding.file and finding.tensor in catalog.tensors:
            bad[finding.file].append(finding.tensor or "")
    stored: dict[str, list[_StoredItem]] = defaultdict(list)
    for item in _items(catalog):
        if item.file in bad:
            stored[item.file].append(item)
    reasons: dict[str, str] = {}
    for file, items in stored.items():
        first, *others = bad[file]
        if (
            others
            or catalog.files.get(file) != max(item.offset + item.nbytes for item in items)
            or any(_sound(catalog.root, item) for item in items if item.name == first)
        ):
            more = f" and {len(others):,} more" if others else ""
            why = (
                "it lies in a file that is not the one that the metadata speaks of: "
                f"`{first}`{more} in it cannot be read or are something else"
            )
            reasons |= {item.name: why for item in items}
    return reasons


def _items(catalog: Catalog) -> Iterator[_StoredItem]:
    for entry in catalog.tensors.values():
        for extent in entry.extents:
            yield _StoredItem(entry.name, extent.file, extent.offset, extent.nbytes)
    for blob in catalog.blobs.values():
        if blob.file is not None:
            yield _StoredItem(blob.name, blob.file, blob.offset, blob.nbytes)


def _sound(root: str, item: _StoredItem) -> bool:
    """Return whether the item can be read, so that not its bytes are wrong but what it is."""
    try:
        with source_files(root) as files:
            read_archive(files, item.file, item.offset, item.nbytes)
    except CkptError:
        return False
    return True
