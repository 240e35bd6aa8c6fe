"""Execution of one plan by several ranks.

All ranks make the plan from the same metadata, and verify that their plans are equal. Rank 0
creates the staging directory and its files, and every rank writes its share of the data. Rank 0
then writes headers and indexes, which contain the checksums of all ranks, and publishes the output.
If there is only one rank, it executes the plan directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ckptctl.errors import RefusedError, StorageError, format_option
from ckptctl.planner.balance import assign_chunks, compute_work_share
from ckptctl.planner.plan import Plan
from ckptctl.ranks.coordinator import (
    RankCollectives,
    gather_and_scatter,
    run_on_all_ranks,
    run_on_rank_zero,
)
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.executor import PlanExecution, execute_plan
from ckptctl.storage.execution.journal import LedgerEntries
from ckptctl.storage.publish import Staging
from ckptctl.storage.sources import raise_changed_if
from ckptctl.storage.threads import Advance
from ckptctl.units import pluralize

T = TypeVar("T")
POLL_SECONDS = 0.5
VISIBLE_WITHIN_SECONDS = 90.0
"""Seconds to wait until a network file system shows a new file to other machines."""


def select_rank_share(
    ranks: RankCollectives, items: Sequence[T], nbytes: Callable[[T], int]
) -> Sequence[T]:
    """Select the items assigned to this rank, so that all ranks get about the same bytes."""
    if ranks.world == 1:
        return items
    rank_numbers = range(ranks.world)
    owners = assign_chunks([(nbytes(item), rank_numbers) for item in items], ranks.world)
    return [item for item, owner in zip(items, owners, strict=True) if owner == ranks.rank]


def hash_repr(values: object) -> str:
    """Return the SHA-256 hex digest of the `repr` of *values*."""
    import hashlib  # loads OpenSSL, which a single process does not need

    return hashlib.sha256(repr(values).encode()).hexdigest()


def hash_sources(plan: Plan) -> str:
    """Return a hash of the names, sizes and mtimes of a plan's source files.

    Ranks compare it to verify that they read the same files.
    """
    identities = [(name, identity) for name, identity in plan.sources.items()]
    identities += [(name, identity) for (_, name), identity in plan.inputs.items()]
    return hash_repr(
        sorted((name, identity.size, identity.mtime_ns) for name, identity in identities)
    )


@contextmanager
def open_stage_on_rank_zero(
    ranks: RankCollectives, open_stage: Callable[[], AbstractContextManager[Staging]]
) -> Iterator[Staging | None]:
    """Yield the staging directory on rank 0, or None on other ranks.

    If creating it fails, all ranks raise.
    """
    with ExitStack() as stack:
        yield run_on_rank_zero(ranks, lambda: stack.enter_context(open_stage()))


def execute_on_all_ranks(
    plan: Plan,
    stage: Staging | None,
    options: ExecutionOptions,
    progress: Advance,
    ranks: RankCollectives,
) -> Execution:
    """Execute *plan*, which must be equal on all ranks. Every rank writes a share of the data.

    Only rank 0 passes *stage*, a staging directory on a file system that all ranks share. Shares
    are about equal, so *progress* counts the bytes of this rank times the number of ranks.
    """
    if ranks.world == 1:
        assert stage is not None
        return execute_plan(plan, stage.data, options, progress, journal=stage.journal)
    root = Path(ranks.broadcast(str(stage.data) if stage else None))
    share = compute_work_share(plan, options.checksum, ranks.rank, ranks.world)
    with ExitStack() as stack:

        def start_run() -> PlanExecution:
            run = PlanExecution(plan, root, options, stack, share=share)
            run.sources.require_unchanged()
            return run

        run = run_on_all_ranks(ranks, start_run)
        run_on_rank_zero(ranks, run.output.create_files)

        def require_visible_files() -> None:
            if not run.output.have_full_size():
                raise _invisible_output_error(root)

        run_on_all_ranks(ranks, require_visible_files)
        failure_signal = _FailureSignal(root.parent / "failed")
        watched_progress = failure_signal.wrap_progress(
            lambda nbytes: progress(nbytes * ranks.world)
        )

        def fill_share() -> LedgerEntries | None:
            with failure_signal, raise_changed_if(run.sources.require_unchanged):
                run.fill_files(watched_progress)
                run.sources.require_unchanged()
            return None if failure_signal.was_triggered else run.export_entries()

        def finish_run(ledger_entries: list[LedgerEntries | None]) -> list[Execution]:
            run.finish_shared_plan(
                [rank_entries for rank_entries in ledger_entries[1:] if rank_entries is not None]
            )
            return [run.build_result()] * len(ledger_entries)

        return gather_and_scatter(ranks, fill_share, finish_run)


def require_single_process(ranks: RankCollectives) -> None:
    """Raise if ``--resume`` is used with several ranks."""
    if ranks.world > 1:
        raise RefusedError(
            f"{format_option('--resume')} is not supported with multiple ranks",
            why=f"{pluralize(ranks.world, 'rank')} write here, but a journal only covers the "
            "output of one",
            hint=f"omit {format_option('--resume')}, or use a single process",
        )


def wait_until_visible(path: Path) -> None:
    """Wait until *path*, published by another machine, is visible on this one.

    Raises:
        StorageError: *path* is not visible in time.
    """
    end = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            raise _invisible_output_error(path)
        time.sleep(POLL_SECONDS)


def _invisible_output_error(path: Path) -> StorageError:
    return StorageError(
        "this rank cannot see the output of rank 0",
        where=str(path),
        hint="use a destination on a file system that all ranks share",
    )


class _RemoteFailureError(Exception):
    """Error that stops this rank because another rank has failed.

    The other rank raises the actual error.
    """


class _FailureSignal:
    """File next to the output that a failing rank creates to stop other ranks early.

    Without this file, the other ranks would copy all their data before they learn of the failure.
    The error itself is exchanged by the next collective.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = 0.0
        self.was_triggered = False

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is None:
            return False
        if issubclass(kind, _RemoteFailureError):
            self.was_triggered = True
            return True
        with suppress(OSError):
            self._path.touch()
        return False

    def wrap_progress(self, progress: Advance) -> Advance:
        """Wrap *progress* so that it raises as soon as the file of a failed rank exists."""

        def check_and_advance(nbytes: int) -> None:
            progress(nbytes)
            now = time.monotonic()
            if now >= self._next:
                self._next = now + POLL_SECONDS
                if self._path.exists():
                    raise _RemoteFailureError

        return check_and_advance
