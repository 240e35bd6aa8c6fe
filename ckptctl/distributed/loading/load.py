"""``ckptctl.load``: any checkpoint into a state dict that may be sharded over ranks.

If cached plans are reused, there are two exchanges: one before reading, in which the ranks agree on
the load and on the plans, and one afterwards, in which they learn that all are done.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from ckptctl import families
from ckptctl.distributed.group import coordinator
from ckptctl.distributed.loading.broadcast import (
    assign_readers,
    exchange_boxes,
    measure_speed,
    places_to_read,
    routes,
    should_broadcast,
)
from ckptctl.distributed.loading.load_plan import PLANS, LoadPlan, RankLoad
from ckptctl.distributed.loading.owners import Target
from ckptctl.distributed.loading.request import (
    RankView,
    agree,
    request,
    require_same_names,
    wanted_by_all,
)
from ckptctl.distributed.loading.state_options import LoadCall
from ckptctl.distributed.positions import note_position
from ckptctl.distributed.values import ReadValues
from ckptctl.keywords import accept_keywords
from ckptctl.ranks.coordinator import Alone, Coordinator, on_first, sendable, telling, together
from ckptctl.save_load.loading.checks import require_nothing_lost
from ckptctl.save_load.loading.identity import Fingerprint, fingerprint_of
from ckptctl.save_load.loading.load_options import LoadReport
from ckptctl.save_load.rank_agreement import RankStatement, is_unchanged, name_generation, new_nonce
from ckptctl.save_load.saving.local_shards import digest
from ckptctl.storage.threads import pause_gc
from ckptctl.tree import TreePath


class CollectiveLoad:
    """Load of one checkpoint by all ranks."""

    _own: RankLoad

    def __init__(self, ranks: Coordinator, group: Coordinator, options: LoadCall) -> None:
        self._ranks = ranks
        self._options = options
        self._rank = group.rank
        self._every = ranks.world == group.world

    def into(
        self, target: Target, path: str | TreePath, error: BaseException | None = None
    ) -> LoadReport:
        """Load the checkpoint at *path*, or raise on all ranks.

        Args:
            target: State to fill.
            path: Path or URL of the checkpoint.
            error: Earlier failure of this rank, if any.
        """
        ranks = self._ranks
        fingerprint: Fingerprint | None = None
        try:
            if error is not None:
                raise error
            here = (self._rank, ranks.world, self._every, sorted(routes(ranks).items()))
            asked = request(target, path, self._options, here)
            self._own = own = RankLoad(asked, self._options, self._rank, every=self._every)
            fingerprint = own.saved_plan.fingerprint if own.saved_plan else None
            if fingerprint is None and ranks.world > 1:
                fingerprint = fingerprint_of(own.catalog)
        except BaseException as failure:
            error = failure
        views = agree(ranks, self._options, self._view(error, fingerprint), error)
        statements = [view.statement for view in views]
        own, plan = self._own, self._own.saved_plan
        if plan is None or not is_unchanged(statements):
            plan = replace(
                self._planned(views),
                generation=name_generation(statements),
                fingerprint=fingerprint,
            )
        elif any(view.new for view in views):
            mapping = plan.reading.mapping
            together(ranks, lambda: own.make_tensors(mapping))
        read, received, values = self._carried_out(plan)
        if any(view.objects for view in views):
            together(ranks, lambda: own.give(values.values))
        else:
            own.give(values.values)
        if own.request.key:
            PLANS.put(own.request.key, plan)
        note_position(own.request.source)
        return own.report(plan, values, read, received)

    def _view(self, error: BaseException | None, fingerprint: Fingerprint | None) -> RankView:
        """Describe this rank's request for the others, before planning."""
        host = socket.gethostname()
        if error is not None:
            statement = RankStatement("", problem=sendable(error))
            return RankView(statement, host, objects=False, new=False, fingerprint=fingerprint)
        asked, plan = self._own.request, self._own.saved_plan
        statement = RankStatement(
            str(asked.source),
            {"options": digest(self._options.shared())},
            new_nonce(),
            asked.part.digest,
            plan.generation if plan else b"",
        )
        return RankView(statement, host, bool(asked.owners.objects), bool(asked.new), fingerprint)

    def _planned(self, views: Sequence[RankView]) -> LoadPlan:
        """Plan on each rank, and then assign boxes that several ranks need to readers."""
        own, ranks = self._own, self._ranks
        if self._options.rename is not None:
            require_same_names(ranks, own.catalog)
        alike = len({view.statement.identity for view in views}) == 1
        wanted = own.request.part if alike else wanted_by_all(own.request.part, ranks)
        hosts = [view.host for view in views]
        broadcast = self._options.broadcast
        timed = broadcast == "auto" and ranks.world > 1 and len(set(hosts)) == 1
        plan, speeds = telling(
            ranks, lambda: (own.plan(wanted), measure_speed(own.catalog) if timed else 0.0)
        )
        mapping = plan.reading.mapping
        if mapping.redundant:
            on_first(ranks, lambda: require_nothing_lost(mapping))
        if broadcast == "auto" and ranks.world > 1:
            broadcast = should_broadcast(hosts, speeds)
        if not broadcast or ranks.world == 1:
            return plan
        fill, _ = own.split_tied(plan.reading)
        shared = tuple(assign_readers(fill, ranks, mapping.own))
        reads = own.wanted(places_to_read(fill, shared, ranks.rank))
        return replace(plan, plan=together(ranks, lambda: plan.reading.plan(reads)), shared=shared)

    def _carried_out(self, plan: LoadPlan) -> tuple[int, int, ReadValues]:
        """Read and exchange boxes.

        Returns:
            Bytes read, bytes received, and non-tensor values.
        """
        own, ranks = self._own, self._ranks
        fill, _ = own.split_tied(plan.reading)
        if plan.shared is None:
            (read, values), more = together(
                ranks, lambda: (own.read(plan, fill), own.compare_tied(plan))
            )
            return read + more, 0, values
        places = places_to_read(fill, plan.shared, ranks.rank)
        read, values = together(ranks, lambda: own.read(plan, places))
        received = exchange_boxes(fill, plan.shared, ranks)
        return read + together(ranks, lambda: own.compare_tied(plan)), received, values


@accept_keywords(LoadCall)
def load(state_dict: Target, path: str | TreePath, options: LoadCall) -> LoadReport:
    """Fill *state_dict* from a checkpoint of any format. Call it on all ranks.

    Tensors are filled in place, and sharded tensors get only their local shard. Tensors on the meta
    device are replaced by new ones after all are filled, so a model on that device is loaded
    completely or not at all. Other values are replaced, and ``load_state_dict`` of objects is
    called. Nothing changes until every rank has planned the load. If a read fails later on any
    rank, tensors that are filled in place contain a mix of old and new elements.

    Args:
        state_dict: Nested dictionaries of tensors, DTensors, ShardedTensors, modules and other
            values, or one module.
        path: The checkpoint: a directory, a file or a URL.
        options: All other arguments.

    Returns:
        A report of the values that this rank loaded.

    Raises:
        CkptError: The load failed on some rank. It is raised on every rank.
    """
    group = coordinator(options.process_group)
    ranks = group if options.collectives else Alone()
    error: BaseException | None = None
    with ExitStack() as stack, pause_gc():  # a garbage collection takes 0.15 s with torch
        try:
            stack.enter_context(families.use_converter_file(options.converter))
        except BaseException as failure:  # the other ranks wait for it
            error = failure
        return CollectiveLoad(ranks, group, options).into(state_dict, path, error)
