"""Plans of earlier saves, as a rank keeps them."""

from __future__ import annotations

from dataclasses import dataclass

from ckptctl.catalog import memory_key
from ckptctl.distributed.plan_cache import PlanCache
from ckptctl.formats.dcp.metadata_writer import TensorMetadata
from ckptctl.ops.saving.files import TensorFiles
from ckptctl.ops.saving.values import Groups


@dataclass(slots=True)
class SavedPlan:
    """What a rank keeps of a plan that it has carried out; no position depends on a value.

    Attributes:
        generation: The plan that all ranks made together.
        files: Its tensors in its files.
        groups: Its values by the groups in which ranks compare them.
        metadata: Rank 0 only: of the tensors.
    """

    generation: bytes
    files: TensorFiles
    groups: Groups
    metadata: TensorMetadata | None = None

    @property
    def nbytes(self) -> int:
        """Return about how much memory it takes."""
        return 1000 * len(self.files.plan.records) + (self.metadata.nbytes if self.metadata else 0)


def chunks_of(plan: SavedPlan) -> set[int]:
    """Return the indices of the chunks that a rank writes."""
    transfers = plan.files.plan.transfers
    return {int(memory_key(one.file)) for copy in transfers for one in copy.source.operands}


PLANS = PlanCache[SavedPlan]()
"""The plans of this process."""
