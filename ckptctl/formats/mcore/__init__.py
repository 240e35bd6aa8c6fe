"""What ``megatron.core.dist_checkpointing`` writes with its backend ``torch_dist``."""

from __future__ import annotations

from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.formats.base import (
    AS_IT_IS,
    Output,
    OutputRequest,
    ReadOptions,
    Sniff,
    WritableFormat,
)


class McoreFormat(WritableFormat):
    """A directory of Megatron-Core."""

    name = "mcore"
    title = "Megatron-Core: torch_dist, as Megatron-LM, Megatron-Bridge and NeMo 2 save"
    layout = "mcore"
    sharded = True
    stacks = True
    pads = True
    ties = "written in full"

    def sniff(self, path: Path) -> Sniff | None:
        """See :meth:`Format.sniff`."""
        return None

    def read(self, path: Path, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        raise NotImplementedError

    def lay_out(self, request: OutputRequest) -> Output:
        """See :meth:`WritableFormat.lay_out`."""
        from ckptctl.formats.mcore.writing import lay_out  # which only those that write need

        return lay_out(request)


FORMAT = McoreFormat()
