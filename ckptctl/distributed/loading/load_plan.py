"""Planning, reading and reporting of a load on one rank, without collectives.

A plan does not depend on the elements of tensors, so it is cached and reused for states with the
same structure.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.distributed.loading.broadcast import SharedRead
from ckptctl.distributed.loading.new_tensors import find_missing_tied_names, with_new_tensors
from ckptctl.distributed.loading.request import LoadRequest, RequestedLeaves, open_rank_local_part
from ckptctl.distributed.loading.state_options import LoadCallOptions
from ckptctl.distributed.loading.target_memory import (
    TiedShard,
    build_comparison_sinks,
    build_comparison_targets,
    build_memory_by_name,
    build_requested_tensors,
    execute_load_plan,
    split_tied,
)
from ckptctl.distributed.plan_cache import PlanCache
from ckptctl.distributed.state import TensorShard
from ckptctl.distributed.values import (
    LoadedValues,
    format_skipped_values,
    map_to_stored_names,
    read_values,
)
from ckptctl.errors import quote_names
from ckptctl.planner.plan import Plan
from ckptctl.save_load.loading.identity import Fingerprint
from ckptctl.save_load.loading.key_comparison import (
    apply_strictness,
    build_load_report,
    compare_keys,
    list_inherited_values,
    require_equal_keys,
    require_same_kinds,
    with_rank_tensors,
)
from ckptctl.save_load.loading.load_options import LoadReport
from ckptctl.save_load.loading.reading import (
    PreparedRead,
    has_same_index,
    has_same_locations,
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
    """Load plan of one rank, which can be reused because it does not depend on any elements."""

    structure_digest: bytes  # digest of the requests and options of all ranks, for any checkpoint
    catalog: Catalog
    reading: PreparedRead
    entries: Mapping[str, TensorEntry]  # locations of the tensors
    plan: Plan
    key_comparison: LoadReport  # report with only the comparison of keys
    # Boxes read for several ranks, or None if each rank reads for itself.
    shared_reads: tuple[SharedRead, ...] | None = None
    # Plan that reads tied shards to compare them, or None if there are none.
    comparison_plan: Plan | None = None
    generation: bytes = b""
    # Identity of the checkpoint to compare with other ranks, or None for a single process.
    fingerprint: Fingerprint | None = None

    @property
    def nbytes(self) -> int:
        """Approximate memory size of the plan in bytes."""
        extents = sum(len(entry.extents) for entry in self.catalog.tensors.values())
        return 2000 * len(self.plan.transfers) + 500 * (extents + len(self.catalog.tensors))


LOAD_PLANS = PlanCache[CachedLoadPlan](nbytes=CACHE_BYTES)
"""Cache of the load plans that this process has made."""


class RankLoad:
    """Load of one rank, with methods that plan, read and report it.

    Attributes:
        request: Request of the rank, with new tensors once they are allocated.
        cached_plan: Cached plan for the request, or None if there is none.
        catalog: The checkpoint, or only the part that this rank saved.
        all_ranks: Whether all ranks of the group take part in the load.
    """

    def __init__(
        self, request: LoadRequest, options: LoadCallOptions, rank: int, *, all_ranks: bool
    ) -> None:
        self.request = request
        self.all_ranks = all_ranks
        self._rank = rank
        self._options = options
        self._values: LoadedValues | None = None
        self._out_of_range: dict[str, OutOfRange] = {}
        self.cached_plan = LOAD_PLANS.get(request.key) if request.key else None
        self._rank_local_catalog: Catalog | None = None
        if self.cached_plan:
            self.catalog = self.cached_plan.catalog
        else:
            if not all_ranks:
                self._rank_local_catalog = open_rank_local_part(
                    request.source, rank, request.state, options
                )
            self.catalog = self._rank_local_catalog or options.open_catalog(request.source)

    def make_plan(self, requested_by_all: RequestedLeaves) -> CachedLoadPlan:
        """Plan the load under the assumption that this rank reads all data that it needs."""
        catalog = self.catalog
        structure = compute_digest(
            (self.request.structure or os.urandom(16), requested_by_all.digest)
        )
        candidates = (
            candidate
            for candidate in LOAD_PLANS.list_plans()
            if candidate.structure_digest == structure
        )
        cached = next(
            (candidate for candidate in candidates if has_same_index(candidate.catalog, catalog)),
            None,
        )
        if cached:
            key_comparison, reading = cached.key_comparison, cached.reading.with_catalog(catalog)
            self.allocate_new_tensors(reading.mapping)
        else:
            key_comparison, reading = self._compare_and_prepare(requested_by_all)
        shards_to_read, tied = self.separate_tied_shards(reading)
        requested_tensors = self.build_targets(shards_to_read)
        entries = reading.locate_tensors(requested_tensors)
        checksum = self._options.checksum
        if (
            cached
            and cached.shared_reads is None
            and has_same_locations(cached.entries, entries, checksum)
        ):
            plan = relocate_plan(cached.plan, catalog)
        else:
            plan = reading.plan_located_tensors(requested_tensors, entries)
        self._values = self._read_values(reading.mapping)
        comparison_plan = None
        if tied:
            comparison_plan = reading.plan_tensors(
                build_comparison_targets(tied, self.build_targets(self.request.shards))
            )
        return CachedLoadPlan(
            structure,
            catalog,
            reading,
            entries,
            plan,
            key_comparison,
            comparison_plan=comparison_plan,
        )

    def _compare_and_prepare(
        self, requested_by_all: RequestedLeaves
    ) -> tuple[LoadReport, PreparedRead]:
        mapping = map_state(self.catalog, requested_by_all.tensors, self._options.mapping)
        require_same_kinds(mapping, requested_by_all.tensors, requested_by_all.values)
        paths = {name: leaf.path for name, leaf in requested_by_all.tensors.items()}
        key_comparison = compare_keys(mapping, paths, requested_by_all.values)
        strict = self._options.strict
        if strict and (key_comparison.missing or key_comparison.unexpected):
            # A single rank does not know which tensors the other ranks load.
            comparison = (
                key_comparison
                if self.all_ranks or self._rank_local_catalog
                else replace(key_comparison, unexpected=())
            )
            tied = find_missing_tied_names(self.request.state, mapping.tensors)
            comparison = replace(
                comparison, missing=tuple(name for name in comparison.missing if name not in tied)
            )
            require_equal_keys(apply_strictness(comparison, strict, mapping), mapping)
        self.allocate_new_tensors(mapping)
        names = {*requested_by_all.tensors, *requested_by_all.values}
        mapping = with_rank_tensors(mapping, self.request.state.regular_names, self._rank, names)
        requested_tensors = self.build_targets(self.request.shards)
        reading = prepare_read(
            mapping,
            requested_tensors,
            cast=self._options.cast,
            covers_tensors=not self._rank_local_catalog,
        )
        return key_comparison, reading

    def allocate_new_tensors(self, mapping: StateMapping) -> None:
        """Allocate new tensors for tensors of the state that cannot be filled in place."""
        if self.request.new_tensor_devices:
            self.request = with_new_tensors(self.request, mapping, self._options)

    def build_targets(self, shards: Sequence[TensorShard]) -> dict[str, RequestedTensor]:
        """Describe *shards* of the state as tensors that a plan must read."""
        return build_requested_tensors(self.request.requested_leaves.tensors, shards)

    def separate_tied_shards(
        self, reading: PreparedRead
    ) -> tuple[list[TensorShard], list[TiedShard]]:
        """Split the shards into shards to read and tied shards to compare after the read."""
        request = self.request
        return split_tied(request.shards, request.first_indices, request.overlaps, reading.mapping)

    def read_tensors(
        self, plan: CachedLoadPlan, shards: Sequence[TensorShard]
    ) -> tuple[int, LoadedValues]:
        """Read *shards*, and return the number of tensor bytes read and the non-tensor values."""
        once = plan.shared_reads is not None
        read = execute_load_plan(build_memory_by_name(shards), plan.plan, self._options, once=once)
        self._require_in_range(read.lost)
        return read.bytes_read, self._values or self._read_values(plan.reading.mapping)

    def compare_tied(self, plan: CachedLoadPlan) -> int:
        """Compare the data of tied shards with the filled memory, and return the bytes read."""
        if not plan.comparison_plan:
            return 0
        shards_to_read, tied = self.separate_tied_shards(plan.reading)
        views = build_comparison_sinks(tied, shards_to_read, str(plan.catalog.path))
        read = execute_load_plan(views, plan.comparison_plan, self._options)
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
        """Store *values* and new tensors in the state, and load the state of its objects."""
        request, state = self.request, self.request.state
        request.owners.apply_loaded(
            request.state_dict,
            {state.values[name].path: value for name, value in values.items()},
            {
                state.tensors[name].meta.path: tensor
                for name, tensor in request.allocated_tensors.items()
            },
        )

    def build_report(
        self, plan: CachedLoadPlan, values: LoadedValues, read: int, received: int
    ) -> LoadReport:
        """Build the report of the load, and log a warning for values that were not loaded."""
        mapping, state = plan.reading.mapping, self.request.state
        tensors = (name for name in state.tensors if name in mapping.tensors)
        report = build_load_report(
            plan.key_comparison, mapping, (*tensors, *values.values), plan.reading.cast
        )
        stored_names = map_to_stored_names(mapping, state.values, self._rank)
        rank_local_names = [other for other in stored_names.values() if other in report.left_out]
        rank_local_names += [f"rank_{self._rank}.{name}" for name in mapping.rank_tensors]
        inherited_names = list_inherited_values(
            mapping, (*state.regular_names, *state.values), self._rank
        )
        if inherited_names:
            _log.warning(
                "rank %d did not take part in the save, so it loaded the values of rank 0 for %s",
                self._rank,
                quote_names(inherited_names),
            )
        if values.refused:
            _log.warning("%s", format_skipped_values(values.refused))
        notes = (
            [f"loaded the values of this rank for {quote_names(rank_local_names)}"]
            if rank_local_names
            else []
        )
        meta_tensors = tuple(self.request.owners.list_meta_tensors())
        if meta_tensors:
            _log.warning(
                "still on the meta device, because the checkpoint does not contain them: %s",
                quote_names(meta_tensors),
            )
        return replace(
            report,
            left_out={**report.left_out, **values.refused},
            notes=(*report.notes, *notes),
            bytes_read=read,
            bytes_received=received,
            inherited=inherited_names,
            out_of_range=self._out_of_range,
            on_meta=meta_tensors,
        )
