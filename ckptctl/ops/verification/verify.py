"""Prove that a checkpoint is whole, or say what is torn or not understood, and where.

Three levels: ``fast`` reads the index; ``headers`` also what each item says of itself; ``full``
also every byte that a checksum covers. Only ``nan=True`` imports torch. Nothing is changed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from pathlib import Path

from ckptctl import families, formats
from ckptctl.catalog import Catalog, Finding
from ckptctl.errors import CkptError, UsageError
from ckptctl.formats.checksums import MANIFEST
from ckptctl.formats.shared.findings import UNUSABLE
from ckptctl.ops.ranks.coordinator import Alone, Coordinator, require_same, together
from ckptctl.ops.sources import open_source
from ckptctl.ops.verification.options import VerifyOptions
from ckptctl.ops.verification.result import Verification, of_error, unsaid
from ckptctl.ops.verification.structure import root_of, structure
from ckptctl.ops.verification.surroundings import surroundings
from ckptctl.ops.watch import Watch, unwatched
from ckptctl.storage.paths import path_at, require_answers, require_local, shown
from ckptctl.storage.sources import require_unreplaced

UNUSED = f"{MANIFEST} describes other tensors"


@dataclass(slots=True)
class _Progress:
    """What is known so far."""

    path: Path
    format: str
    catalog: Catalog | None = None
    findings: list[Finding] = field(default_factory=list)
    proven: dict[str, int] = field(default_factory=dict)
    manifest: str | None = None
    notes: list[str] = field(default_factory=list)


def verify(
    path: str | Path,
    options: VerifyOptions | None = None,
    progress: Watch = unwatched,
    ranks: Coordinator | None = None,
) -> Verification:
    """Say whether the checkpoint at *path* is whole; list everything that is wrong with it."""
    return examine(path, options or VerifyOptions(), progress, ranks)[0]


def examine(
    path: str | Path,
    options: VerifyOptions,
    progress: Watch = unwatched,
    ranks: Coordinator | None = None,
) -> tuple[Verification, Catalog | None]:
    """Verify as :func:`verify` does, and return also what could be read of the index.

    Args:
        path: A directory or a file.
        options: What to verify.
        progress: Called with the bytes that are going to be read.
        ranks: Those that share the reading of the data; None: this process alone.

    Returns:
        The result, and the catalog, of a checkpoint that is not whole with what is left of it;
        None: nothing of the index could be read.

    Raises:
        StorageError: What is behind a URL did not answer.
        CkptError: See :func:`verify`.
    """
    with families.using(options.converter):
        return _examine(path, options, progress, ranks or Alone())


def _examine(
    path: str | Path, options: VerifyOptions, progress: Watch, ranks: Coordinator
) -> tuple[Verification, Catalog | None]:
    start = time.monotonic()
    state = together(ranks, lambda: _begun(path, options))
    _require_same(state, options, ranks)
    if state.catalog is not None:
        _verify(state, state.catalog, options, progress, ranks)
    state.findings += surroundings(state.path, state.catalog)
    if options.model and state.catalog is not None and _whole(state):
        from ckptctl.ops.recognition.lacking import model_findings

        state.findings += model_findings(state.catalog, options.model_type)
    require_answers(state.path)
    opened = state.catalog.opened if state.catalog else None
    together(ranks, lambda: require_unreplaced(opened))
    if options.manifest:
        _add_list(state, options.jobs, progress, ranks)
    return _result(shown(path), state, options, time.monotonic() - start), state.catalog


def _begun(path: str | Path, options: VerifyOptions) -> _Progress:
    _require_sense(options)
    if options.manifest:
        require_local(path, "--manifest adds a file, which nothing does behind a URL")
    state = _opened(formats.existing(path), options)
    if options.manifest:
        from ckptctl.ops.verification import digest_lists

        digest_lists.require_room(digest_lists.target_of(_listed_path(state)))
    return state


def _require_same(state: _Progress, options: VerifyOptions, ranks: Coordinator) -> None:
    """Prove that all ranks were asked for the same, of the same checkpoint."""
    asked = {f"option `{one.name}`": getattr(options, one.name) for one in fields(options)}
    files = state.catalog and dict(state.catalog.files)
    require_same(ranks, {"the path": state.path, **asked, "the files of the checkpoint": files})


def _require_sense(options: VerifyOptions) -> None:
    if options.manifest and options.level != "full":
        raise UsageError("--manifest goes with --level full", hint="add `--level full`")


def _opened(path: Path, options: VerifyOptions) -> _Progress:
    """Read the index; what a reader refuses becomes findings, and what is left is read."""
    try:
        catalog = _read(path, options)
        return _Progress(path, catalog.format, catalog)
    except UNUSABLE as error:
        inside = None if options.format or formats.sniff(path) else formats.only_inside(path)
        real = inside or path
        name = options.format or formats.detect(real).name
        try:
            part = _read(path, options, partial=True)
        except CkptError:
            part = None
        if part is None or not part.findings:
            return _Progress(real, name, findings=[of_error(error, root_of(real))])
        return _Progress(real, name, part, list(part.findings))


def _read(path: Path, options: VerifyOptions, *, partial: bool = False) -> Catalog:
    return open_source(path, options, partial=partial, replicas=options.level == "full")


def _verify(
    state: _Progress, catalog: Catalog, options: VerifyOptions, progress: Watch, ranks: Coordinator
) -> None:
    state.findings += structure(catalog, catalog.lost)
    state.findings += [
        Finding("the manifest is not of these tensors", note, "warning", MANIFEST)
        for note in catalog.notes
        if note.startswith(UNUSED)
    ]
    state.notes += [note for note in catalog.notes if not note.startswith(UNUSED)]
    if options.level == "fast" and not options.nan:
        return
    _verify_items(state, catalog, options, progress, ranks)


def _verify_items(
    state: _Progress, catalog: Catalog, options: VerifyOptions, progress: Watch, ranks: Coordinator
) -> None:
    """Add what the items say of themselves, and what reading their data says."""
    from ckptctl.ops.verification.data import read_data
    from ckptctl.ops.verification.items import differing, portion_of, resolved, with_copies

    everything = with_copies(catalog)
    known, wrong = resolved(everything)
    state.findings += wrong
    full = options.level == "full"
    if full or options.nan:
        data = read_data(everything, known, full, options.nan, options.jobs, progress, ranks)
        state.findings += unsaid(state.findings, data.findings)
        mine = together(ranks, lambda: list(differing(portion_of(catalog, ranks))))
        state.findings += [found for part in ranks.all_gather(mine) for found in part]
        state.proven = data.proven


def _add_list(state: _Progress, jobs: int | None, progress: Watch, ranks: Coordinator) -> None:
    """Write the SHA-256 sums if nothing is wrong."""
    from ckptctl.ops.verification import digest_lists
    from ckptctl.ops.verification.data import listable, write_list

    path = _listed_path(state)
    state.findings += listable(path)
    if not all(ranks.all_gather(_whole(state))):
        name = digest_lists.target_of(path).name
        state.notes.append(f"{name} was not written: the checkpoint is not whole")
    else:
        state.manifest = write_list(path, jobs, progress, ranks)


def _whole(state: _Progress) -> bool:
    return all(found.severity == "warning" for found in state.findings)


def _listed_path(state: _Progress) -> Path:
    """Return what a list of digests is about: the directory, or the one file."""
    return path_at(state.catalog.path) if state.catalog else state.path


def _result(path: str, state: _Progress, options: VerifyOptions, seconds: float) -> Verification:
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
