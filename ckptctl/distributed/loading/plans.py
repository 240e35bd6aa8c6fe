"""What a rank keeps of a load for the next one of the same state from the same checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.distributed.loading.broadcast import Turn
from ckptctl.distributed.plan_cache import PlanCache
from ckptctl.ops.loading.leftovers import Comparison
from ckptctl.ops.loading.reading import Reading, same_index
from ckptctl.ops.loading.sight import Sight
from ckptctl.planner.plan import Plan

NBYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All that is known before a byte moves; nothing in it depends on a value.

    Attributes:
        structure: Digest of what all ranks want, and how, whatever checkpoint it comes from.
        opened: The checkpoint's index.
        reading: What becomes what.
        entries: Where it lies.
        plan: How this rank reads its part.
        comparison: Names of both sides.
        turns: What it shares with other ranks; None: every rank reads for itself.
        again: How it reads what has to be in its memory already; None: nothing has.
        generation: Names the planning of all ranks together.
        sight: The checkpoint as other ranks are told of it; None: there are none.
    """

    structure: bytes
    opened: Catalog
    reading: Reading
    entries: Mapping[str, TensorEntry]
    plan: Plan
    comparison: Comparison
    turns: tuple[Turn, ...] | None = None
    again: Plan | None = None
    generation: bytes = b""
    sight: Sight | None = None

    @property
    def nbytes(self) -> int:
        """Return about how much memory it takes."""
        extents = sum(len(entry.extents) for entry in self.opened.tensors.values())
        return 2000 * len(self.plan.transfers) + 500 * (extents + len(self.opened.tensors))


PLANS = PlanCache[LoadPlan](nbytes=NBYTES)
"""The plans of this process."""


def like(plans: PlanCache[LoadPlan], structure: bytes, opened: Catalog) -> LoadPlan | None:
    """Return a plan for the same state from a checkpoint with the same index, if one is kept.

    Args:
        plans: Where it may be.
        structure: See :class:`LoadPlan`.
        opened: The index.
    """
    for one in plans.plans():
        if one.structure == structure and same_index(one.opened, opened):
            return one
    return None
