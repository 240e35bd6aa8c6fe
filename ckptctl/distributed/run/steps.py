"""The checkpoints of a run by their steps: what is asked and done without a state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from ckptctl.distributed.background.async_save import AsyncSaver, Closing
from ckptctl.distributed.group import ProcessGroup, coordinator
from ckptctl.distributed.run.keeper import SERIES, Keeper
from ckptctl.distributed.run.local_tier import LocalTier
from ckptctl.errors import RefusedError, SourceNotFoundError, UsageError
from ckptctl.ops import option_checks as checks
from ckptctl.ops.ranks.coordinator import on_first
from ckptctl.storage.tree import TreePath


class Steps(Closing):
    """A part of the manager."""

    root: TreePath
    keeper: Keeper
    _group: ProcessGroup
    _saver: AsyncSaver | None
    _tier: LocalTier | None
    _closed: bool

    @abstractmethod
    def wait(self) -> None:
        """See the manager."""

    def latest_step(self) -> int | None:
        """Return the step that :meth:`load_latest` would load, or None without a checkpoint.

        Raises:
            CkptError: The errors of :meth:`load_latest`, on every rank.
        """
        ranks = coordinator(self._group)
        if self._tier is not None and (newest := self._tier.newest()):
            return newest.step
        found = ranks.broadcast(on_first(ranks, self.keeper.newest))
        return found.step if found else None

    def all_steps(self) -> list[int]:
        """Return the steps of all complete checkpoints of the run, as seen by rank 0."""
        ranks = coordinator(self._group)
        return ranks.broadcast(on_first(ranks, self.keeper.steps))

    def delete(self, step: int) -> None:
        """Remove the checkpoint ``step-N`` regardless of the rules. Call it on all ranks.

        Args:
            step: Step of the checkpoint.

        Raises:
            SourceNotFoundError: The checkpoint does not exist. All errors are raised on every rank.
            RefusedError: The checkpoint is protected: a pointer or a link names it, its verdict is
                unknown, or it is being written. It is also protected if this manager resumed from
                it or saved it last, or if it is the only complete one.
            StorageError: The checkpoint could not be removed.
        """
        self._require_open()
        step = checks.step(step)
        if self._saver is not None:
            self._saver.join()
        ranks = coordinator(self._group)
        if not ranks.broadcast(on_first(ranks, lambda: self.keeper.has(step))):
            raise self._missing(step)
        on_first(ranks, lambda: self.keeper.delete(step))

    def rate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to an existing checkpoint, for example after a later evaluation.

        All ranks call it, and rank 0 writes.

        Args:
            step: Step of the checkpoint.
            metrics: Metrics by name. Those of rank 0 count.

        Raises:
            SourceNotFoundError: The checkpoint does not exist. All errors are raised on every rank.
            UsageError: A metric is not a number.
            CkptError: The running save failed.
        """
        self._require_open()
        step = checks.step(step)
        if self._tier is not None and self._tier.rate(step, rating(metrics)):
            return
        self.wait()
        ranks = coordinator(self._group)
        path = self.root / f"{SERIES}{step}"
        if not ranks.broadcast(on_first(ranks, lambda: self.keeper.has(step))):
            raise self._missing(step)
        on_first(ranks, lambda: self.keeper.rate(path, rating(metrics)))

    def _require_open(self) -> None:
        if self._closed:
            raise RefusedError("this manager is closed", hint="create a new one")

    def _missing(self, step: int) -> SourceNotFoundError:
        return SourceNotFoundError(
            f"there is no checkpoint of step {step}",
            where=str(self.root / f"{SERIES}{step}"),
            why="it was not saved, or it was removed",
        )


def rating(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers."""
    if not isinstance(metrics, Mapping):
        raise UsageError(f"{metrics!r} is not a dictionary of metrics", where="metrics")
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError("a metric is not a number", where="metrics", why=str(error)) from error
