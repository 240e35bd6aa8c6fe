"""One rank's part of a load: what it plans, reads and reports without the other ranks.

A plan names no value. It is kept for loads of states that are structured alike.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.distributed.loading.broadcast import SharedRead
from ckptctl.distributed.loading.new_tensors import tied_names, with_new_tensors
from ckptctl.distributed.loading.request import LoadRequest, WantedLeaves, own_part
from ckptctl.distributed.loading.state_options import LoadCall
from ckptctl.distributed.loading.target_memory import (
    Tied,
    comparison_views,
    read_into,
    split_tied,
    views_of,
    wanted_again,
    wanted_of,
)
from ckptctl.distributed.plan_cache import PlanCache
from ckptctl.distributed.state import HeldShard
from ckptctl.distributed.values import ReadValues, held_names, left_out_note, read_values
from ckptctl.errors import listed
from ckptctl.planner.plan import Plan
from ckptctl.save_load.loading.identity import Fingerprint
from ckptctl.save_load.loading.key_comparison import (
    as_strict_as,
    compare,
    describe_load,
    inherited,
    require_equal,
    require_kinds,
    with_own,
)
from ckptctl.save_load.loading.load_options import LoadReport
from ckptctl.save_load.loading.reading import (
    Reading,
    plan_elsewhere,
    prepare,
    same_index,
    same_places,
)
from ckptctl.save_load.loading.state_mapping import StateMapping, Wanted, map_state
from ckptctl.save_load.saving.local_shards import digest
from ckptctl.storage.outcome import OutOfRange

NBYTES = 1 << 28
_log = logging.getLogger("ckptctl")


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All that is known before a byte moves; nothing in it depends on a value."""

    structure: bytes  # digest of what all ranks want, and how, whatever checkpoint it comes from
    opened: Catalog
    reading: Reading
    entries: Mapping[str, TensorEntry]  # where it lies
    plan: Plan
    compared: LoadReport  # its names alone
    # What it shares with other ranks; None: every rank reads for itself.
    shared: tuple[SharedRead, ...] | None = None
    # How it reads what has to be in its memory already; None: nothing has.
    again: Plan | None = None
    generation: bytes = b""
    # The checkpoint as other ranks are told of it; None: there are none.
    fingerprint: Fingerprint | None = None

    @property
    def nbytes(self) -> int:
        """Return about how much memory it takes."""
        extents = sum(len(entry.extents) for entry in self.opened.tensors.values())
        return 2000 * len(self.plan.transfers) + 500 * (extents + len(self.opened.tensors))


PLANS = PlanCache[LoadPlan](nbytes=NBYTES)
"""The plans of this process."""


