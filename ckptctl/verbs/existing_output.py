"""Evidence that an existing checkpoint is the output of a planned conversion.

All of the following must hold, from data read in this run:

* The manifest of the output equals the planned one: the digest of the plan, the name of the source,
  and the position of every tensor. Equal digests mean equal options and an equal source index.
* Every planned file has its planned size. Files without tensors, such as ``config.json`` and
  tokenizers, equal the planned bytes.
* ``verify --level full`` finds that all tensors match the checksums of the manifest.
* The source did not change after the output was written, according to the times of its files. If
  the log of the run's conversions recorded the identities of the files, they must be the same.

The log alone never shows that an output exists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from ckptctl.catalog import MANIFEST
from ckptctl.conversion.plan import ConversionPlan
from ckptctl.errors import CkptError, SourceNotFoundError
from ckptctl.file_identity import FileIdentity
from ckptctl.planner.plan import OutputFile
from ckptctl.remote.hub_branches import read_commit_time_ns
from ckptctl.storage.destinations import is_empty_folder
from ckptctl.storage.files import source_files
from ckptctl.storage.json_reader import parse_json, read_json
from ckptctl.storage.paths import resolve_source_path
from ckptctl.storage.threads import StartProgress
from ckptctl.storage.urls import is_hub_repository
from ckptctl.tree import TreePath, UrlPath
from ckptctl.units import format_rfc3339
from ckptctl.verbs.verification.verify import verify_checkpoint
from ckptctl.verbs.verification.verify_options import VerifyOptions

CHECKSUM_FIELD, VERSION_FIELD = "crc32", "ckptctl"
"""Fields of a manifest that are not planned, or do not determine the output."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Reason why an existing output is not known to be the output of a conversion."""

    why: str


def find_existing_output(target: TreePath) -> TreePath | None:
    """Return the path to read the output at *target* from, or None if there is none.

    At a URL, only a manifest shows that there is an output. The conversion itself refuses to
    replace other files.
    """
    if not isinstance(target, UrlPath):
        is_free = not os.path.lexists(target) or is_empty_folder(Path(target))
        return None if is_free else target
    target.tree.forget_url(target.url)
    try:
        resolved = resolve_source_path(target)
        folders = (resolved, *(item for item in resolved.iterdir() if item.is_dir()))
        return resolved if any((folder / MANIFEST).is_file() for folder in folders) else None
    except (SourceNotFoundError, FileNotFoundError):
        return None


def find_mismatch(
    plan: ConversionPlan,
    existing: TreePath,
    recorded_source: str | None,
    progress: StartProgress,
) -> Mismatch | None:
    """Compare the output at *existing* with *plan*, and return the first mismatch, if any.

    Args:
        plan: Plan of the conversion, whose target may be another path.
        existing: Path or URL of the output.
        recorded_source: Fingerprint of the source that the log of the run's conversions recorded,
            or None if it has none.
        progress: Starts the progress display of the verification.
    """
    try:
        if plan.plan.single_file or not plan.options.checksum:
            return Mismatch("an output without a manifest cannot be compared with the plan")
        mismatches = (
            _find_manifest_mismatch(plan, existing),
            _find_source_change(plan, existing, recorded_source),
            _find_file_mismatch(plan, existing),
        )
        return next(filter(None, mismatches), None) or _find_damage(plan, existing, progress)
    except (CkptError, OSError) as error:
        return Mismatch(f"it cannot be read: {error}")


def fingerprint_source(plan: ConversionPlan) -> str:
    """Return a hash of the identities of all source files that *plan* reads."""
    import hashlib

    identities = sorted(
        (name, identity.size, identity.mtime_ns, identity.ctime_ns, identity.inode)
        for name, identity in _iterate_identities(plan)
    )
    return hashlib.sha256(repr(identities).encode()).hexdigest()


def _iterate_identities(plan: ConversionPlan) -> Iterator[tuple[str, FileIdentity]]:
    yield from plan.plan.sources.items()
    yield from ((name, identity) for (_, name), identity in plan.plan.inputs.items())


