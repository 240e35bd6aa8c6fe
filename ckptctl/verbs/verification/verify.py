"""Verification of a checkpoint, with the verdict complete, damaged or unknown.

Level ``fast`` reads the index. Level ``headers`` also reads the header of each item. Level ``full``
also reads all bytes that have a checksum. Only ``nan=True`` imports torch. Nothing is changed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields, replace

from ckptctl import families, formats
from ckptctl.catalog import INCONSISTENT_INDEX, MANIFEST, Catalog, Finding
from ckptctl.conversion.items import add_replica_extents, read_item_headers
from ckptctl.conversion.sources import open_source
from ckptctl.errors import CkptError, UsageError, format_option, quote_names
from ckptctl.formats.shared.findings import UNUSABLE_ERRORS, finding_from_error
from ckptctl.installed import require_torch
from ckptctl.notes import Notes
from ckptctl.ranks.coordinator import (
    RankCollectives,
    SingleProcess,
    require_same_settings,
    run_on_all_ranks,
    run_on_rank_zero,
)
from ckptctl.storage.paths import raise_if_request_failed, redact_path, require_local
from ckptctl.storage.sources import require_same_file
from ckptctl.storage.threads import StartProgress, ignore_progress
from ckptctl.tree import TreePath
from ckptctl.verbs.verification import digest_lists
from ckptctl.verbs.verification.structure import (
    check_structure,
    get_checkpoint_folder,
    is_about_unreadable_tensor,
)
from ckptctl.verbs.verification.surroundings import check_surroundings
from ckptctl.verbs.verification.verify_options import VerifyOptions
from ckptctl.verbs.verification.verify_result import Verification, exclude_known_findings
from ckptctl.verdict import Scope, Verdict, decide_verdict, strip_structure_claim

OTHER_MANIFEST = f"{MANIFEST} describes other tensors"


@dataclass(slots=True)
class _VerificationState:
    """Results of the verification steps that have run so far."""

    path: TreePath
    format: str
    opened_path: TreePath  # of the folder, if a model in it was read
    catalog: Catalog | None = None
    findings: list[Finding] = field(default_factory=list)
    sibling_tensors: int = 0  # of the optimizer folders next to the model
    sibling_files: dict[str, int] = field(default_factory=dict)
    verified: dict[str, int] = field(default_factory=dict)
    verified_tensors: int = 0
    compared: bool | None = None
    bytes_read: int = 0
    scope: Scope = "structure"
    reference: str | None = None
    manifest: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether there are no findings except warnings."""
        return decide_verdict(self.findings) is Verdict.COMPLETE

    @property
    def listed_path(self) -> TreePath:
        """Path of the directory or single file that a checksum list describes."""
        return self.catalog.path if self.catalog else self.path


@dataclass(slots=True)
class IndexChecks:
    """Results of index checks, which checkpoints of a run with equal indexes share.

    Every index is read. Two checks depend only on its content and run once. They check whether
    chunks cover their tensors, and whether all tensors of the model type exist. Only results
    without findings are shared, since findings name the files of one checkpoint.

    Attributes:
        passed: Catalog of the last index that passed, or None.
        scope: Scope of the model check of that index.
        notes: Notes of the model check of that index.
    """

    passed: Catalog | None = None
    scope: Scope = "structure"
    notes: Notes = field(default_factory=Notes)

    def has_passed(self, catalog: Catalog) -> bool:
        """Return whether an index equal to that of *catalog*, except its location, has passed."""
        passed = self.passed
        # Values next to the tensors, such as the step, differ in each checkpoint.
        return (
            passed is not None
            and not catalog.blobs
            and passed
            == replace(
                catalog,
                root=passed.root,
                path=passed.path,
                save_id=passed.save_id,
                others=passed.others,
                assets=passed.assets if catalog.assets.keys() == passed.assets.keys() else {},
            )
        )

    def add_passed(self, catalog: Catalog, scope: Scope, notes: Notes) -> None:
        """Record that the index of *catalog* passed, and the results of its model check."""
        self.passed, self.scope, self.notes = catalog, scope, notes


def verify_checkpoint(
    path: str | TreePath,
    options: VerifyOptions | None = None,
    progress: StartProgress = ignore_progress,
    ranks: RankCollectives | None = None,
) -> Verification:
    """Verify the checkpoint at *path* and list all findings."""
    return verify_with_catalog(path, options or VerifyOptions(), progress, ranks)[0]


