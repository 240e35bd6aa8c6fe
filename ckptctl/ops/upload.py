"""Carrying out a plan whose destination is a URL: file by file, by way of a folder for few of them.

The folder is in the directory for temporary files (``TMPDIR``). It holds the files in work and at
most :data:`~ckptctl.storage.outbox.WAITING` complete ones; each is removed when it is uploaded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ckptctl.errors import CkptError, UsageError
from ckptctl.planner.plan import Plan
from ckptctl.storage import remote_mounts
from ckptctl.storage.executor import Execution, ExecutionOptions, execute
from ckptctl.storage.outbox import KEPT, WAITING, Outbox
from ckptctl.storage.publish import free_space, terminable
from ckptctl.storage.remote_upload import Destination, open_destination
from ckptctl.storage.urls import HUB, scheme_of

INDEXES = (".index.json", ".metadata")
NOT_AT_ONCE = (
    "objects are not published in one step: the index, or the configuration, was uploaded last"
)


def at_once(url: str) -> bool:
    """Return whether a place behind *url* publishes all files in one step."""
    return scheme_of(url) == HUB


def room_needed(plan: Plan) -> int:
    """Return the bytes of disk that the files in work and those that wait take at most."""
    sizes = sorted((file.size for file in plan.files), reverse=True)
    large = sizes[: WAITING + 2]
    return sum(large) + sum(size for size in sizes[len(large) :] if size <= KEPT)


def upload(
    plan: Plan,
    options: ExecutionOptions,
    progress: Callable[[int], None],
    *,
    overwrite: bool,
    proven: Callable[[Sequence[int]], None],
) -> Execution:
    """Carry out *plan* and publish the output at the URL that is its target.

    Args:
        plan: The plan.
        options: How.
        progress: Called with the bytes done since the last call.
        overwrite: Whether a checkpoint there may be replaced.
        proven: Called with the checksums of the records when all is published; if it raises, the
            output is taken back where that can be done.

    Raises:
        RefusedError: There is something at the URL, or too little room for files on their way.
        CkptError: Nothing was published.
    """
    url, single = plan.target, None
    if plan.single_file:
        url, _, single = plan.target.rpartition("/")
    target = open_destination(url, single=single, overwrite=overwrite)
    last = _last(plan)
    with terminable(), tempfile.TemporaryDirectory(prefix="ckptctl-") as folder:
        root = Path(folder)
        free_space(root, room_needed(plan))
        try:
            outbox = Outbox(target.put, last)
            done = execute(plan, root, options, progress, outbox=outbox)
            outbox.close(root)
            target.commit([file.path for file in plan.files])
            remote_mounts.drop(url)
            proven(done.crcs)
        except BaseException as error:
            _abandon(target, error)
            raise
    return done


def require_plain(*, resume: bool, ranks: int) -> None:
    """Refuse what cannot be done with a URL as destination.

    Raises:
        UsageError: It is asked for.
    """
    if resume:
        raise UsageError(
            "--resume goes with a destination on a file system",
            hint="run it again without: the Hub does not take again what it has",
        )
    if ranks > 1:
        raise UsageError(
            "several ranks cannot write to a URL",
            hint="write to a file system that all ranks see, and copy that, or use one process",
        )


def _last(plan: Plan) -> list[str]:
    """Return the files without tensors, the index as the last of them."""
    full = {record.file for record in plan.records if record.nbytes}
    full |= {raw.target for raw in plan.raw_copies if raw.nbytes}
    names = [file.path for file in plan.files if file.path not in full]
    return sorted(names, key=lambda name: name.endswith(INDEXES))


def _abandon(target: Destination, error: BaseException) -> None:
    outcome = target.abandon()
    if isinstance(error, CkptError):
        error.why = "; ".join(filter(None, (error.why, outcome)))
