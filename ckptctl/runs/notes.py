"""Records of a run inside its checkpoints, by ckptctl, Lightning's callbacks and transformers.

Source: ``lightning/pytorch/callbacks/model_checkpoint.py``, ``state_dict``. It is updated before
the file is written, so each file includes its own score. Nothing is unpickled: the tensors of
scores are read by position.
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
from ckptctl.storage.zips.zip_reader import KEEPING_TABLE, StoredTensor, read_archive
from ckptctl.tree import TreePath

LAST = "last.ckpt"
BESIDE = "meta.pt"
"""File with the state of callbacks, if the checkpoint is a folder."""
STEPS = (
    BESIDE,
    "checkpoint/mp_rank_00_model_states.pt",
    "checkpoint/zero_pp_rank_0_mp_rank_00_model_states.pt",
    "trainer_state.pt",
)
"""Files that may contain the step of such a checkpoint: FSDP, DeepSpeed, per-rank files."""
MAX_STEP = 10**18
SCORES = {"float64": "<d", "float32": "<f", "float16": "<e", "int64": "<q", "int32": "<i"}
SCHEMA = "ckptctl.run/1"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Parsed ``ckptctl.run.json``, or the *error* that prevented reading it."""

    members: Mapping[str, object] = field(default_factory=dict)
    metrics: Mapping[str, object] = field(default_factory=dict)
    lineage: Lineage = UNKNOWN_LINEAGE
    error: CkptError | None = None


def run_record(folder: TreePath) -> RunRecord:
    """Read the run record of the checkpoint *folder*, which is empty if there is none."""
    try:
        if not (folder / RUN_FILE).is_file():
            return RunRecord()
        with source_files(folder) as files:
            found = read_json(files, RUN_FILE, constants=True)
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
        rated = found.get("metrics", {})
        if not isinstance(rated, dict):
            raise ValueError("its `metrics` are not a JSON object")
        return RunRecord(found, rated, _lineage(found))
    except CkptError as error:
        return RunRecord(error=error)
    except OSError as error:
        return RunRecord(error=_failure(error))
    except ValueError as error:
        return RunRecord(error=FormatError(str(error)))


def _failure(error: OSError) -> StorageError:
    return StorageError(str(error.strerror or error))


def _lineage(said: Mapping[str, object]) -> Lineage:
    if "save" not in said:
        return UNKNOWN_LINEAGE
    resumed = said.get("resumed")
    if not isinstance(resumed, list) or not all(isinstance(one, dict) for one in resumed):
        raise ValueError("its `resumed` is not a list of JSON objects")
    before = (Resume(*(_count(one.get(name)) for name in Resume._fields)) for one in resumed)
    return Lineage(_count(said["save"]), tuple(before), _count(said.get("left", 0)))


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]!r} is not the number of a save or step")
    return value


def encoded(
    rated: Mapping[str, float], lineage: Lineage, known: Mapping[str, object] | None = None
) -> bytes:
    """Encode a run record as JSON, keeping the members in *known*."""
    own = {"save": lineage.save, "resumed": [one._asdict() for one in lineage.resumed]}
    own |= {"left": lineage.left} if lineage.left else {}
    counted = own if lineage.save else {}
    whole = {"schema": SCHEMA, **(known or {}), **counted, "metrics": dict(rated)}
    return json.dumps(whole, indent=2).encode()


@dataclass(frozen=True, slots=True)
class Noted:
    """Record of a trainer, or of its callbacks, in a checkpoint.

    Attributes:
        best: Names or paths of the best checkpoints.
        scores: Metrics of this checkpoint.
        step: Step of the save, or None if it is not recorded.
        error: Error that prevented reading it to its end.
        there: Whether a state exists that is not empty, or that cannot be read.
    """

    best: tuple[str, ...] = ()
    scores: Mapping[str, object] = field(default_factory=dict)
    step: int | None = None
    error: CkptError | None = None
    there: bool = False


def noted(path: TreePath) -> Noted:
    """Read the state of Lightning's callbacks in the checkpoint at *path*."""
    if path.suffix != ".ckpt":
        return Noted()
    try:
        return _noted(path / BESIDE if path.is_dir() else path)
    except OSError as error:
        return Noted(error=_failure(error))


def stated_step(path: TreePath) -> int | None:
    """Read the step that the checkpoint at *path* records, or return None."""
    try:
        files = [path / name for name in STEPS] if path.is_dir() else [path]
        steps = (_noted(file).step for file in files)
        return next((step for step in steps if step is not None), None)
    except OSError:
        return None


