"""Prove that a checkpoint is whole, or say what is wrong with it and where.

Three levels: ``fast`` reads the index; ``headers`` also what each item says of itself; ``full``
also every byte that a checksum covers. Only ``nan=True`` imports torch. Nothing is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ckptctl import dtypes, formats
from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.errors import (
    CkptError,
    DamagedError,
    FormatError,
    SourceNotFoundError,
    UsageError,
    listed,
)
from ckptctl.formats.checksums import MANIFEST
from ckptctl.ops import digest_lists
from ckptctl.ops.inspect import Watch, unwatched
from ckptctl.ops.verification import LEVELS, Finding, Level, Verification, of_error
from ckptctl.ops.verify_checksums import check, recorded, whole_files
from ckptctl.ops.verify_partial import partial
from ckptctl.ops.verify_structure import Lost, root_of, structure
from ckptctl.ops.verify_surroundings import surroundings
from ckptctl.planner.plan import FileIdentity
from ckptctl.storage.files import SourceFiles

UNUSED = f"{MANIFEST} describes other tensors"


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What to verify, and how much of it.

    Attributes:
        format: The format, where it cannot be detected.
        level: ``fast``, ``headers`` or ``full``.
        nan: Search floating values for NaN and Inf.
        manifest: Write the SHA-256 sums of all files when nothing is wrong.
        model_type: The family, for shards that only a family can join.
        weights: See :class:`~ckptctl.formats.base.ReadOptions`.
        tag: Likewise.
        jobs: Threads; None: one per core, at most four.
    """

    format: str | None = None
    level: Level = "headers"
    nan: bool = False
    manifest: bool = False
    model_type: str | None = None
    weights: Literal["master", "module"] | None = None
    tag: str | None = None
    jobs: int | None = None


@dataclass(slots=True)
class _State:
    """What is known so far."""

    path: Path
    format: str
    catalog: Catalog | None = None
    findings: list[Finding] = field(default_factory=list)
    lost: Lost = field(default_factory=dict)
    proven: dict[str, int] = field(default_factory=dict)
    manifest: str | None = None
    notes: list[str] = field(default_factory=list)


def verify(
    path: str | Path, options: VerifyOptions | None = None, progress: Watch = unwatched
) -> Verification:
    """Say whether the checkpoint at *path* is whole; list everything that is wrong with it.

    Args:
        path: A directory or a file.
        options: What to verify; None: everything but the data.
        progress: Called with the bytes that are going to be read.

    Raises:
        UsageError: Options contradict each other.
        SourceNotFoundError: There is no such path.
        FormatError: It is not a checkpoint that ckptctl reads.
        RefusedError: There is a list of SHA-256 sums already, and one was asked for.
    """
    options = options or VerifyOptions()
    start = time.monotonic()
    _require_sense(options)
    state = _opened(formats.existing(path), options)
    if options.manifest:
        digest_lists.require_room(digest_lists.target_of(_listed_path(state)))
    if state.catalog is not None:
        _verify(state, state.catalog, options, progress)
    state.findings += surroundings(state.path, state.catalog)
    return _result(str(path), state, options, time.monotonic() - start)


def _require_sense(options: VerifyOptions) -> None:
    if options.level not in LEVELS:
        raise UsageError(f"unknown level `{options.level}`", why=f"there are {listed(LEVELS)}")
    if options.manifest and options.level != "full":
        raise UsageError("--manifest goes with --level full", hint="add `--level full`")


def _opened(path: Path, options: VerifyOptions) -> _State:
    """Read the index; what a reader refuses becomes findings, and what is left is read."""
    try:
        catalog = formats.open_checkpoint(
            path, options.format, options.model_type, weights=options.weights, tag=options.tag
        )
        return _State(path, catalog.format, catalog)
    except (DamagedError, SourceNotFoundError) as error:
        inside = None if options.format or formats.sniff(path) else formats.only_inside(path)
        real = inside or path
        name = options.format or formats.detect(real).name
        found = partial(real, name)
        if found is None or not found.findings:
            return _State(real, name, findings=[of_error(error, root_of(real))])
        return _State(real, name, found.catalog, found.findings, found.lost)


def _verify(state: _State, catalog: Catalog, options: VerifyOptions, progress: Watch) -> None:
    state.findings += structure(catalog, state.lost)
    state.findings += [
        Finding("the manifest is not of these tensors", note, "warning", MANIFEST)
        for note in catalog.notes
        if note.startswith(UNUSED)
    ]
    state.notes += [note for note in catalog.notes if not note.startswith(UNUSED)]
    if options.level == "fast" and not options.nan:
        return
    resolved = _resolved(state, catalog)
    if options.level == "full" or options.nan:
        _read(state, catalog, resolved, options, progress)


def _resolved(state: _State, catalog: Catalog) -> Catalog:
    """Return *catalog* with the headers of all items read, less the items that are bad."""
    pending = [catalog]
    found: list[Catalog] = []
    while pending:
        part = pending.pop()
        try:
            found.append(formats.resolve(part))
        except CkptError as error:
            names = [*part.tensors, *part.blobs]
            if len(names) == 1:
                state.findings.append(_refused(error, part, names[0]))
            else:
                half = len(names) // 2
                pending += [_taken(part, names[half:]), _taken(part, names[:half])]
    tensors = {name: entry for part in found for name, entry in part.tensors.items()}
    return replace(found[0], tensors=tensors) if found else _taken(catalog, [])


