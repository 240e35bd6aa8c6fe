"""What Lightning notes in a checkpoint: the step, the best checkpoint, and its own score.

Source: ``lightning/pytorch/callbacks/model_checkpoint.py``, ``state_dict``: it is updated before
the file is written, so each file says what was known when it was saved, itself included. Nothing
is unpickled: the tensors of scores are read by position.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from ckptctl.errors import CkptError, FormatError, StorageError
from ckptctl.file_identity import FileIdentity
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.zips.reader import KEEPING_TABLE, StoredTensor, read_archive

LAST = "last.ckpt"
BESIDE = "meta.pt"
"""Where the callbacks are when the checkpoint is a folder."""
STEPS = (
    BESIDE,
    "checkpoint/mp_rank_00_model_states.pt",
    "checkpoint/zero_pp_rank_0_mp_rank_00_model_states.pt",
)
"""Where the step is then: with FSDP, and with DeepSpeed."""
MAX_STEP = 10**18
SCORES = {"float64": "<d", "float32": "<f", "float16": "<e", "int64": "<q", "int32": "<i"}


@dataclass(frozen=True, slots=True)
class Noted:
    """What the callbacks of a checkpoint noted.

    Attributes:
        best: Names of the best checkpoints, one for each callback.
        scores: What this one was rated with, by the name of what was monitored.
        step: The step at which it was saved; None: it does not say.
        problem: Why they cannot be read; empty: they can, or there are none.
        damaged: Whether that is because of what the file holds.
    """

    best: tuple[str, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    problem: str = ""
    damaged: bool = False


def noted(path: Path) -> Noted:
    """Return what the callbacks noted in the checkpoint at *path*; nothing where there is none."""
    if path.suffix != ".ckpt":
        return Noted()
    try:
        return _noted(path / BESIDE if path.is_dir() else path)
    except OSError as error:
        return Noted(problem=str(error.strerror or error))


def stated_step(path: Path) -> int | None:
    """Return the step that the checkpoint at *path* says it was saved at; None: it does not."""
    try:
        files = [path / name for name in STEPS] if path.is_dir() else [path]
        steps = (_noted(file).step for file in files)
        return next((step for step in steps if step is not None), None)
    except OSError:
        return None


def _noted(file: Path) -> Noted:
    if not file.is_file():
        return Noted()
    status = file.stat()
    try:
        return _read(file, FileIdentity.of(status))
    except FormatError:  # it is none of Lightning's
        return Noted()
    except CkptError as error:
        return Noted(problem=error.what, damaged=not isinstance(error, StorageError))
    except OSError as error:
        return Noted(problem=str(error.strerror or error))


@lru_cache(maxsize=1024)
def _read(file: Path, _: FileIdentity) -> Noted:
    with SourceFiles(file.parent) as files:
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
) -> Iterator[tuple[str, float]]:
    for state in states:
        score = state.get("current_score")
        if isinstance(score, StoredTensor) and score.shape == ():
            kind = SCORES.get(score.dtype)
            if kind:
                data = bytearray(struct.calcsize(kind))
                files.readv(name, [memoryview(data)], score.offset)
                yield str(state["monitor"]), float(struct.unpack(kind, data)[0])
