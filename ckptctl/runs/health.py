"""Verification of a run's checkpoints, with the checks of ``verify --level fast``.

A damaged checkpoint may only be removed or skipped if its files show an incomplete write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Annotated, NamedTuple, TypeGuard

from ckptctl import formats
from ckptctl.errors import CkptError, MappingError, StorageError
from ckptctl.formats.dcp import METADATA
from ckptctl.formats.shared.findings import finding_from_error
from ckptctl.formats.sidecar_files import RUN_FILE
from ckptctl.planner.retention import Retainable
from ckptctl.results import JsonField, Result, empty_to_none
from ckptctl.runs.entries import RunEntry
from ckptctl.runs.notes import RunRecord, read_lightning_notes, read_run_record, read_trainer_state
from ckptctl.storage import lock
from ckptctl.storage.destinations import get_staging_directory
from ckptctl.storage.paths import raise_if_request_failed, resolve_links
from ckptctl.storage.writing import LOCK_NAME as LOCK
from ckptctl.storage.writing import OBJECTS_NAME, UnfinishedError, find_unfinished_error
from ckptctl.tree import TreePath
from ckptctl.units import format_rfc3339, pluralize
from ckptctl.verbs.verification.verify import IndexChecks
from ckptctl.verbs.verification.verify import verify_with_catalog as verify
from ckptctl.verbs.verification.verify_options import VerifyOptions
from ckptctl.verdict import Verdict, combine_verdicts, decide_verdict, has_file_damage

CKPTCTL_FILES = frozenset({RUN_FILE, LOCK, OBJECTS_NAME})
"""Files that ckptctl adds to a checkpoint. A folder that contains only these counts as empty."""
BUILT_IN_RULES = Path("megatron-core")
RECENT_CHANGE_SECONDS = 600.0
"""Seconds after its last change for which an incomplete checkpoint counts as being written."""
MAX_METRIC_CHARS = 80
_FIRST, _LAST = "path step time bytes format verdict writing problem", "protected_by metrics link"
CHECKPOINT_FIELDS = " ".join((_FIRST, "lacks", _LAST))
"""Fields of a checkpoint in JSON output, in order."""


@dataclass(frozen=True, slots=True)
class Health:
    """Verdict on a checkpoint, with its evidence.

    Attributes:
        parts: The checkpoint itself, or checkpoints inside it; empty if unknown.
        verdict: ``unknown`` includes everything that cannot be read here: failing disks, missing
            permissions, links that lead out of the checkpoint, unsupported features.
        torn: Whether the files show an incomplete write.
        read_failed: Whether the operating system failed a read.
        may_be_starting: Whether no format is recognized, which is also the case if a trainer has
            just started to write the checkpoint.
    """

    verdict: Verdict
    problem: str = ""
    _: KW_ONLY
    format: str | None = None
    parts: tuple[TreePath, ...] = ()
    torn: bool = False
    may_be_starting: bool = False
    read_failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Retainable, Result, order=CHECKPOINT_FIELDS):
    """One checkpoint of a run, with its verdict and everything that protects it.

    Attributes:
        record: Content of its ``ckptctl.run.json``.
        parts: The checkpoint itself, or checkpoints inside it.
        read_failed: Whether the operating system failed a read.
    """

    entry: Annotated[
        RunEntry,
        JsonField("path", of="path"),
        JsonField(
            "modification time of the newest file of weights or trainer state, RFC 3339, UTC",
            of="time",
            to=format_rfc3339,
        ),
        JsonField("size of all its files", of="nbytes", name="bytes"),
        JsonField("target, if it is a symbolic link", of="link", to=empty_to_none),
    ]
    record: RunRecord = field(default_factory=RunRecord)
    format: Annotated[str | None, JsonField("[format](formats.md), or null if unrecognized")] = None
    parts: tuple[TreePath, ...] = ()
    read_failed: bool = False

    @classmethod
    def from_entry(cls, entry: RunEntry) -> Checkpoint:
        """Build a checkpoint without a verdict, reading only its run record."""
        record, parsed_name = read_run_record(entry.path), entry.parsed_name
        return cls(
            name=entry.path.name,
            series=parsed_name.series,
            order=parsed_name.order,
            time=entry.time,
            lineage=record.lineage,
            entry=entry,
            record=record,
        )

    @property
    def path(self) -> TreePath:
        """Path of the checkpoint."""
        return self.entry.path


def read_metrics(folder: TreePath, record: RunRecord | None = None) -> dict[str, float]:
    """Read the numeric metrics that a checkpoint records.

    *record* is its run record, or None to read the record from *folder*.
    """
    return {
        key: float(value)
        for key, value in _read_all_metrics(folder, record).items()
        if _is_number(value)
    }


def read_nonnumeric_metrics(folder: TreePath, record: RunRecord | None = None) -> dict[str, str]:
    """Read the recorded metrics that are not numbers, as shortened text.

    For *record*, see :func:`read_metrics`.
    """
    return {
        key: repr(value)[:MAX_METRIC_CHARS]
        for key, value in _read_all_metrics(folder, record).items()
        if value is not None and not _is_number(value)
    }


def _read_all_metrics(folder: TreePath, record: RunRecord | None) -> dict[str, object]:
    record = record or read_run_record(folder)
    merged = {
        **read_lightning_notes(folder).scores,
        **read_trainer_state(folder).scores,
        **record.metrics,
    }
    merged.pop("step", None)
    return merged


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_health(
    path: TreePath, *, model: bool = True, index_checks: IndexChecks | None = None
) -> Health:
    """Verify the checkpoint at *path*, including all checkpoints inside it.

    If *model* is false, tensors are not compared with the model type. A training process that
    resumes compares them with its own state instead. *index_checks* stores the results of index
    checks, which checkpoints with equal indexes share.
    """
    try:
        health = _check_health(path, _HealthOptions(model, index_checks))
    except OSError as error:
        message = StorageError.from_os_error(error, "read", str(path)).what
        return Health(Verdict.UNKNOWN, message, read_failed=True)
    raise_if_request_failed(path)
    return health


def examine_entry(
    entry: RunEntry, now: float, *, model: bool = True, index_checks: IndexChecks | None = None
) -> Checkpoint:
    """Verify one checkpoint and read its metrics.

    *now* is in seconds since the epoch. For *model* and *index_checks*, see :func:`check_health`.
    """
    health = (
        Health(Verdict.DAMAGED, "the save is unfinished", torn=True)
        if entry.is_staging
        else check_health(entry.path, model=model, index_checks=index_checks)
    )
    checkpoint = Checkpoint.from_entry(entry)
    checkpoint = replace(
        checkpoint,
        metrics={**entry.parsed_name.metrics, **read_metrics(entry.path, checkpoint.record)},
        format=health.format,
        parts=health.parts,
        read_failed=health.read_failed,
        verdict=health.verdict,
        torn=health.torn,
        problem=health.problem,
    )
    if checkpoint.complete:
        return checkpoint
    # The age of an incomplete checkpoint counts from the last change of any file.
    checkpoint = replace(checkpoint, time=entry.last_modified)
    staging = Path(entry.path) if entry.is_staging else get_staging_directory(Path(entry.path))
    writer = lock.find_holder(staging) if staging.is_dir() and not staging.is_symlink() else None
    if writer:
        return replace(checkpoint, writing=True, problem=f"process {writer} is writing it")
    age = now - entry.last_modified
    if (health.torn or health.may_be_starting) and age < RECENT_CHANGE_SECONDS:
        ago = f"{int(age / 60)} min" if age >= 60 else "less than a minute"
        problem = f"{health.problem}; modified {ago} ago"
        return replace(checkpoint, writing=True, problem=problem)
    return checkpoint


class _HealthOptions(NamedTuple):
    """Options of :func:`check_health`, which apply to every checkpoint inside the checked path."""

    model: bool
    index_checks: IndexChecks | None


def _check_health(path: TreePath, options: _HealthOptions) -> Health:
    for folder in (path, *(item for item in _list_folder(path) if item.is_dir())):
        # a DCP save without .metadata, which is written last
        if (
            interrupted_format := formats.find_interrupted_format(folder)
        ) and not formats.sniff_formats(folder):
            missing = (folder / METADATA).relative_to(path)
            message = f"`{missing}` is missing"
            return Health(
                Verdict.DAMAGED, message, format=interrupted_format.name, parts=(path,), torn=True
            )
    unfinished_error = find_unfinished_error(path)
    if unfinished_error is not None:
        kind = next(iter(formats.sniff_formats(path)), None)
        why = f" ({unfinished_error.why})" if unfinished_error.why else ""
        text = f"{unfinished_error.what}{why}"
        if isinstance(unfinished_error, UnfinishedError):
            return Health(Verdict.DAMAGED, text, format=kind, parts=(path,), torn=True)
        read_failed = isinstance(unfinished_error, StorageError)
        return Health(Verdict.UNKNOWN, text, format=kind, read_failed=read_failed)
    parts = (
        [path]
        if formats.sniff_formats(path)
        else formats.list_checkpoints(path) or formats.find_nested_checkpoints(path)
    )
    real = resolve_links(path)
    outside_part = next(
        (part for part in parts if not resolve_links(part).is_relative_to(real)), None
    )
    if outside_part is not None:
        message = f"`{outside_part.relative_to(path)}` is a link to a path outside the checkpoint"
        return Health(Verdict.UNKNOWN, message)
    sniffed = tuple((part, name) for part in parts for name in formats.sniff_formats(part))
    if sniffed:
        return _combine_parts(path, sniffed, options)
    if _has_no_files(path):
        return Health(Verdict.DAMAGED, "it is empty", torn=True)
    try:
        formats.require_checkpoint(path)
    except CkptError as error:
        return Health(Verdict.UNKNOWN, error.what)
    return Health(Verdict.UNKNOWN, "not a recognized checkpoint", may_be_starting=True)


def _combine_parts(
    path: TreePath, sniffed: tuple[tuple[TreePath, str], ...], options: _HealthOptions
) -> Health:
    """Combine the verdicts on the checkpoints in *path* into one.

    If a checkpoint shows an incomplete write, its verdict is returned, otherwise the worst verdict.
    """
    parts = tuple(dict.fromkeys(part for part, _ in sniffed))
    has_ambiguous_formats = len(parts) != len(sniffed)
    healths = [
        _check_unrecognized_part(path, part, options)
        for part in _list_unrecognized_parts(path, parts)
    ]
    for part, name in sniffed:
        part_health = _verify_part(part, name if has_ambiguous_formats else None, options)
        prefix = "" if part == path else f"`{part.relative_to(path)}`: "
        healths.append(
            replace(part_health, format=name, parts=parts, problem=prefix + part_health.problem)
        )
    for part_health in healths:
        if part_health.torn:
            return part_health
    worst = combine_verdicts(part_health.verdict for part_health in healths)
    for part_health in healths:
        if part_health.verdict is worst and worst is not Verdict.COMPLETE:
            return replace(part_health, parts=())
    models = [name for part, name in sniffed if not formats.NON_MODEL_FOLDER.fullmatch(part.name)]
    return Health(Verdict.COMPLETE, format=(models or [sniffed[0][1]])[0], parts=parts)


def _list_unrecognized_parts(path: TreePath, parts: Sequence[TreePath]) -> list[TreePath]:
    """List folders next to *parts* whose names look like *parts*, but whose format is unknown."""
    folders = dict.fromkeys(part.parent for part in parts if part != path)
    siblings = (item for folder in folders for item in _list_folder(folder) if item not in parts)
    named_like_parts = (item for item in siblings if formats.PART_FOLDER.fullmatch(item.name))
    return [
        item
        for item in named_like_parts
        if item.is_dir() or (item.is_symlink() and not item.is_file())
    ]


def _check_unrecognized_part(path: TreePath, part: TreePath, options: _HealthOptions) -> Health:
    """Check a folder of unknown format whose name looks like that of a checkpoint in *path*."""
    if part.is_symlink():
        part_health = Health(Verdict.UNKNOWN, "a link to an unrecognized file or folder")
    elif _has_no_files(part):
        part_health = Health(Verdict.UNKNOWN, "it is empty")
    else:
        part_health = _check_health(part, options)
    return replace(part_health, problem=f"`{part.relative_to(path)}`: {part_health.problem}")


def _has_no_files(path: TreePath) -> bool:
    """Return whether *path* is an empty file, or a folder with only files that ckptctl adds."""
    if not path.is_dir():
        return path.stat().st_size == 0
    folders = [path]
    while folders:
        for item in folders.pop().iterdir():
            if item.is_symlink() or not (item.is_dir() or item.name in CKPTCTL_FILES):
                return False
            if item.is_dir():
                folders.append(item)
    return True


def _list_folder(folder: TreePath) -> list[TreePath]:
    """List *folder*, sorted by name, or return an empty list if it is a file or unreadable."""
    try:
        return sorted(folder.iterdir())
    except (NotADirectoryError, PermissionError):
        return []


def _verify_part(path: TreePath, format_name: str | None, health_options: _HealthOptions) -> Health:
    """Verify one checkpoint at level ``fast``. If *format_name* is None, detect the format."""
    options = VerifyOptions(
        format=format_name, level="fast", model=health_options.model, reference="none"
    )
    try:
        verification, _ = verify(path, options, index_checks=health_options.index_checks)
    except MappingError as error:
        # Without rules for dividing tensors among ranks, files can still be checked.
        try:
            verification, _ = verify(path, replace(options, rules=BUILT_IN_RULES))
        except CkptError:
            return Health(Verdict.UNKNOWN, error.what)
    except CkptError as error:
        finding = finding_from_error(error)
        verdict, torn = decide_verdict([finding]), has_file_damage([finding])
        return Health(verdict, error.what, torn=torn, read_failed=finding.read_failed)
    problem, findings = "", (*verification.errors, *verification.unknown)
    if findings:
        first, *further = findings
        is_named = first.where in ("", str(path.absolute())) or first.where in first.what
        where = "" if is_named else f" ({first.where})"
        more = f" and {pluralize(len(further), 'more problem')}" if further else ""
        problem = f"{first.what}{where}{more}"
    return Health(
        verification.verdict,
        problem,
        torn=verification.shows_damaged_files,
        read_failed=verification.read_failed,
    )
