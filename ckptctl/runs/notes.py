"""Readers for metrics and steps that ckptctl, Lightning and transformers store in checkpoints.

Source: ``lightning/pytorch/callbacks/model_checkpoint.py``, ``state_dict``. Lightning updates this
state before it writes the file, so a checkpoint contains its own score. Nothing is unpickled.
Scores that are tensors are read at their offsets in the file.
"""

from __future__ import annotations

import json
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from ckptctl.errors import CkptError, FormatError, StorageError
from ckptctl.file_identity import FileIdentity
from ckptctl.formats.sidecar_files import RUN_FILE
from ckptctl.planner.lineage import UNKNOWN_LINEAGE, Lineage, Resume
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import JsonTextReader, read_json
from ckptctl.storage.zips.zip_reader import TABLE_WITH_UNREAD_TENSORS, StoredTensor, read_archive
from ckptctl.tree import TreePath

LAST_CHECKPOINT = "last.ckpt"
CALLBACKS_FILE = "meta.pt"
"""File in which Lightning stores the state of callbacks if the checkpoint is a folder."""
STEP_FILES = (
    CALLBACKS_FILE,
    "checkpoint/mp_rank_00_model_states.pt",
    "checkpoint/zero_pp_rank_0_mp_rank_00_model_states.pt",
    "trainer_state.pt",
)
"""Files of a checkpoint folder that may contain its step, as written by FSDP or DeepSpeed."""
MAX_STEP = 10**18
SCORE_FORMATS = {"float64": "<d", "float32": "<f", "float16": "<e", "int64": "<q", "int32": "<i"}
SCHEMA = "ckptctl.run/1"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Parsed ``ckptctl.run.json``, or the *error* that prevented reading it."""

    members: Mapping[str, object] = field(default_factory=dict)
    metrics: Mapping[str, object] = field(default_factory=dict)
    lineage: Lineage = UNKNOWN_LINEAGE
    error: CkptError | None = None


def read_run_record(folder: TreePath) -> RunRecord:
    """Read ``ckptctl.run.json`` in *folder*, or return an empty record if it does not exist."""
    try:
        if not (folder / RUN_FILE).is_file():
            return RunRecord()
        with source_files(folder) as files:
            record = read_json(files, RUN_FILE, allow_nan=True)
        if not isinstance(record, dict):
            raise ValueError("it is not a JSON object")
        metrics = record.get("metrics", {})
        if not isinstance(metrics, dict):
            raise ValueError("its `metrics` are not a JSON object")
        return RunRecord(record, metrics, _parse_lineage(record))
    except CkptError as error:
        return RunRecord(error=error)
    except OSError as error:
        return RunRecord(error=_storage_error(error))
    except ValueError as error:
        return RunRecord(error=FormatError(str(error)))


def _storage_error(error: OSError) -> StorageError:
    return StorageError(str(error.strerror or error))


def _parse_lineage(record: Mapping[str, object]) -> Lineage:
    if "save" not in record:
        return UNKNOWN_LINEAGE
    resumed = record.get("resumed")
    if not isinstance(resumed, list) or not all(isinstance(resume, dict) for resume in resumed):
        raise ValueError("its `resumed` is not a list of JSON objects")
    earlier_resumes = (
        Resume(*(_parse_count(resume.get(name)) for name in Resume._fields)) for resume in resumed
    )
    return Lineage(
        _parse_count(record["save"]), tuple(earlier_resumes), _parse_count(record.get("left", 0))
    )


def _parse_count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]!r} is not the number of a save or step")
    return value


def encode_run_record(
    metrics: Mapping[str, float],
    lineage: Lineage,
    previous_members: Mapping[str, object] | None = None,
) -> bytes:
    """Encode a run record as JSON.

    Other members of the record that it replaces are kept. They are passed as *previous_members*.
    """
    save_members = {
        "save": lineage.save,
        "resumed": [resume._asdict() for resume in lineage.resumed],
    }
    save_members |= {"left": lineage.left} if lineage.left else {}
    counted = save_members if lineage.save else {}
    record = {"schema": SCHEMA, **(previous_members or {}), **counted, "metrics": dict(metrics)}
    return json.dumps(record, indent=2).encode()


@dataclass(frozen=True, slots=True)
class TrainerNotes:
    """State that a trainer or its callbacks recorded in a checkpoint.

    Attributes:
        best_checkpoints: Names or paths of the best checkpoints.
        scores: Values of the metrics of this checkpoint, by metric.
        step: Step of the save, or None if it is not recorded.
        error: Error that occurred while the record was read, or None if it was read completely.
        has_state: Whether the checkpoint contains a nonempty or unreadable trainer state.
    """

    best_checkpoints: tuple[str, ...] = ()
    scores: Mapping[str, object] = field(default_factory=dict)
    step: int | None = None
    error: CkptError | None = None
    has_state: bool = False


def read_lightning_notes(path: TreePath) -> TrainerNotes:
    """Read the state of Lightning's callbacks in the checkpoint at *path*."""
    if path.suffix != ".ckpt":
        return TrainerNotes()
    try:
        return _read_notes(path / CALLBACKS_FILE if path.is_dir() else path)
    except OSError as error:
        return TrainerNotes(error=_storage_error(error))


def read_recorded_step(path: TreePath) -> int | None:
    """Read the step stored in the checkpoint at *path*, or return None if no step is stored."""
    try:
        files = [path / name for name in STEP_FILES] if path.is_dir() else [path]
        steps = (_read_notes(file).step for file in files)
        return next((step for step in steps if step is not None), None)
    except OSError:
        return None


