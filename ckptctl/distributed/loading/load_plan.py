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
from ckptctl.distributed.loading.new_tensors import find_tied_names, with_new_tensors
from ckptctl.distributed.loading.request import LoadRequest, WantedLeaves, read_own_part
from ckptctl.distributed.loading.state_options import LoadCallOptions
from ckptctl.distributed.loading.target_memory import (
    TiedShard,
    build_comparison_targets,
    build_comparison_views,
    build_views,
    build_wanted,
    read_into,
    split_tied,
)
from ckptctl.distributed.plan_cache import PlanCache
from ckptctl.distributed.state import TensorShard
from ckptctl.distributed.values import (
    LoadedValues,
    format_skipped_values,
    match_stored_names,
    read_values,
)
from ckptctl.errors import quote_names
from ckptctl.planner.plan import Plan
from ckptctl.save_load.loading.identity import Fingerprint
from ckptctl.save_load.loading.key_comparison import (
    apply_strictness,
    compare_keys,
    describe_load,
    list_inherited,
    require_equal_keys,
    require_kinds,
    with_rank_tensors,
)
from ckptctl.save_load.loading.load_options import LoadReport
from ckptctl.save_load.loading.reading import (
    PreparedRead,
    has_same_index,
    has_same_places,
    prepare_read,
    relocate_plan,
)
from ckptctl.save_load.loading.state_mapping import RequestedTensor, StateMapping, map_state
from ckptctl.save_load.saving.local_shards import compute_digest
from ckptctl.storage.outcome import OutOfRange

CACHE_BYTES = 1 << 28
_log = logging.getLogger("ckptctl")


@dataclass(frozen=True, slots=True)
class CachedLoadPlan:
    """Complete plan of a rank's load, independent of values."""

    structure: bytes  # digest of the requests and options of all ranks, for any checkpoint
    opened: Catalog
    reading: PreparedRead
    entries: Mapping[str, TensorEntry]  # locations of the tensors
    plan: Plan
    compared: LoadReport  # report with only the comparison of keys
    # Boxes read for several ranks, or None if each rank reads for itself.
    shared: tuple[SharedRead, ...] | None = None
    # Plan that reads tied shards to compare them, or None if there are none.
    comparison_plan: Plan | None = None
    generation: bytes = b""
    # Identity of the checkpoint to compare with other ranks, or None for a single process.
    fingerprint: Fingerprint | None = None

    @property
    def nbytes(self) -> int:
        """Approximate memory size in bytes."""
        extents = sum(len(entry.extents) for entry in self.opened.tensors.values())
        return 2000 * len(self.plan.transfers) + 500 * (extents + len(self.opened.tensors))


LOAD_PLANS = PlanCache[CachedLoadPlan](nbytes=CACHE_BYTES)
"""Load plans of this process."""