def verify_with_catalog(
    path: str | TreePath,
    options: VerifyOptions,
    progress: StartProgress = ignore_progress,
    ranks: RankCollectives | None = None,
    index_checks: IndexChecks | None = None,
) -> tuple[Verification, Catalog | None]:
    """Verify a checkpoint, and return the result and the catalog.

    The catalog contains only the readable entries, or is None if the index cannot be read.

    *index_checks* contains results of other checkpoints, verified with the same options.
    """
    start = time.monotonic()
    ranks = ranks or SingleProcess()
    with families.use_converter_file(options.converter):
        state = run_on_all_ranks(ranks, lambda: _begin_verification(path, options))
        catalog = state.catalog
        option_values = {
            f"option `{option.name}`": getattr(options, option.name) for option in fields(options)
        }
        files = catalog and dict(catalog.files)
        shared_settings = {
            "the path": state.path,
            **option_values,
            "the files of the checkpoint": files,
        }
        require_same_settings(ranks, shared_settings)
        passed = bool(index_checks and catalog and index_checks.has_passed(catalog))
        if catalog is not None:
            state.findings += check_structure(catalog, index_passed=passed)
            _verify_data(state, catalog, options, progress, ranks)
        has_read_data = options.level == "full" and state.is_complete

        def check_nearby_files() -> list[Finding]:
            return list(check_surroundings(state.path, catalog, values=has_read_data))

        state.findings += (
            ranks.broadcast(run_on_rank_zero(ranks, check_nearby_files))
            if has_read_data
            else check_nearby_files()
        )
        if options.model and catalog is not None and _is_index_sound(state, catalog):
            _check_model(state, catalog, options, ranks, index_checks, passed=passed)
        _verify_sibling_parts(state, options, progress, ranks)
        raise_if_request_failed(state.path)
        opened = catalog.opened if catalog else None
        run_on_all_ranks(ranks, lambda: require_same_file(opened))
        if options.manifest:
            _write_checksum_list(state, options.jobs, progress, ranks)
    verified = Verification(
        path=redact_path(path),
        format=state.format,
        level=options.level,
        tensors=state.sibling_tensors + (len(catalog.tensors) if catalog else 0),
        files={**(catalog.files if catalog else {}), **state.sibling_files},
        verified=state.verified,
        verified_tensors=state.verified_tensors if options.level == "full" else None,
        bytes_read=state.bytes_read,
        compared=state.compared,
        scope=state.scope,
        reference=state.reference,
        require_verified=options.require_verified,
        checksum_lists=_list_checksum_files(catalog) if catalog else (),
        nan=options.nan,
        findings=tuple(sorted(state.findings, key=lambda finding: finding.severity)),
        manifest=state.manifest,
        notes=tuple(state.notes),
        seconds=time.monotonic() - start,
    )
    return verified, catalog


def _verify_sibling_parts(
    state: _VerificationState,
    options: VerifyOptions,
    progress: StartProgress,
    ranks: RankCollectives,
) -> None:
    """Verify the optimizer folders next to the only model in a folder, and add the results."""
    parts = formats.list_sibling_parts(state.opened_path, state.listed_path)
    for part in parts:
        name = f"../{part.name}"
        try:
            result, _ = verify_with_catalog(
                part, replace(options, model=False, manifest=False), progress, ranks
            )
        except UsageError:
            raise
        except CkptError as error:
            finding = finding_from_error(error, part)
            state.findings.append(replace(finding, file=name))
            continue
        state.findings += [
            replace(finding, file=f"{name}/{finding.file}" if finding.file else name)
            for finding in result.findings
        ]
        state.sibling_tensors += result.tensors
        state.sibling_files |= {f"{name}/{file}": size for file, size in result.files.items()}
        state.verified |= {f"{name}/{file}": size for file, size in result.verified.items()}
        state.verified_tensors += result.verified_tensors or 0
        state.bytes_read += result.bytes_read
        state.compared = state.compared or result.compared
    if parts:
        state.notes.append(f"also verified: {quote_names([part.name for part in parts])}")


def _begin_verification(path: str | TreePath, options: VerifyOptions) -> _VerificationState:
    if options.manifest:
        require_local(
            path,
            f"{format_option('--manifest')} is not supported for URLs (it adds a file to the "
            "checkpoint)",
        )
    if options.nan:
        require_torch(
            format_option("--nan"),
            alternative=f"{format_option('--level full')} compares recorded checksums without "
            "torch",
        )
    state = _open_checkpoint(formats.to_existing_path(path), options)
    if options.manifest:
        digest_lists.require_no_checksum_list(
            digest_lists.get_checksum_list_path(state.listed_path)
        )
    return state


def _open_checkpoint(path: TreePath, options: VerifyOptions) -> _VerificationState:
    """Read the index. If a part of it cannot be read, add the error as a finding."""
    try:
        catalog = _read_catalog(path, options)
        return _VerificationState(path, catalog.format, path, catalog)
    except UNUSABLE_ERRORS as error:
        inner_path = (
            None
            if options.format or formats.sniff_formats(path)
            else formats.find_only_model_checkpoint(path)
        )
        real = inner_path or path
        name = options.format or formats.detect_format(real).name
        try:
            part = _read_catalog(path, options, partial=True)
        except CkptError:
            part = None
        if part is None or not part.findings:
            finding = finding_from_error(error, get_checkpoint_folder(real))
            return _VerificationState(real, name, path, findings=[finding])
        return _VerificationState(real, name, path, part, list(part.findings))


def _read_catalog(path: TreePath, options: VerifyOptions, *, partial: bool = False) -> Catalog:
    return open_source(path, options, partial=partial, replicas=options.level == "full")


