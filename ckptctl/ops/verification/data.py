"""Reading the data of a checkpoint: checksums, lists of digests, NaN; and writing such a list."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptctl import dtypes
from ckptctl.catalog import Catalog, Finding, TensorEntry
from ckptctl.errors import CkptError
from ckptctl.file_identity import FileIdentity
from ckptctl.formats.shared.findings import of_error
from ckptctl.ops.ranks import sharing
from ckptctl.ops.ranks.coordinator import Coordinator, require_same, together
from ckptctl.ops.ranks.sharing import portion
from ckptctl.ops.verification import digest_lists, surroundings
from ckptctl.ops.verification.checksums import (
    ReadBlock,
    Recorded,
    blocks,
    compared,
    crcs,
    proven,
    recorded,
)
from ckptctl.ops.watch import Watch, one_of_many
from ckptctl.storage.compare import Readable
from ckptctl.storage.computed import open_reader
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.threads import Advance


@dataclass(slots=True)
class _Todo:
    """What is to be read, the same on all ranks; *findings* are about the checksums themselves."""

    ranges: Sequence[Recorded]
    lines: Sequence[digest_lists.Listed]
    floating: Sequence[TensorEntry]
    findings: list[Finding] = field(default_factory=list)


def read_data(
    catalog: Catalog,
    resolved: Catalog,
    full: bool,
    nan: bool,
    jobs: int | None,
    progress: Watch,
    ranks: Coordinator,
) -> tuple[list[Finding], dict[str, int]]:
    """Read the data and compare it with all checksums, or search it for NaN and Inf.

    All ranks return the same: findings, and the bytes of each data file that a checksum proves. In
    *resolved*, the bytes of every sound item are located.
    """
    with source_files(catalog.root) as files, open_reader(resolved) as reader:
        before = _identities(catalog)
        todo = together(ranks, lambda: _todo(files, catalog, resolved, full, nan))
        _require_same(todo, ranks)
        some, mine = _portion(files, todo, ranks)
        read = together(ranks, lambda: _read(files, reader, some, mine, jobs, progress))
        parts = ranks.all_gather(read)
    different, bad = compared(
        files.root, todo.ranges, (one for sums, _, _ in parts for one in sums)
    )
    found = [*different, *(finding for _, findings, _ in parts for finding in findings)]
    listed = {name: catalog.files[name] for _, _, r in parts for name in r if name in catalog.files}
    after = _identities(catalog, anew=True)
    changed = [name for name, identity in before.items() if after.get(name) != identity]
    found = [finding for finding in found if finding.file not in changed]
    found += [
        Finding("a file changed meanwhile", severity="unknown", file=name) for name in changed
    ]
    wrong = set(bad)
    proved = proven([one for one in todo.ranges if one not in wrong])
    return [*todo.findings, *found], proved | listed


def _require_same(todo: _Todo, ranks: Coordinator) -> None:
    if ranks.world > 1:
        seen = (todo.ranges, todo.lines, [entry.name for entry in todo.floating])
        require_same(ranks, {"the checksums in the checkpoint": sharing.summary(seen)})


def _todo(files: SourceFiles, catalog: Catalog, resolved: Catalog, full: bool, nan: bool) -> _Todo:
    floating = [entry for entry in resolved.tensors.values() if nan and _floats(entry)]
    if not full:
        return _Todo([], [], floating)
    ranges, bad = recorded(files, catalog, resolved)
    lines, odd = digest_lists.listed_digests(files)
    hub, strange = surroundings.downloaded(files, catalog.files)
    return _Todo(ranges, [*lines, *hub], floating, [*bad, *odd, *strange])


def _portion(
    files: SourceFiles, todo: _Todo, ranks: Coordinator
) -> tuple[Sequence[ReadBlock], _Todo]:
    """Return what this rank reads: blocks of the ranges, and whole files and tensors.

    A file that several lists name stays with one rank.
    """
    listed = list(dict.fromkeys(line.file for line in todo.lines))
    mine = set(portion(ranks, listed, lambda name: _sizes(files, [name])))
    return portion(ranks, blocks(todo.ranges), lambda one: one.nbytes), _Todo(
        todo.ranges,
        [line for line in todo.lines if line.file in mine],
        portion(ranks, todo.floating, lambda entry: entry.nbytes),
    )


def _read(
    files: SourceFiles,
    reader: Readable,
    some: Sequence[ReadBlock],
    todo: _Todo,
    jobs: int | None,
    progress: Watch,
) -> tuple[list[tuple[ReadBlock, int | CkptError]], list[Finding], list[str]]:
    """Return the checksums of blocks, what else is wrong, and the files whose digest is right."""
    total = sum(one.nbytes for one in some) + sum(entry.nbytes for entry in todo.floating)
    with progress(total + _sizes(files, [line.file for line in todo.lines])) as advance:
        sums = crcs(files, todo.ranges, some, jobs, advance)
        wrong, right = digest_lists.check_lists(files, todo.lines, jobs, advance)
        strange = _nonfinite(reader, files.root, todo.floating, advance)
        return sums, [*wrong, *strange], right


def _identities(catalog: Catalog, *, anew: bool = False) -> dict[str, FileIdentity]:
    """Return what the names stand for now, whatever was open before."""
    found = {}
    with source_files(catalog.root) as files:
        if anew:
            files.forget()
        for name in catalog.files:
            try:
                found[name] = files.identity(name)
            except CkptError:
                continue
    return found


def _sizes(files: SourceFiles, names: Collection[str]) -> int:
    total = 0
    for name in names:
        try:
            total += files.size(name)
        except CkptError:
            continue
    return total


def _floats(entry: TensorEntry) -> bool:
    known = dtypes.BY_NAME.get(entry.dtype)
    floating = (known is not None and known.floating) or entry.dtype.startswith("complex")
    return entry.alias_of is None and floating


def _nonfinite(
    files: Readable, root: Path, entries: Sequence[TensorEntry], advance: Advance | None
) -> Iterator[Finding]:
    from ckptctl.storage.statistics import nonfinite

    for entry in entries:
        try:
            with one_of_many(advance, entry.nbytes) as seen:
                counts = nonfinite(files, entry, seen=seen)
        except CkptError as error:
            yield of_error(error, root, entry.name)
            continue
        if counts and any(counts):
            why = f"{counts[0]:,} NaN and {counts[1]:,} Inf among {entry.numel:,} values"
            home = entry.extents[0].file if len(entry.extents) == 1 else None
            yield Finding("there are values that are not finite", why, "unknown", home, entry.name)