class RankLoad:
    """Planning, reading and reporting of one rank's load.

    Attributes:
        request: Request of the rank, with new tensors once they are allocated.
        cached_plan: Cached plan for the request, or None if there is none.
        catalog: The checkpoint, or only the part that this rank saved.
        all_ranks: Whether all ranks of the group take part in the load.
    """

    def __init__(
        self, request: LoadRequest, options: LoadCallOptions, rank: int, *, every: bool
    ) -> None:
        self.request = request
        self.all_ranks = every
        self._rank = rank
        self._options = options
        self._values: LoadedValues | None = None
        self._out_of_range: dict[str, OutOfRange] = {}
        self.saved_plan = LOAD_PLANS.get(request.key) if request.key else None
        self._rank_local_catalog: Catalog | None = None
        if self.saved_plan:
            self.catalog = self.saved_plan.opened
        else:
            if not every:
                self._rank_local_catalog = read_own_part(
                    request.source, rank, request.state, options
                )
            self.catalog = self._rank_local_catalog or options.open_catalog(request.source)

    def make_plan(self, wanted_by_all: WantedLeaves) -> CachedLoadPlan:
        """Plan the load as if every rank reads all its data itself."""
        catalog = self.catalog
        structure = compute_digest((self.request.structure or os.urandom(16), wanted_by_all.digest))
        candidates = (
            candidate for candidate in LOAD_PLANS.list_plans() if candidate.structure == structure
        )
        cached = next(
            (candidate for candidate in candidates if has_same_index(candidate.opened, catalog)),
            None,
        )
        if cached:
            compared, reading = cached.compared, cached.reading.with_catalog(catalog)
            self.allocate_new_tensors(reading.mapping)
        else:
            compared, reading = self._compare_names(wanted_by_all)
        fill, tied = self.split_tied(reading)
        wanted = self.build_targets(fill)
        entries = reading.locate_tensors(wanted)
        checksum = self._options.checksum
        if cached and cached.shared is None and has_same_places(cached.entries, entries, checksum):
            plan = relocate_plan(cached.plan, catalog)
        else:
            plan = reading.plan_located(wanted, entries)
        self._values = self._read_values(reading.mapping)
        comparison_plan = None
        if tied:
            comparison_plan = reading.plan_tensors(
                build_comparison_targets(tied, self.build_targets(self.request.places))
            )
        return CachedLoadPlan(
            structure, catalog, reading, entries, plan, compared, comparison_plan=comparison_plan
        )

    def _compare_names(self, wanted_by_all: WantedLeaves) -> tuple[LoadReport, PreparedRead]:
        mapping = map_state(self.catalog, wanted_by_all.tensors, self._options.mapping)
        require_kinds(mapping, wanted_by_all.tensors, wanted_by_all.values)
        paths = {name: leaf.path for name, leaf in wanted_by_all.tensors.items()}
        compared = compare_keys(mapping, paths, wanted_by_all.values)
        strict = self._options.strict
        if strict and (compared.missing or compared.unexpected):
            # A single rank does not know which tensors the other ranks load.
            comparison = (
                compared
                if self.all_ranks or self._rank_local_catalog
                else replace(compared, unexpected=())
            )
            tied = find_tied_names(self.request.state, mapping.tensors)
            comparison = replace(
                comparison, missing=tuple(name for name in comparison.missing if name not in tied)
            )
            require_equal_keys(apply_strictness(comparison, strict, mapping), mapping)
        self.allocate_new_tensors(mapping)
        names = {*wanted_by_all.tensors, *wanted_by_all.values}
        mapping = with_rank_tensors(mapping, self.request.state.regular_names, self._rank, names)
        wanted = self.build_targets(self.request.places)
        reading = prepare_read(
            mapping, wanted, cast=self._options.cast, covers_tensors=not self._rank_local_catalog
        )
        return compared, reading

    def allocate_new_tensors(self, mapping: StateMapping) -> None:
        """Allocate the tensors that replace tensors of the state."""
        if self.request.new:
            self.request = with_new_tensors(self.request, mapping, self._options)

    def build_targets(self, places: Sequence[TensorShard]) -> dict[str, RequestedTensor]:
        """Describe shards of the state as targets of a plan."""
        return build_wanted(self.request.part.tensors, places)

    def split_tied(self, reading: PreparedRead) -> tuple[list[TensorShard], list[TiedShard]]:
        """Split the shards into those to read and tied ones to compare afterwards."""
        request = self.request
        return split_tied(request.places, request.first_indices, request.overlaps, reading.mapping)

    def read_tensors(
        self, plan: CachedLoadPlan, places: Sequence[TensorShard]
    ) -> tuple[int, LoadedValues]:
        """Read into *shards*, and return the bytes read for tensors and the non-tensor values."""
        once = plan.shared is not None
        read = read_into(build_views(places), plan.plan, self._options, once=once)
        self._require_in_range(read.lost)
        return read.bytes_read, self._values or self._read_values(plan.reading.mapping)

    def compare_tied(self, plan: CachedLoadPlan) -> int:
        """Compare tied shards with the memory that they share, and return the bytes read."""
        if not plan.comparison_plan:
            return 0
        fill, tied = self.split_tied(plan.reading)
        views = build_comparison_views(tied, fill, str(plan.opened.path))
        read = read_into(views, plan.comparison_plan, self._options)
        self._require_in_range(read.lost)
        return read.bytes_read

    def _require_in_range(self, out_of_range: Mapping[str, OutOfRange]) -> None:
        self._out_of_range |= out_of_range
        self._options.require_in_range(out_of_range)

    def _read_values(self, mapping: StateMapping) -> LoadedValues:
        return read_values(
            mapping,
            self.request.state.values,
            self._rank,
            trusted=self._options.trusted,
            strict=self._options.strict in (True, "state"),
        )

    def apply_values(self, values: Mapping[str, object]) -> None:
        """Store values and new tensors in the state, and load the state of objects."""
        request, state = self.request, self.request.state
        request.owners.apply_loaded(
            request.state_dict,
            {state.values[name].path: value for name, value in values.items()},
            {state.tensors[name].meta.path: tensor for name, tensor in request.made.items()},
        )

    def build_report(
        self, plan: CachedLoadPlan, values: LoadedValues, read: int, received: int
    ) -> LoadReport:
        """Build the report of the load, and log values that were not loaded."""
        mapping, state = plan.reading.mapping, self.request.state
        tensors = (name for name in state.tensors if name in mapping.tensors)
        report = describe_load(
            plan.compared, mapping, (*tensors, *values.values), plan.reading.cast
        )
        stored_names = match_stored_names(mapping, state.values, self._rank)
        own_names = [other for other in stored_names.values() if other in report.left_out]
        own_names += [f"rank_{self._rank}.{name}" for name in mapping.rank_tensors]
        of_rank_0 = list_inherited(mapping, (*state.regular_names, *state.values), self._rank)
        if of_rank_0:
            _log.warning(
                "rank %d did not take part in the save, so it loaded the values of rank 0 for %s",
                self._rank,
                quote_names(of_rank_0),
            )
        if values.refused:
            _log.warning("%s", format_skipped_values(values.refused))
        notes = (
            [f"loaded the values of this rank for {quote_names(own_names)}"] if own_names else []
        )
        on_meta = tuple(self.request.owners.list_meta_tensors())
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
            out_of_range=self._out_of_range,
            on_meta=on_meta,
        )
