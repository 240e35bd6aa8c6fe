"""The plan of a load, and the plans of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.distributed.loading.broadcast import SharedRead
from ckptctl.distributed.plan_cache import PlanCache
from ckptctl.ops.loading.identity import Fingerprint
from ckptctl.ops.loading.options import LoadReport
from ckptctl.ops.loading.reading import Reading
from ckptctl.planner.plan import Plan

NBYTES = 1 << 28


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
