"""The trained model that a run leaves, in the format that others use."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

from ckptctl.distributed.group import coordinator
from ckptctl.distributed.run.finals import Finished, beside, require_same
from ckptctl.distributed.run.options import OF_A_SOURCE, FinalOptions, ManagerOptions
from ckptctl.distributed.run.steps import Steps
from ckptctl.distributed.saving.converted import final_target, plan_converted, save_converted
from ckptctl.distributed.state import StateDict
from ckptctl.keywords import keywords
from ckptctl.ops.conversion.plan import ConversionPlan
from ckptctl.ops.ranks.coordinator import on_first


class Exports(Steps):
    """A part of the manager."""

    _options: ManagerOptions

    @abstractmethod
    def _settle(self) -> None:
        """See the manager."""

    @keywords(FinalOptions, without=OF_A_SOURCE)
    def plan_final(
        self, state: StateDict, out: str | Path, options: FinalOptions
    ) -> ConversionPlan | None:
        """Say what :meth:`save_final` would do: called before training, it fails then.

        All ranks call it. Elements are neither read nor written: names, shapes and dtypes decide.
        Where this run has published a model already, what would be saved beside it is planned.

        Args:
            state: A state like the one that will be saved.
            out: Where that will appear.
            options: Those of :meth:`save_final`.

        Returns:
            On rank 0 the plan, on others None. What a user should know is logged.

        Raises:
            CkptError: It would fail; on every rank.
        """
        self._require_open()
        there = None if options.overwrite else self.finished(out)
        target = beside(there.path) if there else out
        return plan_converted(state, target, self._options.final(options), self._group)

    def finished(self, out: str | Path) -> Finished | None:
        """Return the trained model that this run has published at *out*; None: it has not.

        All ranks call it, before training: a job that is started again need not begin then. What
        the run notes in ``ckptctl.final.json`` is compared with names, sizes and checksums that are
        there: what was replaced or changed since is not the run's.

        Args:
            out: As for :meth:`save_final`.
        """
        self._require_open()
        ranks, target = coordinator(self._group), final_target(out)
        return ranks.broadcast(on_first(ranks, lambda: self.keeper.finals.finished(target)))

    @keywords(FinalOptions, without=OF_A_SOURCE)
    def save_final(self, state: StateDict, out: str | Path, options: FinalOptions) -> Path:
        """Save the trained model in the format that others use; returns when it is published.

        All ranks write it beside *out*, rank 0 converts it, and it appears once, whole. With
        ``keep_last=0`` the run's checkpoints are removed after that. A model that this run has
        published there already stays: *state* is saved beside it, compared, and has to be the same.
        What *model_type* and *converter* leave open is the manager's, too.

        Args:
            state: What is saved; of one with a key ``model`` that alone, if *only* says so.
            out: Where it will appear: a path, or a URL of an object store.
            options: Those of :func:`ckptctl.convert` that say how a model is written.

        Returns:
            The absolute path.

        Raises:
            CkptError: Nothing was published and nothing removed; on every rank.
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
