"""ByteCheckpoint directories: like DCP's, but the items of tensors are raw storages.

Source: bytecheckpoint 0.0.2, ``checkpointer/meta_type.py``: ``.metadata`` is a pickle of its own
``Metadata``, with the fields of DCP's and ``all_tensor_metadata``: for each item the pickle that
``torch.save`` would have put beside the storage.
"""

from __future__ import annotations

import re

from ckptctl.catalog import Catalog
from ckptctl.formats import dcp
from ckptctl.formats.base import AS_IT_IS, ReadOptions, Sniff
from ckptctl.formats.dcp import METADATA, ItemFormat
from ckptctl.storage.tree import TreePath


class ByteCheckpointFormat(ItemFormat):
    """One of ByteCheckpoint's directories: ``model/`` or ``optimizer/``."""

    name = "bytecheckpoint"
    title = "ByteCheckpoint directory: global_step_N/model or global_step_N/optimizer"
    recognized = "a `.metadata` file that refers to ByteCheckpoint's metadata class"
    marks = re.compile(re.escape(METADATA))
    wholeness = (
        "the chunks in `.metadata` tile every tensor; they fill each file from the first to the "
        "last byte without gaps (changed bytes are not detected, because there are no checksums)"
    )
    tested = "bytecheckpoint 0.0.2 (2 ranks)"
    proof = (
        "reading: tensors saved by bytecheckpoint 0.0.2 on 2 ranks equal the output of its "
        "merge_bcp.py (tests/unit/formats/test_wrappers.py)"
    )

    def sniff(self, path: TreePath) -> Sniff | None:
        """See :meth:`Format.sniff`."""
        if not path.is_dir() or not (path / METADATA).is_file():
            return None
        return Sniff(f"ByteCheckpoint's {METADATA}") if dcp.is_bytecheckpoint(path) else None

    def read(self, path: TreePath, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        from ckptctl.formats.dcp.bytecheckpoint import read

        return read(path, asked, self.name)


FORMAT = ByteCheckpointFormat()
