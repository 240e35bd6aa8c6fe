"""Carrying out a plan whose destination is a URL: file by file, by way of a scratch directory.

It is in the directory for temporary files (``TMPDIR``). It holds the files in work and at most
:data:`~ckptctl.storage.execution.finisher.WAITING` complete ones; each is removed when it is
uploaded. It is locked as long as its process lives: what a killed one left is removed by the next
run of the same user.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ckptctl.conversion.destinations import replaceable
from ckptctl.errors import CkptError
from ckptctl.planner.plan import Plan
from ckptctl.storage import lock, trash
from ckptctl.storage.destinations import require_space
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.executor import execute
from ckptctl.storage.execution.finisher import KEPT, WAITING, UploadQueue
from ckptctl.storage.paths import source_path
from ckptctl.storage.threads import Advance, terminable
from ckptctl.tree import INDEXES, FileTree, Upload, UploadRequest, UrlPath

PREFIX = "ckptctl-upload-"
"""What the scratch directories begin with."""
NOT_AT_ONCE = (
    "objects are not published atomically; the index or the configuration was uploaded last"
)


def publishes_at_once(plan: Plan) -> bool:
    """Return whether all that *plan* writes behind a URL appears in one step."""
    return _tree(plan).atomic or len(plan.files) == 1


def room_needed(plan: Plan) -> int:
    """Return the bytes of disk that the files in work and those that wait take at most."""
    sizes = sorted((file.size for file in plan.files), reverse=True)
    large = sizes[: WAITING + 2]
    return sum(large) + sum(size for size in sizes[len(large) :] if size <= KEPT)


def upload(
    plan: Plan,
    options: ExecutionOptions,
    progress: Advance,
    *,
    overwrite: bool,
    written: Callable[[Execution], None],
    proven: Callable[[Sequence[int]], None],
) -> Execution:
    """Carry out *plan* and publish the output at the URL that is its target.

    Args:
        plan: The plan.
        options: How; to resume means to upload nothing that an interrupted run has uploaded.
        progress: Called with the bytes done since the last call.
        overwrite: Whether a checkpoint there may be replaced.
        written: Called with what was done when all is written and nothing published; may raise.
        proven: Called with the checksums of the records when all is published; if it raises, the
            output is taken back where that can be done.

    Raises:
        RefusedError: There is something at the URL, or too little room for files on their way.
        CkptError: Nothing was published.
    """
    last = _last(plan)
    read = {plan.source_root: set(plan.sources)}
    for folder, name in plan.inputs:
        read.setdefault(folder, set()).add(name)
    asked = UploadRequest(
        [*(file.path for file in plan.files if file.path not in last), *last],
        single=plan.target.name if plan.single_file else None,
        overwrite=overwrite,
        resume=options.resume,
        is_checkpoint=lambda: replaceable(source_path(plan.target)),
        read=read,
    )
    tree, folder = _tree(plan), plan.target.parent if plan.single_file else plan.target
    with terminable(), scratch_directory() as root:
        require_space(root, room_needed(plan))
        target = tree.begin_upload(str(folder), asked)
        try:
            uploads = UploadQueue(target.put, last)
            done = execute(plan, root, options, progress, uploads=uploads)
            written(done)
            uploads.close(root, target.require_whole)
            target.commit()
            tree.drop(str(plan.target))
            proven(done.crcs)
        except BaseException as error:
            _abandon(target, error)
            raise
        target.close()
    return replace(done, resumed_bytes=target.resumed)


def _tree(plan: Plan) -> FileTree:
    """Return the tree that *plan* uploads to."""
    assert isinstance(plan.target, UrlPath)
    return plan.target.tree


def _last(plan: Plan) -> list[str]:
    """Return the files without tensors, the index as the last of them."""
    full = {record.file for record in plan.records if record.nbytes}
    full |= {raw.target for raw in plan.raw_copies if raw.nbytes}
    names = [file.path for file in plan.files if file.path not in full]
    return sorted(names, key=lambda name: name.endswith(INDEXES))


def _abandon(target: Upload, error: BaseException) -> None:
    outcome = target.abandon()
    if isinstance(error, CkptError):
        error.why = "; ".join(filter(None, (error.why, outcome)))


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make an empty directory, which is removed in the end with all that is in it."""
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with lock.held(folder, folder, "using this folder"):
        try:
            data = folder / "data"
            data.mkdir()
            yield data
        finally:
            trash.remove(folder)


def _sweep() -> None:
    """Remove the directories that killed runs left; others, and what cannot be removed, stay."""
    with suppress(OSError):
        for found in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if _is_own(found) and (found / lock.NAME).is_file():
                held = lock.held(found, found, "using this folder", to_sweep=True)
                with suppress(CkptError), held:
                    trash.remove(found)


def _is_own(path: Path) -> bool:
    with suppress(OSError):
        state = path.lstat()
        return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
    return False
