"""Loading any checkpoint into a state dict that may be sharded (``ckptctl.load``).

If the ranks reuse cached plans, they communicate twice. Before reading, they agree on the
checkpoint and on the plans. After reading, they confirm that every rank has finished.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from ckptctl import families
from ckptctl.distributed.group import get_rank_collectives
from ckptctl.distributed.loading.broadcast import (
    assign_readers,
    exchange_boxes,
    get_transfer_devices,
    measure_read_speed,
    select_shards_to_read,
    should_broadcast,
)
from ckptctl.distributed.loading.load_plan import LOAD_PLANS, CachedLoadPlan, RankLoad
from ckptctl.distributed.loading.owners import LoadTarget
from ckptctl.distributed.loading.request import (
    RankRequest,
    agree_on_load,
    build_request,
    merge_requested_leaves,
    require_same_renamed_keys,
)
from ckptctl.distributed.loading.state_options import LoadCallOptions
from ckptctl.distributed.positions import record_visited_checkpoint
from ckptctl.distributed.values import LoadedValues
from ckptctl.keywords import accept_keywords
from ckptctl.ranks.coordinator import (
    RankCollectives,
    SingleProcess,
    run_and_all_gather,
    run_on_all_ranks,
    run_on_rank_zero,
    to_sendable_error,
)
from ckptctl.save_load.loading.checks import require_nothing_lost
from ckptctl.save_load.loading.identity import Fingerprint, make_fingerprint
from ckptctl.save_load.loading.load_options import LoadReport
from ckptctl.save_load.rank_agreement import (
    RankStatement,
    are_cached_plans_valid,
    compute_generation,
    make_nonce,
)
from ckptctl.save_load.saving.local_shards import compute_digest
from ckptctl.storage.threads import pause_gc
from ckptctl.tree import TreePath


class CollectiveLoad:
    """Collective operation in which all ranks load one checkpoint."""

    _rank_load: RankLoad

    def __init__(
        self, ranks: RankCollectives, group: RankCollectives, options: LoadCallOptions
    ) -> None:
        self._ranks = ranks
        self._options = options
        self._rank = group.rank
        self._all_ranks = ranks.world == group.world

    def load_into(
        self, target: LoadTarget, path: str | TreePath, error: BaseException | None = None
    ) -> LoadReport:
        """Load the checkpoint at *path*, or raise on all ranks.

        Args:
            target: State to fill.
            path: Path or URL of the checkpoint.
            error: Earlier failure of this rank, if any, raised on all ranks.
        """
        ranks = self._ranks
        fingerprint: Fingerprint | None = None
        try:
            if error is not None:
                raise error
            rank_context = (
                self._rank,
                ranks.world,
                self._all_ranks,
                sorted(get_transfer_devices(ranks).items()),
            )
            load_request = build_request(target, path, self._options, rank_context)
            self._rank_load = rank_load = RankLoad(
                load_request, self._options, self._rank, all_ranks=self._all_ranks
            )
            fingerprint = rank_load.cached_plan.fingerprint if rank_load.cached_plan else None
            if fingerprint is None and ranks.world > 1:
                fingerprint = make_fingerprint(rank_load.catalog)
        except BaseException as failure:
            error = failure
        rank_requests = agree_on_load(
            ranks, self._options, self._describe_request(error, fingerprint), error
        )
        statements = [view.statement for view in rank_requests]
        rank_load, plan = self._rank_load, self._rank_load.cached_plan
        if plan is None or not are_cached_plans_valid(statements):
            plan = replace(
                self._make_plan(rank_requests),
                generation=compute_generation(statements),
                fingerprint=fingerprint,
            )
        elif any(view.has_new_tensors for view in rank_requests):
            mapping = plan.reading.mapping
            run_on_all_ranks(ranks, lambda: rank_load.allocate_new_tensors(mapping))
        read, received, values = self._read_and_exchange(plan)
        if any(view.has_objects for view in rank_requests):
            run_on_all_ranks(ranks, lambda: rank_load.apply_values(values.values))
        else:
            rank_load.apply_values(values.values)
        if rank_load.request.key:
            LOAD_PLANS.put(rank_load.request.key, plan)
        record_visited_checkpoint(rank_load.request.source)
        return rank_load.build_report(plan, values, read, received)

    def _describe_request(
        self, error: BaseException | None, fingerprint: Fingerprint | None
    ) -> RankRequest:
        """Describe this rank's load for the other ranks, before any rank plans it."""
        host = socket.gethostname()
        if error is not None:
            statement = RankStatement("", problem=to_sendable_error(error))
            return RankRequest(
                statement, host, has_objects=False, has_new_tensors=False, fingerprint=fingerprint
            )
        load_request, plan = self._rank_load.request, self._rank_load.cached_plan
        statement = RankStatement(
            str(load_request.source),
            {"options": compute_digest(self._options.collect_shared_options())},
            make_nonce(),
            load_request.requested_leaves.digest,
            plan.generation if plan else b"",
        )
        return RankRequest(
            statement,
            host,
            bool(load_request.owners.objects),
            bool(load_request.new_tensor_devices),
            fingerprint,
        )

    def _make_plan(self, rank_requests: Sequence[RankRequest]) -> CachedLoadPlan:
        """Plan the load on every rank, and choose a reader for each box that several ranks need."""
        rank_load, ranks = self._rank_load, self._ranks
        if self._options.rename is not None:
            require_same_renamed_keys(ranks, rank_load.catalog)
        is_same_request = len({view.statement.identity for view in rank_requests}) == 1
        requested_by_all = (
            rank_load.request.requested_leaves
            if is_same_request
            else merge_requested_leaves(rank_load.request.requested_leaves, ranks)
        )
        hosts = [view.host for view in rank_requests]
        broadcast = self._options.broadcast
        is_measured = broadcast == "auto" and ranks.world > 1 and len(set(hosts)) == 1
        plan, speeds = run_and_all_gather(
            ranks,
            lambda: (
                rank_load.make_plan(requested_by_all),
                measure_read_speed(rank_load.catalog) if is_measured else 0.0,
            ),
        )
        mapping = plan.reading.mapping
        if mapping.redundant:
            run_on_rank_zero(ranks, lambda: require_nothing_lost(mapping))
        if broadcast == "auto" and ranks.world > 1:
            broadcast = should_broadcast(hosts, speeds)
        if not broadcast or ranks.world == 1:
            return plan
        shards_to_read, _ = rank_load.separate_tied_shards(plan.reading)
        shared = tuple(assign_readers(shards_to_read, ranks, mapping.rank_tensors))
        reads = rank_load.build_targets(select_shards_to_read(shards_to_read, shared, ranks.rank))
        return replace(
            plan,
            plan=run_on_all_ranks(ranks, lambda: plan.reading.plan_tensors(reads)),
            shared_reads=shared,
        )

    def _read_and_exchange(self, plan: CachedLoadPlan) -> tuple[int, int, LoadedValues]:
        """Read the boxes assigned to this rank, and exchange boxes that several ranks need.

        Returns:
            Number of bytes read, number of bytes received, and the non-tensor values.
        """
        rank_load, ranks = self._rank_load, self._ranks
        shards_to_read, _ = rank_load.separate_tied_shards(plan.reading)
        if plan.shared_reads is None:
            (read, values), compared_bytes = run_on_all_ranks(
                ranks,
                lambda: (
                    rank_load.read_tensors(plan, shards_to_read),
                    rank_load.compare_tied(plan),
                ),
            )
            return read + compared_bytes, 0, values
        shards = select_shards_to_read(shards_to_read, plan.shared_reads, ranks.rank)
        read, values = run_on_all_ranks(ranks, lambda: rank_load.read_tensors(plan, shards))
        received = exchange_boxes(shards_to_read, plan.shared_reads, ranks)
        return (
            read + run_on_all_ranks(ranks, lambda: rank_load.compare_tied(plan)),
            received,
            values,
        )


@accept_keywords(LoadCallOptions)
def load(state_dict: LoadTarget, path: str | TreePath, options: LoadCallOptions) -> LoadReport:
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
    group = get_rank_collectives(options.process_group)
    ranks = group if options.collectives else SingleProcess()
    error: BaseException | None = None
    with ExitStack() as stack, pause_gc():  # a garbage collection takes 0.15 s with torch
        try:
            stack.enter_context(families.use_converter_file(options.converter))
        except BaseException as failure:  # the other ranks wait for it
            error = failure
        return CollectiveLoad(ranks, group, options).load_into(state_dict, path, error)
