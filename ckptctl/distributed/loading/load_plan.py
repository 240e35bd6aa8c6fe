"""One rank's part of a load: planning, reading and reporting, without collectives.

A plan does not depend on values, so it is cached for states with the same structure.
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
from ckptctl.errors import quote_names
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
    """Complete plan of a rank's load, independent of values."""

    structure: bytes  # digest of the requests and options of all ranks, for any checkpoint
    opened: Catalog
    reading: Reading
    entries: Mapping[str, TensorEntry]  # locations of the tensors
    plan: Plan
    compared: LoadReport  # only the comparison of names
    # Boxes read for several ranks, or None if each rank reads for itself.
    shared: tuple[SharedRead, ...] | None = None
    # Plan that reads shards again to compare them with shared memory, or None.
    again: Plan | None = None
    generation: bytes = b""
    # Identity of the checkpoint for other ranks, or None for a single process.
    fingerprint: Fingerprint | None = None

    @property
    def nbytes(self) -> int:
        """Approximate memory size in bytes."""
        extents = sum(len(entry.extents) for entry in self.opened.tensors.values())
        return 2000 * len(self.plan.transfers) + 500 * (extents + len(self.opened.tensors))


PLANS = PlanCache[LoadPlan](nbytes=NBYTES)
"""Load plans of this process."""


class RankLoad:
    """Load of one rank.

    Attributes:
        request: Request of the rank, with new tensors once they are allocated.
        saved_plan: Cached plan for the request, or None.
        catalog: The checkpoint, or only the part that this rank saved.
        every: Whether all ranks of the group take part in the load.
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
        """Plan the load as if every rank reads for itself."""
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
            # A single rank does not know which tensors the other ranks load.
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
        """Allocate new tensors for those of the state that are replaced."""
        if self.request.new:
            self.request = with_new_tensors(self.request, mapping, self._options)

    def wanted(self, places: Sequence[HeldShard]) -> dict[str, Wanted]:
        """Describe shards of the state as targets of a plan."""
        return wanted_of(self.request.part.tensors, places)

    def split_tied(self, reading: Reading) -> tuple[list[HeldShard], list[Tied]]:
        """Split shards into those to fill, each memory once, and those to compare later."""
        request = self.request
        return split_tied(request.places, request.same, request.meeting, reading.mapping)

    def read(self, plan: LoadPlan, places: Sequence[HeldShard]) -> tuple[int, ReadValues]:
        """Fill *places*, and return the tensor bytes read and the non-tensor values."""
        once = plan.shared is not None
        read = read_into(views_of(places), plan.plan, self._options, once=once)
        self._require_in_range(read.lost)
        return read.bytes_read, self._values or self._read_values(plan.reading.mapping)

    def compare_tied(self, plan: LoadPlan) -> int:
        """Compare shards that share memory with its contents, and return the bytes read."""
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
        """Store values and new tensors in the state, and load the state of objects."""
        request, state = self.request, self.request.state
        request.owners.take(
            request.plain,
            {state.values[name].path: value for name, value in values.items()},
            {state.tensors[name].meta.path: tensor for name, tensor in request.made.items()},
        )

    def report(self, plan: LoadPlan, values: ReadValues, read: int, received: int) -> LoadReport:
        """Build the report of the load, and log values that were not loaded."""
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
                quote_names(of_rank_0),
            )
        if values.refused:
            _log.warning("%s", left_out_note(values.refused))
        notes = [f"loaded the values of this rank for {quote_names(own)}"] if own else []
        on_meta = tuple(self.request.owners.on_meta())
        if on_meta:
            _log.warning(
                "still on the meta device, because the checkpoint does not contain them: %s",
                quote_names(on_meta),
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
