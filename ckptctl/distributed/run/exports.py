"""The trained model that a run leaves, in the format that others use."""

from __future__ import annotations

from abc import abstractmethod

from ckptctl.distributed.group import coordinator
from ckptctl.distributed.run.finals import Finished, beside, require_same
from ckptctl.distributed.run.options import OF_A_SOURCE, FinalOptions, ManagerOptions
from ckptctl.distributed.run.steps import Steps
from ckptctl.distributed.saving.converted import final_target, plan_converted, save_converted
from ckptctl.distributed.state import StateDict
from ckptctl.keywords import keywords
from ckptctl.ops.conversion.plan import ConversionPlan
from ckptctl.ops.ranks.coordinator import on_first
from ckptctl.storage.tree import TreePath


class Exports(Steps):
    """A part of the manager."""

    _options: ManagerOptions

    @abstractmethod
    def _settle(self) -> None:
        """See the manager."""

    @keywords(FinalOptions, without=OF_A_SOURCE)
    def plan_final(
        self, state: StateDict, out: str | TreePath, options: FinalOptions
    ) -> ConversionPlan | None:
        """Plan :meth:`save_final`, so that errors appear before training.

        All ranks call it. Only names, shapes and dtypes are used, and no elements are read or
        written. If this run has already published a model, the plan is for the comparison save.

        Args:
            state: A state with the structure of the one to save.
            out: Destination of the model.
            options: Options of :meth:`save_final`.

        Returns:
            The plan on rank 0, or None on other ranks. Notes are logged.

        Raises:
            CkptError: The save would fail. It is raised on every rank.
        """
        self._require_open()
        there = None if options.overwrite else self.finished(out)
        target = beside(there.path) if there else out
        return plan_converted(state, target, self._options.final(options), self._group)

    def finished(self, out: str | TreePath) -> Finished | None:
        """Return the trained model that this run has published at *out*, or None if there is none.

        All ranks call it before training, so a restarted job can exit early. The record of the run
        in ``ckptctl.final.json`` is compared with the names, sizes and checksums of the files. A
        model that was replaced or changed since does not count.

        Args:
            out: Destination, as in :meth:`save_final`.
        """
        self._require_open()
        ranks, target = coordinator(self._group), final_target(out)
        return ranks.broadcast(on_first(ranks, lambda: self.keeper.finals.finished(target)))

    @keywords(FinalOptions, without=OF_A_SOURCE)
    def save_final(self, state: StateDict, out: str | TreePath, options: FinalOptions) -> TreePath:
        """Save the trained model in an exchange format, and return when it is published.

        All ranks write it next to *out*, rank 0 converts it and publishes it atomically. With
        ``keep_last=0``, the checkpoints of the run are then removed. A model that this run has
        already published there stays: *state* is saved next to it, compared, and must be equal.
        *model_type* and *converter* default to those of the manager.

        Args:
            state: State to save. With *only* set to ``model``, only the key ``model`` of it.
            out: Destination: a path or a URL of an object store.
            options: Output options of :func:`ckptctl.convert`.

        Returns:
            The absolute path.

        Raises:
            CkptError: The save failed. It is raised on every rank, and nothing was published or
                removed.
        """
        self._require_open()
        self._settle()
        there = None if options.overwrite else self.finished(out)
        saved = save_converted if there is None else require_same
        target = saved(state, out, self._options.final(options), self._group)
        on_first(coordinator(self._group), lambda: self.keeper.finish(target, there))
        if self._tier is not None:
            self._tier.ended = self.keeper.policy.last == 0
        return target