def _find_manifest_mismatch(plan: ConversionPlan, existing: TreePath) -> Mismatch | None:
    file = _get_manifest_file(plan)
    if not (existing / file.path).is_file():
        return Mismatch(f"it has no `{file.path}`, so another program may have written it")
    with source_files(existing) as files:
        recorded = read_json(files, file.path)
    planned = parse_json(_build_content(plan, file), where=MANIFEST)
    if _strip_unplanned(recorded) == _strip_unplanned(planned):
        return None
    source = recorded.get("source") if isinstance(recorded, dict) else None
    name = source.get("name") if isinstance(source, dict) else None
    if isinstance(planned, dict) and name != planned["source"]["name"]:
        return Mismatch(f"its manifest names another source, `{name}`")
    return Mismatch("its manifest records another conversion (other options, or another source)")


def _strip_unplanned(manifest: object) -> object:
    """Return *manifest* without the version of ckptctl and the checksums."""
    if isinstance(manifest, list):
        return [_strip_unplanned(item) for item in manifest]
    if not isinstance(manifest, Mapping):
        return manifest
    return {
        name: _strip_unplanned(value)
        for name, value in manifest.items()
        if name not in (CHECKSUM_FIELD, VERSION_FIELD)
    }


def _find_source_change(
    plan: ConversionPlan, existing: TreePath, recorded_source: str | None
) -> Mismatch | None:
    if recorded_source is not None and recorded_source != fingerprint_source(plan):
        return Mismatch("the source was replaced or changed since it was converted")
    times = {
        name: max(identity.mtime_ns, identity.ctime_ns)
        for name, identity in _iterate_identities(plan)
    }
    if recorded_source is None and not all(times.values()):
        return Mismatch("the storage of the source does not record when it was changed")
    folder = plan.source.path
    if recorded_source is None and not isinstance(folder, UrlPath):
        # A folder that replaced another one may contain older files.
        status = folder.lstat()
        times[folder.name] = max(status.st_mtime_ns, status.st_ctime_ns)
    written = _read_time_ns(existing, _get_manifest_file(plan).path)
    name, changed = max(times.items(), key=lambda item: item[1], default=("", 0))
    if changed < written:
        return None
    return Mismatch(
        f"`{name}` of the source changed after it was converted "
        f"({format_rfc3339(changed / 1e9)} and {format_rfc3339(written / 1e9)})"
        if written
        else "the storage does not record when it was converted"
    )


def _get_manifest_file(plan: ConversionPlan) -> OutputFile:
    """Return the planned manifest, which some formats place in a folder."""
    return next(file for file in plan.plan.files if PurePath(file.path).name == MANIFEST)


def _read_time_ns(existing: TreePath, name: str) -> int:
    """Return the time in nanoseconds at which the file *name* was written, or 0 if unknown."""
    if isinstance(existing, UrlPath) and is_hub_repository(existing.url):
        return read_commit_time_ns(existing.url, name)
    return (existing / name).stat().st_mtime_ns


def _find_file_mismatch(plan: ConversionPlan, existing: TreePath) -> Mismatch | None:
    manifest = _get_manifest_file(plan).path
    tensor_files = {record.file for record in plan.plan.records}
    for file in plan.plan.files:
        path = existing / file.path
        if not path.is_file():
            return Mismatch(f"`{file.path}` is missing")
        if file.path == manifest:
            continue
        if path.stat().st_size != file.size:
            return Mismatch(f"`{file.path}` does not have the planned size")
        if file.path not in tensor_files and path.read_bytes() != _build_content(plan, file):
            return Mismatch(f"`{file.path}` does not have the planned content")
    return None


def _build_content(plan: ConversionPlan, file: OutputFile) -> bytes:
    """Return the planned bytes of a file without tensors, in which checksums are zero."""
    content = bytearray(file.size)
    for raw in plan.plan.raw_copies:
        if raw.target == file.path:
            with source_files(raw.root or plan.plan.source_root) as files:
                data = files.read(raw.source, raw.offset, raw.nbytes)
            content[raw.target_offset : raw.target_offset + raw.nbytes] = data
    for offset, data in file.frame(lambda _: 0):
        content[offset : offset + len(data)] = data
    return bytes(content)


def _find_damage(
    plan: ConversionPlan, existing: TreePath, progress: StartProgress
) -> Mismatch | None:
    # The plan proved that the tensors cover the model, or that the user excluded some.
    options = VerifyOptions(format=plan.options.to, level="full", model=False)
    result = verify_checkpoint(existing, options, progress)
    problem = next(iter((*result.errors, *result.unknown)), None)
    if problem is not None:
        return Mismatch(problem.summary)
    if result.data != "verified":
        return Mismatch(f"its data is {result.data}, so its tensors may have changed")
    return None
