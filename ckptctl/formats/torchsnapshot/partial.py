"""What is left of a torchsnapshot directory some of whose files cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptctl.catalog import Box, Finding
from ckptctl.errors import CkptError, DamagedError, SourceNotFoundError
from ckptctl.formats.shared.findings import of_error
from ckptctl.formats.shared.structure import join
from ckptctl.formats.shared.tiled_files import Range, require_tiled
from ckptctl.formats.torchsnapshot.manifest import METADATA, Entry, Stored, located, shards_of
from ckptctl.storage.files import SourceFiles

SHARDED = ("ShardedTensor", "ChunkedTensor", "DTensor")


@dataclass(slots=True)
class Lost:
    """What cannot be read.

    Attributes:
        unfit: Files that cannot be used, and what is wrong with them.
        findings: The leaves that are lost with them.
        boxes: For each tensor of which something is left the boxes that are not, and their files.
    """

    unfit: Mapping[str, Finding]
    findings: list[Finding] = field(default_factory=list)
    boxes: dict[str, tuple[tuple[Box, str], ...]] = field(default_factory=dict)

    def rest_of(self, entry: Entry) -> Entry | None:
        """Return what is left of *entry*; None: nothing."""
        if entry.fields["type"] in SHARDED:
            return self._shards(entry)
        file = next((s.file for s in _stored(entry) if s.file in self.unfit), None)
        if file is None:
            return entry
        self._miss(entry, file)
        return None

    def unread(self, entry: Entry, error: CkptError) -> None:
        """Note that *error* was raised about *entry*, of which nothing is left."""
        self.findings.append(of_error(error, tensor=join(entry.path)))

    def _miss(self, entry: Entry, file: str) -> None:
        """Note that *entry* lies in a file that cannot be used."""
        what = "a value is missing" if entry.fields["type"] == "object" else "a tensor is missing"
        why = f"it lies in `{file}`, which cannot be used"
        self.findings.append(Finding(what, why, "error", file, join(entry.path)))

    def _shards(self, entry: Entry) -> Entry | None:
        _, shape, shards = shards_of(entry)
        gone = [(box, stored.file) for box, stored in shards if stored.file in self.unfit]
        if not gone:
            return entry
        if len(gone) == len(shards):
            self._miss(entry, gone[0][1])
            return None
        self.boxes[join(entry.path)] = tuple(gone)
        key = "shards" if "shards" in entry.fields else "chunks"
        listed = entry.fields[key]
        assert isinstance(listed, list)
        kept = [
            one
            for one, (_, stored) in zip(listed, shards, strict=True)
            if stored.file not in self.unfit
        ]
        return replace_fields(entry, {key: kept, "shape": list(shape)})


def replace_fields(entry: Entry, fields: Mapping[str, object]) -> Entry:
    """Return *entry* with other *fields*."""
    return entry._replace(fields={**entry.fields, **fields})


def unfit(files: SourceFiles, entries: Sequence[Entry], where: str) -> dict[str, Finding]:
    """Return the files that are missing, or not what the manifest says, and why.

    Args:
        files: The snapshot's files.
        entries: What the manifest lists.
        where: Path of the manifest, for errors.
    """
    sizes: dict[str, int] = {}
    found: dict[str, Finding] = {}
    ranges: dict[str, list[Range]] = {}
    for entry in entries:
        for stored in _stored(entry):
            file = stored.file
            try:
                size = sizes[file] = sizes[file] if file in sizes else files.size(file)
            except SourceNotFoundError:
                found[file] = Finding("a data file is missing", f"{METADATA} names it", file=file)
                continue
            except CkptError as error:
                why = f"{METADATA} names it"
                found[file] = replace(of_error(error, files.root, file=file), why=why)
                continue
            first, last = stored.span or (0, size)
            if last > size:
                why = f"{last:,} bytes are needed, the file has {size:,}"
                found[file] = Finding("a data file is truncated", why, file=file)
            elif stored.serializer == "buffer_protocol":
                one = Range(file, first, last - first, join(entry.path))
                ranges.setdefault(file, []).append(one)
    for file, places in ranges.items():
        try:
            require_tiled(places, {file: sizes[file]}, where)
        except DamagedError as error:
            found.setdefault(file, of_error(error, files.root, file=file))
    return found


def _stored(entry: Entry) -> Iterator[Stored]:
    kind = entry.fields["type"]
    if kind in SHARDED:
        yield from (stored for _, stored in shards_of(entry)[2])
    elif kind in ("Tensor", "object"):
        yield located(entry.fields)
