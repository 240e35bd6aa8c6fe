"""``ckptctl.load``: any checkpoint into a state dict that may be sharded over ranks.

Where plans hold there is one exchange before a byte is read, in which ranks agree that they do and
mean the same, and one afterwards, in which they learn that all are done.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace

from ckptctl import families, formats
from ckptctl.catalog import Catalog
from ckptctl.distributed.group import coordinator
from ckptctl.distributed.loading.broadcast import (
    exchange,
    own_reads,
    pays,
    routes,
    share,
    speed_of,
)
from ckptctl.distributed.loading.load_plan import PLANS, LoadPlan
from ckptctl.distributed.loading.new_tensors import tied_names, with_new_tensors
from ckptctl.distributed.loading.options import LoadCall
from ckptctl.distributed.loading.owners import Target
from ckptctl.distributed.loading.request import (
    LoadRequest,
    RankView,
    WantedLeaves,
    agree,
    request,
    require_same_names,
    wanted_by_all,
)
from ckptctl.distributed.loading.target_memory import (
    Tied,
    comparing,
    read_into,
    untied,
    views_of,
    wanted_again,
    wanted_of,
)
from ckptctl.distributed.plan_cache import PlanCache
from ckptctl.distributed.positions import note_position
from ckptctl.distributed.state import HeldShard, State
from ckptctl.distributed.values import (
    ReadValues,
    held_names,
    left_out_note,
    read_values,
)
from ckptctl.errors import listed
from ckptctl.formats.dcp_rank_local import DcpRankLocalFormat, read_rank
from ckptctl.keywords import keywords
from ckptctl.ops.loading.checks import require_nothing_lost
from ckptctl.ops.loading.identity import Fingerprint, fingerprint_of
from ckptctl.ops.loading.key_comparison import (
    as_strict_as,
    compare,
    describe_load,
    inherited,
    require_equal,
    require_kinds,
    with_own,
)
from ckptctl.ops.loading.options import LoadOptions, LoadReport
from ckptctl.ops.loading.reading import Reading, plan_elsewhere, prepare, same_index, same_places
from ckptctl.ops.loading.state_mapping import StateMapping, Wanted, map_state
from ckptctl.ops.ranks.agreement import RankStatement, generation, new_nonce, unchanged
from ckptctl.ops.ranks.coordinator import Alone, Coordinator, on_first, sendable, telling, together
from ckptctl.ops.saving.local_shards import digest
from ckptctl.planner.plan import Plan
from ckptctl.storage.byte_files import Memory
from ckptctl.storage.outcome import OutOfRange
from ckptctl.storage.threads import no_collection
from ckptctl.storage.tree import TreePath

HOW = ("strict", "cast", "allow_overflow", "trusted", "checksum", "jobs")
"""Options of a load that say nothing of the checkpoint."""
_log = logging.getLogger("ckptctl")


class CollectiveLoad:
    """One load."""

    _asked: LoadRequest
    _catalog: Catalog

    def __init__(
        self,
        ranks: Coordinator,
        group: Coordinator,
        how: LoadCall,
        plans: PlanCache[LoadPlan] = PLANS,
    ) -> None:
        self._ranks = ranks
        self._options = how
        self._plans = plans
        self._rank = group.rank
        self._every = ranks.world == group.world
        self._kept: LoadPlan | None = None
        self._hosts: list[str] = []
        self._values: ReadValues | None = None
        self._lost: dict[str, OutOfRange] = {}
        self._fingerprint: Fingerprint | None = None
        self._own_part = False

    def into(
        self,
        target: Target,
        path: str | TreePath,
        error: BaseException | None = None,
    ) -> LoadReport:
        """Load the checkpoint at *path*; *error* is why this rank cannot."""
        try:
            if error is not None:
                raise error
            how = sorted(routes(self._ranks).items())
            here = (self._rank, self._ranks.world, self._every, how)
            self._asked = request(target, path, self._options, here)
            self._kept = self._plans.get(self._asked.key) if self._asked.key else None
            if self._kept:
                self._catalog, self._fingerprint = self._kept.opened, self._kept.fingerprint
            else:
                self._catalog = self._of_this_rank() or self._options.open(self._asked.source)
            if self._fingerprint is None and self._ranks.world > 1:
                self._fingerprint = fingerprint_of(self._catalog)
        except BaseException as failure:
            error = failure
        said = agree(self._ranks, self._options, self._view(error), error)
        self._hosts = [one.host for one in said]
        statements = [one.statement for one in said]
        plan = self._kept
        if plan is None or not unchanged(statements):
            alike = len({one.identity for one in statements}) == 1
            made = generation(statements)
            plan = replace(
                self._planned(alike=alike), generation=made, fingerprint=self._fingerprint
            )
        elif any(one.new for one in said):
            kept = plan
            together(self._ranks, lambda: self._make(kept.reading.mapping))
        read, received, values = self._carried_out(plan)
        if any(one.objects for one in said):
            together(self._ranks, lambda: self._give(values.values))
        else:
            self._give(values.values)
        if self._asked.key:
            self._plans.put(self._asked.key, plan)
        note_position(self._asked.source)
        return self._report(plan, values, read, received)

    def _view(self, error: BaseException | None) -> RankView:
        """Return the view of this rank for the others, before anything is planned."""
        objects = new = False
        if error is None:
            objects, new = bool(self._asked.owners.objects), bool(self._asked.new)
            made = self._kept.generation if self._kept else b""
            statement = RankStatement(
                str(self._asked.source),
                {"options": digest(self._options.shared())},
                new_nonce(),
                self._asked.part.digest,
                made,
            )
        else:
            statement = RankStatement("", problem=sendable(error))
        return RankView(statement, socket.gethostname(), objects, new, self._fingerprint)

    def _planned(self, *, alike: bool) -> LoadPlan:
        if self._options.rename is not None:
            require_same_names(self._ranks, self._catalog)
        part = self._asked.part
        all_of_it = part if alike else wanted_by_all(part, self._ranks)
        plan, speeds = telling(self._ranks, lambda: self._own_plan(all_of_it))
        mapping = plan.reading.mapping
        if mapping.names_to_prove:
            on_first(self._ranks, lambda: require_nothing_lost(mapping))
        broadcast = self._options.broadcast
        if broadcast == "auto" and self._ranks.world > 1:
            broadcast = pays(self._hosts, speeds)
        if not broadcast or self._ranks.world == 1:
            return plan
        fill, _ = self._untied(plan.reading)
        shared = tuple(share(fill, self._ranks, plan.reading.mapping.own))
        reads = self._wanted(own_reads(fill, shared, self._ranks.rank))
        own = together(self._ranks, lambda: plan.reading.plan(reads))
        return replace(plan, plan=own, shared=shared)

    def _own_plan(self, all_of_it: WantedLeaves) -> tuple[LoadPlan, float]:
        """Plan as if every rank read for itself; tell how fast this one does, where that counts."""
        catalog = self._catalog
        structure = digest((self._asked.structure or os.urandom(16), all_of_it.digest))
        alike = (one for one in self._plans.plans() if one.structure == structure)
        known = next((one for one in alike if same_index(one.opened, catalog)), None)
        if known:
            found, reading = known.compared, known.reading.elsewhere(catalog)
            self._make(reading.mapping)
        else:
            found, reading = self._compared(catalog, all_of_it)
        fill, tied = self._untied(reading)
        wanted = self._wanted(fill)
        entries = reading.locate(wanted)
        checksum = self._options.checksum
        if known and known.shared is None and same_places(known.entries, entries, checksum):
            plan = plan_elsewhere(known.plan, catalog)
        else:
            plan = reading.plan_of(wanted, entries)
        self._values = self._read_values(reading)
        again = None
        if tied:
            again = reading.plan(wanted_again(tied, self._wanted(self._asked.places)))
        made = LoadPlan(structure, catalog, reading, entries, plan, found, again=again)
        automatic = self._options.broadcast == "auto" and self._ranks.world > 1
        one_host = len(set(self._hosts)) == 1
        return made, speed_of(catalog) if automatic and one_host else 0.0

    def _compared(self, catalog: Catalog, all_of_it: WantedLeaves) -> tuple[LoadReport, Reading]:
        mapping = map_state(catalog, all_of_it.tensors, self._options.mapping)
        require_kinds(mapping, all_of_it.tensors, all_of_it.values)
        paths = {name: leaf.path for name, leaf in all_of_it.tensors.items()}
        found = compare(mapping, paths, all_of_it.values)
        strict = self._options.strict
        if strict and (found.missing or found.unexpected):
            # A rank by itself cannot know what the others take of what others saved.
            seen = found if self._every or self._own_part else replace(found, unexpected=())
            tied = tied_names(self._asked.state, mapping.tensors)
            seen = replace(seen, missing=tuple(n for n in seen.missing if n not in tied))
            require_equal(as_strict_as(seen, strict, mapping), mapping)
        self._make(mapping)
        wanted = self._wanted(self._asked.places)
        names = {*all_of_it.tensors, *all_of_it.values}
        mapping = with_own(mapping, self._asked.state.plain, self._rank, names)
        return found, prepare(mapping, wanted, cast=self._options.cast, whole=not self._own_part)

    def _make(self, mapping: StateMapping) -> None:
        if self._asked.new:
            self._asked = with_new_tensors(self._asked, mapping, self._options)

    def _wanted(self, places: Sequence[HeldShard]) -> dict[str, Wanted]:
        return wanted_of(self._asked.part.tensors, places)

    def _untied(self, reading: Reading) -> tuple[list[HeldShard], list[Tied]]:
        asked = self._asked
        return untied(asked.places, asked.same, asked.meeting, reading.mapping)

    def _of_this_rank(self) -> Catalog | None:
        """Return the rank-local checkpoint of this rank, if it holds all that the state wants."""
        if self._every or formats.detect(self._asked.source).name != DcpRankLocalFormat.name:
            return None
        found = own_part(self._asked.source, self._rank, self._asked.state, self._options)
        self._own_part = found is not None
        return found

    def _carried_out(self, plan: LoadPlan) -> tuple[int, int, ReadValues]:
        """Read, and exchange with other ranks; return bytes read and received, and values."""
        fill, tied = self._untied(plan.reading)
        shared = plan.shared
        reads = fill if shared is None else own_reads(fill, shared, self._ranks.rank)

        def first() -> tuple[int, ReadValues]:
            values = self._values or self._read_values(plan.reading)
            return self._read(plan.plan, views_of(reads), once=shared is not None), values

        def again() -> int:
            views = comparing(tied, fill, str(plan.opened.path))
            return self._read(plan.again, views) if plan.again else 0

        if shared is None:
            (read, values), more = together(self._ranks, lambda: (first(), again()))
            return read + more, 0, values
        read, values = together(self._ranks, first)
        received = exchange(fill, shared, self._ranks)
        return read + together(self._ranks, again), received, values

    def _read(self, plan: Plan, views: Mapping[str, Memory], *, once: bool = False) -> int:
        done = read_into(views, plan, self._options, once=once)
        self._lost |= done.lost
        self._options.require_in_range(done.lost)
        return done.bytes_read

    def _read_values(self, reading: Reading) -> ReadValues:
        values, asked = self._asked.state.values, self._options
        return read_values(
            reading.mapping,
            values,
            self._rank,
            trusted=asked.trusted,
            strict=asked.strict in (True, "state"),
        )

    def _give(self, values: Mapping[str, object]) -> None:
        """Put other leaves and new tensors where they belong, and give objects their state."""
        asked, state = self._asked, self._asked.state
        asked.owners.take(
            asked.plain,
            {state.values[name].path: value for name, value in values.items()},
            {state.tensors[name].meta.path: tensor for name, tensor in asked.made.items()},
        )

    def _report(self, plan: LoadPlan, values: ReadValues, read: int, received: int) -> LoadReport:
        mapping, state = plan.reading.mapping, self._asked.state
        offered = mapping.tensors
        tensors = (name for name in state.tensors if name in offered)
        report = describe_load(
            plan.compared, mapping, (*tensors, *values.values), plan.reading.cast
        )
        held = held_names(mapping, state.values, self._rank)
        own = [other for other in held.values() if other in report.left_out]
        own += [f"rank_{self._rank}.{name}" for name in mapping.own]
        of_rank_0 = inherited(mapping, (*state.plain, *state.values), self._rank)
        if of_rank_0:
            _log.warning(
                "rank %d did not take part in the save, so it loaded the values of rank 0 for %s",
                self._rank,
                listed(of_rank_0),
            )
        if values.refused:
            _log.warning("%s", left_out_note(values.refused))
        notes = [f"loaded the values of this rank for {listed(own)}"] if own else []
        on_meta = tuple(self._asked.owners.on_meta())
        if on_meta:
            _log.warning(
                "still on the meta device, because the checkpoint does not contain them: %s",
                listed(on_meta),
            )
        return replace(
            report,
            left_out={**report.left_out, **values.refused},
            notes=(*report.notes, *notes),
            bytes_read=read,
            bytes_received=received,
            inherited=of_rank_0,
            out_of_range=self._lost,
            on_meta=on_meta,
        )


def own_part(path: TreePath, rank: int, state: State, options: LoadOptions) -> Catalog | None:
    """Return what *rank* saved at *path* without the others, if that is all that *state* wants."""
    about_it = (field for field in fields(LoadOptions) if field.name not in HOW)
    if any(getattr(options, one.name) != one.default for one in about_it):
        return None
    found = read_rank(path, rank)
    return found if found is not None and _holds(found, state) else None


def _holds(catalog: Catalog, state: State) -> bool:
    """Whether the boxes of *catalog* are those that this rank holds."""
    for name, held in state.tensors.items():
        entry = catalog.tensors.get(name)
        if entry is None:
            return False
        boxes = {extent.box for extent in entry.extents}
        if not all(piece.box in boxes for piece in held.shards):
            return False
    return all(name in catalog.blobs for name in state.values)


@keywords(LoadCall)
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
    with ExitStack() as stack, no_collection():  # with torch around a search takes 0.15 s
        try:
            stack.enter_context(families.using(options.converter))
        except BaseException as failure:  # the other ranks wait to be told
            error = failure
        return CollectiveLoad(ranks, group, options).into(state_dict, path, error)