def _noted(file: TreePath) -> Noted:
    if not file.is_file():
        return Noted()
    status = file.stat()
    try:
        return _read(file, FileIdentity.from_stat(status))
    except FormatError:  # not a file of Lightning
        return Noted()
    except CkptError as error:
        return Noted(error=error)
    except OSError as error:
        return Noted(error=_failure(error))


@lru_cache(maxsize=1024)
def _read(file: TreePath, _: FileIdentity) -> Noted:
    with source_files(file.parent) as files:
        root = read_archive(files, file.name, unknown="inert", table=KEEPING_TABLE).root
        states = list(_states(root))
        scores = dict(_scores(files, file.name, states))
    best = (Path(str(state["best_model_path"])).name for state in states)
    return Noted(tuple(dict.fromkeys(best)), scores, _step(root))


def _step(root: object) -> int | None:
    step = root.get("global_step") if isinstance(root, dict) else None
    whole = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < MAX_STEP
    return step if whole else None


def _states(root: object) -> Iterator[Mapping[object, object]]:
    callbacks = root.get("callbacks") if isinstance(root, dict) else None
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        known = isinstance(state, dict) and isinstance(state.get("best_model_path"), str)
        if known and isinstance(state.get("monitor"), str):
            yield state


def _scores(
    files: SourceFiles, name: str, states: list[Mapping[object, object]]
) -> Iterator[tuple[str, object]]:
    """Yield the score of each callback, or a description if it is not a readable number."""
    for state in states:
        score, metric = state.get("current_score"), str(state["monitor"])
        kind = SCORES.get(score.dtype) if isinstance(score, StoredTensor) else None
        if isinstance(score, StoredTensor) and score.shape == () and kind:
            data = bytearray(struct.calcsize(kind))
            files.readv(name, [memoryview(data)], score.offset)
            yield metric, float(struct.unpack(kind, data)[0])
        elif isinstance(score, StoredTensor):
            yield metric, f"a tensor of {score.dtype} {list(score.shape)}"
        elif score is not None:
            yield metric, score


# --- transformers: the Trainer's state, however long its log is ----------------------------------

TRAINER = "trainer_state.json"
BEST = "best_model_checkpoint"
STEP = "global_step"
LOG = "log_history"


class _CutError(Exception):
    """Trainer state that cannot be read to its end, with the part that was read."""

    def __init__(self, state: Noted) -> None:
        super().__init__(state.error)
        self.state = state


def trainer_state(folder: TreePath) -> Noted:
    """Read ``trainer_state.json`` in *folder*, if there is one."""
    path = folder / TRAINER
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return Noted()
        with source_files(folder) as files:
            files.path(TRAINER)
        return _read_state(path, FileIdentity.from_stat(status))
    except (FileNotFoundError, NotADirectoryError):
        gone = path.is_symlink()
        return Noted(there=True, error=FormatError("it is a broken link")) if gone else Noted()
    except CkptError as error:
        return Noted(there=True, error=error)
    except OSError as error:
        return Noted(there=True, error=_failure(error))
    except _CutError as error:  # not cached, since another try may succeed
        return error.state


@lru_cache(maxsize=1024)
def _read_state(path: TreePath, _: FileIdentity) -> Noted:
    """Parse a trainer state, twice if its log comes before the step."""
    said: dict[str, object] = {}
    try:
        again, rated = _pass(path, said)
        if again:
            rated = _pass(path, said)[1]
        return Noted(_best(said), rated, there=bool(said))
    except OSError as error:
        cut: CkptError = _failure(error)
    except (ValueError, RecursionError) as error:
        cut = FormatError(str(error)[:300])
    raise _CutError(Noted(_best(said), error=cut, there=True))


def _best(said: Mapping[str, object]) -> tuple[str, ...]:
    best = said.get(BEST)
    return (best,) if best and isinstance(best, str) else ()


def _pass(path: TreePath, said: dict[str, object]) -> tuple[bool, Mapping[str, object]]:
    """Parse the text once and collect all of its keys.

    Returns:
        Whether the log came before the step, and the log entry of the step.
    """
    log_was_first, seen = False, set()
    rated: dict[str, object] = {}
    with path.open("r", encoding="utf-8-sig") as file:
        text = JsonTextReader(file)
        for key in text.iterate_keys():
            if key in seen:
                raise ValueError(f"the key {key[:100]!r} occurs twice")
            seen.add(key)
            if key == LOG and text.peek_character() == "[":
                log_was_first = STEP not in said
                said[LOG] = None
                for entry in text.iterate_items():
                    if isinstance(entry, dict) and entry.get("step") == said.get(STEP):
                        rated |= entry
            else:
                value = text.read_value()
                said[key] = value if key in (BEST, STEP) else None
        text.require_end()
    return log_was_first, rated
