"""Execution of a plan whose destination is a URL.

Files are written to a scratch directory and uploaded from there.

The scratch directory is in the directory for temporary files (``TMPDIR``). It contains the files in
progress and at most :data:`~ckptctl.storage.execution.finisher.MAX_WAITING` complete files. Each
file is removed after its upload. A process locks its directory until it exits. The next run of
the same user removes the directories of killed processes.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ckptctl.conversion.destinations import is_replaceable
from ckptctl.errors import CkptError
from ckptctl.planner.plan import Plan
from ckptctl.storage import lock, trash
from ckptctl.storage.destinations import require_space
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from ckptctl.storage.execution.finisher import MAX_KEPT_BYTES, MAX_WAITING, UploadQueue
from ckptctl.storage.paths import resolve_source_path
from ckptctl.storage.threads import Advance, raise_on_sigterm
from ckptctl.tree import INDEX_SUFFIXES, FileTree, Upload, UploadRequest, UrlPath

SCRATCH_PREFIX = "ckptctl-upload-"
"""Prefix of the names of scratch directories in the temporary directory."""
NOT_ATOMIC_NOTE = (
    "objects are not published atomically; the index or the configuration was uploaded last"
)


def is_upload_atomic(plan: Plan) -> bool:
    """Check if all files of *plan* appear at the URL in one atomic step."""
    return _get_tree(plan).atomic or len(plan.files) == 1


def compute_scratch_bytes(plan: Plan) -> int:
    """Return the maximum size in bytes that the scratch directory of *plan* can reach."""
    sizes = sorted((file.size for file in plan.files), reverse=True)
    large = sizes[: MAX_WAITING + 2]
    return sum(large) + sum(size for size in sizes[len(large) :] if size <= MAX_KEPT_BYTES)


def upload_output(
    plan: Plan,
    options: ExecutionOptions,
    progress: Advance,
    *,
    overwrite: bool,
    check_written: Callable[[Execution], None],
    check_published: Callable[[Sequence[int]], None],
) -> Execution:
    """Execute *plan* and publish the output at its URL.

    Args:
        plan: Plan to execute.
        options: Execution options. With *resume*, files that an interrupted run uploaded are kept.
        progress: Called with the number of bytes processed since its last call.
        overwrite: Whether an existing checkpoint may be replaced.
        check_written: Called with the execution after writing and before publishing. It may raise.
        check_published: Called with the checksums of the records after publishing. If it raises,
            the output is withdrawn if possible.

    Raises:
        RefusedError: The URL is not empty, or there is too little space for the scratch directory.
        CkptError: The upload failed, and nothing was published.
    """
    last = _list_last_files(plan)
    read = {plan.source_root: set(plan.sources)}
    for folder, name in plan.inputs:
        read.setdefault(folder, set()).add(name)
    request = UploadRequest(
        [*(file.path for file in plan.files if file.path not in last), *last],
        single=plan.target.name if plan.single_file else None,
        overwrite=overwrite,
        resume=options.resume,
        is_checkpoint=lambda: is_replaceable(resolve_source_path(plan.target)),
        read=read,
    )
    tree, folder = _get_tree(plan), plan.target.parent if plan.single_file else plan.target
    with raise_on_sigterm(), create_scratch_directory() as root:
        require_space(root, compute_scratch_bytes(plan))
        assert isinstance(folder, UrlPath)
        with hold_upload(folder, request) as target:
            uploads = UploadQueue(target.upload_file, last)
            execution = execute_plan(plan, root, options, progress, uploads=uploads)
            check_written(execution)
            uploads.upload_last_files(root, target.require_complete)
            target.publish_files()
            tree.forget_url(str(plan.target))
            check_published(execution.crcs)
    return replace(execution, resumed_bytes=target.resumed)


@contextmanager
def hold_upload(folder: UrlPath, request: UploadRequest) -> Iterator[Upload]:
    """Begin an upload to *folder*, and close it after the block, or abandon it after an error."""
    target = folder.tree.begin_upload(str(folder), request)
    try:
        yield target
    except BaseException as error:
        _abandon_upload(target, error)
        raise
    target.close()


def _get_tree(plan: Plan) -> FileTree:
    """Return the remote file tree that *plan* uploads files to."""
    assert isinstance(plan.target, UrlPath)
    return plan.target.tree


def _list_last_files(plan: Plan) -> list[str]:
    """List the files without tensor data, which are uploaded last, with index files at the end."""
    tensor_files = {record.file for record in plan.records if record.nbytes}
    tensor_files |= {raw.target for raw in plan.raw_copies if raw.nbytes}
    names = [file.path for file in plan.files if file.path not in tensor_files]
    return sorted(names, key=lambda name: name.endswith(INDEX_SUFFIXES))


def _abandon_upload(target: Upload, error: BaseException) -> None:
    outcome = target.abandon_upload()
    if isinstance(error, CkptError):
        error.why = "; ".join(filter(None, (error.why, outcome)))


@contextmanager
def create_scratch_directory() -> Iterator[Path]:
    """Create and lock a scratch directory, and remove it when the block exits."""
    _remove_stale_folders()
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))
    with lock.hold_lock(folder, folder, "using this folder"):
        try:
            data = folder / "data"
            data.mkdir()
            yield data
        finally:
            trash.delete_permanently(folder)


def _remove_stale_folders() -> None:
    """Remove scratch directories that killed processes of the same user left behind."""
    with suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*"):
            if _is_own_folder(folder) and (folder / lock.LOCK_FILE).is_file():
                locked = lock.hold_lock(folder, folder, "using this folder", to_sweep=True)
                with suppress(CkptError), locked:
                    trash.delete_permanently(folder)


def _is_own_folder(path: Path) -> bool:
    with suppress(OSError):
        state = path.lstat()
        return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
    return False