def _verify_data(
    state: _VerificationState,
    catalog: Catalog,
    options: VerifyOptions,
    progress: StartProgress,
    ranks: RankCollectives,
) -> None:
    for note in catalog.notes:
        if note.startswith(OTHER_MANIFEST):
            message = "the manifest does not describe these tensors"
            state.findings.append(Finding(message, note, "warning", MANIFEST))
        elif note.startswith(INCONSISTENT_INDEX):
            why = note.removeprefix(f"{INCONSISTENT_INDEX}: ")
            state.findings.append(Finding(INCONSISTENT_INDEX, why, "warning", basis="index"))
        else:
            state.notes.append(note)
    full = options.level == "full"
    if options.level == "fast" and not options.nan:
        return
    catalog_with_replicas = add_replica_extents(catalog)
    located, resolve_findings = read_item_headers(catalog_with_replicas)
    state.findings += resolve_findings
    if full or options.nan:
        # Readers of data are slow to import.
        from ckptctl.conversion.replicas import find_differing_replicas, select_rank_replicas
        from ckptctl.verbs.verification.data import check_data

        findings, proof, state.bytes_read = check_data(
            catalog_with_replicas, located, full, options.nan, options.jobs, progress, ranks
        )
        own_differences = run_on_all_ranks(
            ranks, lambda: list(find_differing_replicas(select_rank_replicas(catalog, ranks)))
        )
        replica_findings = [
            finding for part in ranks.all_gather(own_differences) for finding in part
        ]
        if full:
            # Checksums neither cover missing elements, nor show which copy is correct.
            names_with_findings = {
                f.tensor for f in (*state.findings, *replica_findings) if f.severity != "warning"
            }
            sound = (
                entry for name, entry in located.tensors.items() if name not in names_with_findings
            )
            state.verified = {
                n: count for n, count in proof.count_bytes_by_file().items() if n in catalog.files
            }
            state.verified_tensors = proof.count_verified_tensors(sound)
            state.compared = proof.compared
        state.findings += [*exclude_known_findings(state.findings, findings), *replica_findings]


def _check_model(
    state: _VerificationState,
    catalog: Catalog,
    options: VerifyOptions,
    ranks: RankCollectives,
    index_checks: IndexChecks | None,
    *,
    passed: bool,
) -> None:
    """Compare the tensors with the model type, or reuse the result of an equal index."""
    if index_checks and passed:
        state.scope, texts = index_checks.scope, index_checks.notes.get_texts()
        state.notes += texts if state.is_complete else strip_structure_claim(texts)
        return
    # Model types and their facts are slow to import.
    from ckptctl.conversion.recognition.model import (
        DEFAULT_REFERENCE,
        NO_REFERENCE,
        ModelRequest,
    )
    from ckptctl.verbs.verification.model_check import (
        ModelCheck,
        is_determined_by_index,
        recognize_and_check_model,
    )

    reference = options.reference or DEFAULT_REFERENCE
    request = ModelRequest(options.model_type, reference=reference)

    def check_model() -> tuple[ModelCheck, Notes]:
        notes = Notes()
        return recognize_and_check_model(catalog, request, notes), notes

    # Only one rank builds the model of a reference, which takes seconds.
    checked, notes = (
        check_model()
        if reference == NO_REFERENCE
        else ranks.broadcast(run_on_rank_zero(ranks, check_model))
    )
    state.findings += checked.evidence
    state.scope, state.reference = checked.scope, checked.reference
    texts = notes.get_texts()
    state.notes += texts if state.is_complete else strip_structure_claim(texts)
    if index_checks and not state.findings and is_determined_by_index(catalog, notes):
        index_checks.add_passed(catalog, state.scope, notes)


def _is_index_sound(state: _VerificationState, catalog: Catalog) -> bool:
    """Return whether no finding shows or suggests damage, apart from unreadable tensors."""
    relevant = (
        finding for finding in state.findings if not is_about_unreadable_tensor(finding, catalog)
    )
    return decide_verdict(relevant) is Verdict.COMPLETE


def _list_checksum_files(catalog: Catalog) -> tuple[str, ...]:
    """List the existing checksum lists with which level ``full`` compares files."""
    root = catalog.root
    uses_manifest = not catalog.path.is_file()
    uses_manifest = uses_manifest and not any(
        note.startswith(OTHER_MANIFEST) for note in catalog.notes
    )
    names = [
        *digest_lists.get_list_algorithms(catalog.path),
        *([MANIFEST] if uses_manifest else []),
    ]
    return tuple(name for name in names if (root / name).is_file())


def _write_checksum_list(
    state: _VerificationState, jobs: int | None, progress: StartProgress, ranks: RankCollectives
) -> None:
    """Write the SHA-256 sums of the files if the checkpoint is complete."""
    # Writers are slow to import.
    from ckptctl.verbs.verification.checksum_writer import (
        find_unlistable_files,
        write_checksum_list,
    )

    path = state.listed_path
    state.findings += find_unlistable_files(path)
    if not all(ranks.all_gather(state.is_complete)):
        name = digest_lists.get_checksum_list_path(path).name
        state.notes.append(f"{name} was not written because the checkpoint is not complete")
    else:
        state.manifest = write_checksum_list(path, jobs, progress, ranks)