def _refused(error: CkptError, part: Catalog, name: str) -> Finding:
    """Return what is wrong with one item; a value that is merely not understood is no damage."""
    found = of_error(error, Path(part.root), name)
    strange = isinstance(error, FormatError) and name in part.blobs
    return replace(found, severity="warning") if strange else found


def _taken(catalog: Catalog, names: list[str]) -> Catalog:
    kept = set(names)
    return replace(
        catalog,
        tensors={name: entry for name, entry in catalog.tensors.items() if name in kept},
        blobs={name: blob for name, blob in catalog.blobs.items() if name in kept},
    )


def _read(
    state: _State, catalog: Catalog, resolved: Catalog, options: VerifyOptions, progress: Watch
) -> None:
    """Read data: for checksums, for lists of digests, for NaN, and for a list to be written."""
    with SourceFiles(catalog.root) as files:
        before = _identities(files, catalog)
        full = options.level == "full"
        ranges, bad = recorded(files, catalog, resolved) if full else ([], [])
        lines, odd = digest_lists.listed_digests(files) if full else ([], [])
        state.findings += [*bad, *odd]
        floating = [entry for entry in resolved.tensors.values() if _floats(entry)]
        floating = floating if options.nan else []
        total = sum(one.nbytes for one in ranges) + sum(entry.nbytes for entry in floating)
        total += sum(_size(files, line.file) for line in lines)
        hashed = SourceFiles(root_of(_listed_path(state)))
        names = digest_lists.members(_listed_path(state)) if options.manifest else []
        state.findings += _unreadable(hashed, names)
        with hashed, progress(total + sum(_size(hashed, name) for name in names)) as advance:
            different, state.proven = check(files, ranges, options.jobs, advance)
            wrong, right = digest_lists.check_lists(files, lines, options.jobs, advance)
            state.proven = whole_files(state.proven, right, catalog.files)
            state.findings += [*different, *wrong, *_nonfinite(files, floating, advance)]
            after = _identities(files, catalog)
            state.findings += [
                Finding("a file changed while it was being read", file=name)
                for name, identity in before.items()
                if after.get(name) != identity
            ]
            if options.manifest:
                _write_list(state, hashed, names, options, advance)


def _identities(files: SourceFiles, catalog: Catalog) -> dict[str, FileIdentity]:
    found = {}
    for name in catalog.files:
        try:
            with SourceFiles(files.root) as fresh:
                found[name] = fresh.identity(name)
        except CkptError:
            continue
    return found


def _size(files: SourceFiles, name: str) -> int:
    try:
        return files.size(name)
    except CkptError:
        return 0


def _unreadable(files: SourceFiles, names: list[str]) -> Iterator[Finding]:
    """Yield the files that no list could name: links that lead elsewhere, sockets and the like."""
    for name in names:
        try:
            files.size(name)
        except CkptError as error:
            yield of_error(error, files.root)


def _floats(entry: TensorEntry) -> bool:
    known = dtypes.BY_NAME.get(entry.dtype)
    floating = (known is not None and known.floating) or entry.dtype.startswith("complex")
    return entry.alias_of is None and floating


def _nonfinite(
    files: SourceFiles, entries: list[TensorEntry], advance: Callable[[int], None] | None
) -> Iterator[Finding]:
    from ckptctl.storage.statistics import nonfinite

    for entry in entries:
        try:
            counts = nonfinite(files, entry)
        except CkptError as error:
            yield of_error(error, files.root, entry.name)
            continue
        if counts and any(counts):
            why = f"{counts[0]:,} NaN and {counts[1]:,} Inf among {entry.numel:,} values"
            home = entry.extents[0].file if len(entry.extents) == 1 else None
            yield Finding("there are values that are not finite", why, "error", home, entry.name)
        if advance:
            advance(entry.nbytes)


def _listed_path(state: _State) -> Path:
    """Return what a list of digests is about: the directory, or the one file."""
    return Path(state.catalog.path) if state.catalog else state.path


def _write_list(
    state: _State,
    files: SourceFiles,
    names: list[str],
    options: VerifyOptions,
    advance: Callable[[int], None] | None,
) -> None:
    target = digest_lists.target_of(_listed_path(state))
    if any(found.severity == "error" for found in state.findings):
        state.notes.append(f"{target.name} was not written: the checkpoint is not whole")
        return
    digest_lists.write_list(files, target, names, options.jobs, advance)
    state.manifest = str(target)


def _result(path: str, state: _State, options: VerifyOptions, seconds: float) -> Verification:
    catalog = state.catalog
    return Verification(
        path=path,
        format=state.format,
        level=options.level,
        tensors=len(catalog.tensors) if catalog else 0,
        files=catalog.files if catalog else {},
        proven=state.proven,
        nan=options.nan,
        findings=tuple(sorted(state.findings, key=lambda found: found.severity)),
        manifest=state.manifest,
        notes=tuple(state.notes),
        seconds=seconds,
    )