class RankLoad:
    """The part of one rank in a load.

    Attributes:
        request: What it asks for; with new tensors once they are made.
        saved_plan: The plan that it has for that, or None.
        catalog: The checkpoint, or what this rank alone has saved of it.
        every: Whether the ranks that load are all ranks of the group.
    """

    def __init__(self, request: LoadRequest, options: LoadCall, rank: int, *, every: bool) -> None:
        self.request = request
        self.every = every
        self._rank = rank
        self._options = options
        self._values: ReadValues | None = None
        self._lost: dict[str, OutOfRange] = {}
        self.saved_plan = PLANS.get(request.key) if request.key else None
        self._own_part: Catalog | None = None
        if self.saved_plan:
            self.catalog = self.saved_plan.opened
        else:
            if not every:
                self._own_part = own_part(request.source, rank, request.state, options)
            self.catalog = self._own_part or options.open(request.source)

    def plan(self, wanted_by_all: WantedLeaves) -> LoadPlan:
        """Plan as if every rank read for itself."""
        catalog = self.catalog
        structure = digest((self.request.structure or os.urandom(16), wanted_by_all.digest))
        alike = (one for one in PLANS.plans() if one.structure == structure)
        known = next((one for one in alike if same_index(one.opened, catalog)), None)
        if known:
            compared, reading = known.compared, known.reading.elsewhere(catalog)
            self.make_tensors(reading.mapping)
        else:
            compared, reading = self._compared(wanted_by_all)
        fill, tied = self.split_tied(reading)
        wanted = self.wanted(fill)
        entries = reading.locate(wanted)
        checksum = self._options.checksum
        if known and known.shared is None and same_places(known.entries, entries, checksum):
            plan = plan_elsewhere(known.plan, catalog)
        else:
            plan = reading.plan_of(wanted, entries)
        self._values = self._read_values(reading.mapping)
        again = None
        if tied:
            again = reading.plan(wanted_again(tied, self.wanted(self.request.places)))
        return LoadPlan(structure, catalog, reading, entries, plan, compared, again=again)

    def _compared(self, wanted_by_all: WantedLeaves) -> tuple[LoadReport, Reading]:
        mapping = map_state(self.catalog, wanted_by_all.tensors, self._options.mapping)
        require_kinds(mapping, wanted_by_all.tensors, wanted_by_all.values)
        paths = {name: leaf.path for name, leaf in wanted_by_all.tensors.items()}
        compared = compare(mapping, paths, wanted_by_all.values)
        strict = self._options.strict
        if strict and (compared.missing or compared.unexpected):
            # A rank by itself cannot know what the others take of what others saved.
            own = compared if self.every or self._own_part else replace(compared, unexpected=())
            tied = tied_names(self.request.state, mapping.tensors)
            own = replace(own, missing=tuple(name for name in own.missing if name not in tied))
            require_equal(as_strict_as(own, strict, mapping), mapping)
        self.make_tensors(mapping)
        names = {*wanted_by_all.tensors, *wanted_by_all.values}
        mapping = with_own(mapping, self.request.state.plain, self._rank, names)
        wanted = self.wanted(self.request.places)
        reading = prepare(mapping, wanted, cast=self._options.cast, whole=not self._own_part)
        return compared, reading

    def make_tensors(self, mapping: StateMapping) -> None:
        """Make memory for the tensors of the state that are replaced."""
        if self.request.new:
            self.request = with_new_tensors(self.request, mapping, self._options)

    def wanted(self, places: Sequence[HeldShard]) -> dict[str, Wanted]:
        """Return places in the state as targets of a plan."""
        return wanted_of(self.request.part.tensors, places)

    def split_tied(self, reading: Reading) -> tuple[list[HeldShard], list[Tied]]:
        """Return the places to fill, each memory once, and those to compare with it afterwards."""
        request = self.request
        return split_tied(request.places, request.same, request.meeting, reading.mapping)

    def read(self, plan: LoadPlan, places: Sequence[HeldShard]) -> tuple[int, ReadValues]:
        """Read into *places*; return the bytes of tensors read, and the other leaves."""
        once = plan.shared is not None
        read = read_into(views_of(places), plan.plan, self._options, once=once)
        self._require_in_range(read.lost)
        return read.bytes_read, self._values or self._read_values(plan.reading.mapping)

    def compare_tied(self, plan: LoadPlan) -> int:
        """Compare what shares memory with what has filled it; return the bytes read."""
        if not plan.again:
            return 0
        fill, tied = self.split_tied(plan.reading)
        views = comparison_views(tied, fill, str(plan.opened.path))
        read = read_into(views, plan.again, self._options)
        self._require_in_range(read.lost)
        return read.bytes_read

    def _require_in_range(self, lost: Mapping[str, OutOfRange]) -> None:
        self._lost |= lost
        self._options.require_in_range(lost)

    def _read_values(self, mapping: StateMapping) -> ReadValues:
        return read_values(
            mapping,
            self.request.state.values,
            self._rank,
            trusted=self._options.trusted,
            strict=self._options.strict in (True, "state"),
        )

    def give(self, values: Mapping[str, object]) -> None:
        """Put other leaves and new tensors where they belong, and give objects their state."""
        request, state = self.request, self.request.state
        request.owners.take(
            request.plain,
            {state.values[name].path: value for name, value in values.items()},
            {state.tensors[name].meta.path: tensor for name, tensor in request.made.items()},
        )

    def report(self, plan: LoadPlan, values: ReadValues, read: int, received: int) -> LoadReport:
        """Report what was loaded; log what stays as it was."""
        mapping, state = plan.reading.mapping, self.request.state
        tensors = (name for name in state.tensors if name in mapping.tensors)
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
        on_meta = tuple(self.request.owners.on_meta())
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
