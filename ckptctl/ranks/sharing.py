"""Execution of one plan by several ranks.

All ranks make the same plan from the same metadata, and verify that it is the same. Rank 0 creates
the staging directory and its files, and every rank fills its share. Rank 0 then writes headers and
indexes, which contain the checksums of all ranks, and publishes. A single rank just executes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ckptctl.errors import RefusedError, StorageError, spell_option
from ckptctl.planner.balance import assign_chunks, compute_share
from ckptctl.planner.plan import Plan
from ckptctl.ranks.coordinator import Coordinator, on_first, through_first, together
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.executor import PlanRun, execute_plan
from ckptctl.storage.execution.journal import LedgerEntries
from ckptctl.storage.publish import Staging
from ckptctl.storage.sources import raise_changed_if
from ckptctl.storage.threads import Advance
from ckptctl.units import pluralize

T = TypeVar("T")
LOOK_EVERY = 0.5
SEEN_WITHIN = 90.0
"""Time that a network file system may take to show a new file to other machines."""


def portion(ranks: Coordinator, items: Sequence[T], nbytes: Callable[[T], int]) -> Sequence[T]:
    """Select this rank's items, so that all ranks get about the same number of bytes."""
    if ranks.world == 1:
        return items
    everybody = range(ranks.world)
    owners = assign_chunks([(nbytes(item), everybody) for item in items], ranks.world)
    return [item for item, owner in zip(items, owners, strict=True) if owner == ranks.rank]


def summary(values: object) -> str:
    """Return the SHA-256 hex digest of the `repr` of *values*."""
    import hashlib  # loads OpenSSL, which a single process does not need

    return hashlib.sha256(repr(values).encode()).hexdigest()


def source_summary(plan: Plan) -> str:
    """Hash names, sizes and mtimes of a plan's source files, equal on all machines."""
    identities = [(name, one) for name, one in plan.sources.items()]
    identities += [(name, one) for (_, name), one in plan.inputs.items()]
    return summary(sorted((name, one.size, one.mtime_ns) for name, one in identities))


@contextmanager
def staged(
    ranks: Coordinator, staging: Callable[[], AbstractContextManager[Staging]]
) -> Iterator[Staging | None]:
    """Yield the staging directory on rank 0, or None on the others.

    If creating it fails, all ranks raise.
    """
    with ExitStack() as stack:
        yield on_first(ranks, lambda: stack.enter_context(staging()))


def execute_together(
    plan: Plan,
    stage: Staging | None,
    options: ExecutionOptions,
    progress: Advance,
    ranks: Coordinator,
) -> Execution:
    """Execute *plan*, which must be the same on all ranks, with all of them.

    Only rank 0 passes *stage*, a staging directory on a file system that all ranks share. Shares
    are about equal, so *progress* counts the bytes of this rank times the number of ranks.
    """
    if ranks.world == 1:
        assert stage is not None
        return execute_plan(plan, stage.data, options, progress, journal=stage.journal)
    root = Path(ranks.broadcast(str(stage.data) if stage else None))
    share = compute_share(plan, options.checksum, ranks.rank, ranks.world)
    with ExitStack() as stack:

        def begin() -> PlanRun:
            run = PlanRun(plan, root, options, stack, share=share)
            run.sources.require_unchanged()
            return run

        run = together(ranks, begin)
        on_first(ranks, run.output.create_files)

        def require_seen() -> None:
            if not run.output.are_intact():
                raise _unseen(root)

        together(ranks, require_seen)
        alarm = _Alarm(root.parent / "failed")
        everybody = alarm.watching(lambda nbytes: progress(nbytes * ranks.world))

        def fill() -> LedgerEntries | None:
            with alarm, raise_changed_if(run.sources.require_unchanged):
                run.fill_files(everybody)
                run.sources.require_unchanged()
            return None if alarm.heard else run.export_entries()

        def finish(books: list[LedgerEntries | None]) -> list[Execution]:
            run.finish_shared_plan([one for one in books[1:] if one is not None])
            return [run.build_result()] * len(books)

        return through_first(ranks, fill, finish)


def require_alone(ranks: Coordinator) -> None:
    """Raise if ``--resume`` is used with several ranks."""
    if ranks.world > 1:
        raise RefusedError(
            f"{spell_option('--resume')} is not supported with multiple ranks",
            why=f"{pluralize(ranks.world, 'rank')} write here, but a journal only covers the "
            "output of one",
            hint=f"omit {spell_option('--resume')}, or use a single process",
        )


def wait_for(path: Path) -> None:
    """Wait until *path*, published by another machine, is visible on this one.

    Raises:
        StorageError: It is not visible in time.
    """
    end = time.monotonic() + SEEN_WITHIN
    while not path.exists():
        if time.monotonic() > end:
            raise _unseen(path)
        time.sleep(LOOK_EVERY)


def _unseen(path: Path) -> StorageError:
    return StorageError(
        "this rank cannot see the output of rank 0",
        where=str(path),
        hint="use a destination on a file system that all ranks share",
    )


class _HeardError(Exception):
    """Failure of another rank, which raises its own error."""


class _Alarm:
    """File next to the output that a failing rank creates to stop the others early.

    Without it, they would copy all their data before they learn of the failure. The error itself is
    exchanged by the next collective.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = 0.0
        self.heard = False

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is None:
            return False
        if issubclass(kind, _HeardError):
            self.heard = True
            return True
        with suppress(OSError):
            self._path.touch()
        return False

    def watching(self, progress: Advance) -> Advance:
        """Wrap *progress* to poll for the file, and raise if another rank has failed."""

        def advance(nbytes: int) -> None:
            progress(nbytes)
            now = time.monotonic()
            if now >= self._next:
                self._next = now + LOOK_EVERY
                if self._path.exists():
                    raise _HeardError

        return advance