def _read_notes(file: TreePath) -> TrainerNotes:
    if not file.is_file():
        return TrainerNotes()
    status = file.stat()
    try:
        return _read_archive_notes(file, FileIdentity.from_stat(status))
    except FormatError:  # not a file of Lightning
        return TrainerNotes()
    except CkptError as error:
        return TrainerNotes(error=error)
    except OSError as error:
        return TrainerNotes(error=_storage_error(error))


@lru_cache(maxsize=1024)
def _read_archive_notes(file: TreePath, _: FileIdentity) -> TrainerNotes:
    with source_files(file.parent) as files:
        root = read_archive(files, file.name, unknown="inert", table=TABLE_WITH_UNREAD_TENSORS).root
        states = list(_iterate_callback_states(root))
        scores = dict(_iterate_scores(files, file.name, states))
    best = (Path(str(state["best_model_path"])).name for state in states)
    return TrainerNotes(tuple(dict.fromkeys(best)), scores, _find_step(root))


def _find_step(root: object) -> int | None:
    step = root.get("global_step") if isinstance(root, dict) else None
    is_valid = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < MAX_STEP
    return step if is_valid else None


def _iterate_callback_states(root: object) -> Iterator[Mapping[object, object]]:
    callbacks = root.get("callbacks") if isinstance(root, dict) else None
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        is_callback = isinstance(state, dict) and isinstance(state.get("best_model_path"), str)
        if is_callback and isinstance(state.get("monitor"), str):
            yield state


def _iterate_scores(
    files: SourceFiles, name: str, states: list[Mapping[object, object]]
) -> Iterator[tuple[str, object]]:
    """Yield the metric and score of each callback. Tensors that are not scalars become text."""
    for state in states:
        score, metric = state.get("current_score"), str(state["monitor"])
        kind = SCORE_FORMATS.get(score.dtype) if isinstance(score, StoredTensor) else None
        if isinstance(score, StoredTensor) and score.shape == () and kind:
            data = bytearray(struct.calcsize(kind))
            files.readv(name, [memoryview(data)], score.offset)
            yield metric, float(struct.unpack(kind, data)[0])
        elif isinstance(score, StoredTensor):
            yield metric, f"a tensor of {score.dtype} {list(score.shape)}"
        elif score is not None:
            yield metric, score


# --- transformers: the Trainer's state, however long its log is ----------------------------------

TRAINER_STATE = "trainer_state.json"
BEST_KEY = "best_model_checkpoint"
STEP_KEY = "global_step"
LOG_KEY = "log_history"


class _TruncatedStateError(Exception):
    """Truncated or malformed trainer state, with the fields that were read before the error."""

    def __init__(self, state: TrainerNotes) -> None:
        super().__init__(state.error)
        self.state = state


def read_trainer_state(folder: TreePath) -> TrainerNotes:
    """Read ``trainer_state.json`` in *folder*, or return an empty record if it does not exist."""
    path = folder / TRAINER_STATE
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return TrainerNotes()
        with source_files(folder) as files:
            files.path(TRAINER_STATE)
        return _parse_trainer_state(path, FileIdentity.from_stat(status))
    except (FileNotFoundError, NotADirectoryError):
        is_broken_link = path.is_symlink()
        return (
            TrainerNotes(has_state=True, error=FormatError("it is a broken link"))
            if is_broken_link
            else TrainerNotes()
        )
    except CkptError as error:
        return TrainerNotes(has_state=True, error=error)
    except OSError as error:
        return TrainerNotes(has_state=True, error=_storage_error(error))
    except _TruncatedStateError as error:  # not cached, since another try may succeed
        return error.state


@lru_cache(maxsize=1024)
def _parse_trainer_state(path: TreePath, _: FileIdentity) -> TrainerNotes:
    """Parse a trainer state. If its log precedes the step, parse it twice."""
    members: dict[str, object] = {}
    try:
        log_was_first, step_metrics = _parse_state_file(path, members)
        if log_was_first:
            step_metrics = _parse_state_file(path, members)[1]
        return TrainerNotes(_list_best(members), step_metrics, has_state=bool(members))
    except OSError as error:
        parse_error: CkptError = _storage_error(error)
    except (ValueError, RecursionError) as error:
        parse_error = FormatError(str(error)[:300])
    raise _TruncatedStateError(TrainerNotes(_list_best(members), error=parse_error, has_state=True))


def _list_best(members: Mapping[str, object]) -> tuple[str, ...]:
    best = members.get(BEST_KEY)
    return (best,) if best and isinstance(best, str) else ()


def _parse_state_file(
    path: TreePath, members: dict[str, object]
) -> tuple[bool, Mapping[str, object]]:
    """Parse the file at *path* once, and add its keys to *members*.

    Returns:
        Whether the log precedes the step in the file, and the log entry of the step.
    """
    log_was_first, seen_keys = False, set()
    step_metrics: dict[str, object] = {}
    with path.open("r", encoding="utf-8-sig") as file:
        text = JsonTextReader(file)
        for key in text.iterate_keys():
            if key in seen_keys:
                raise ValueError(f"the key {key[:100]!r} occurs twice")
            seen_keys.add(key)
            if key == LOG_KEY and text.peek_character() == "[":
                log_was_first = STEP_KEY not in members
                members[LOG_KEY] = None
                for entry in text.iterate_items():
                    if isinstance(entry, dict) and entry.get("step") == members.get(STEP_KEY):
                        step_metrics |= entry
            else:
                value = text.read_value()
                members[key] = value if key in (BEST_KEY, STEP_KEY) else None
        text.require_end()
    return log_was_first, step_metrics
