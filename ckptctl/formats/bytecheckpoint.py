"""ByteCheckpoint directories, which are DCP directories that store each tensor as raw bytes.

Source: bytecheckpoint 0.0.2, ``checkpointer/meta_type.py``. ``.metadata`` is a pickle of
ByteCheckpoint's ``Metadata`` class. In addition to DCP's fields, it has ``all_tensor_metadata``,
which maps each item to the pickle that ``torch.save`` would have stored next to the storage.
"""

from __future__ import annotations

import re

from ckptctl.catalog import Catalog
from ckptctl.formats.base import DEFAULT_READ_OPTIONS, Listing, ReadOptions
from ckptctl.formats.dcp import METADATA, ItemFormat
from ckptctl.tree import TreePath

CLASS_PREFIX = b"bytecheckpoint."
"""Module prefix of the class name near the start of the pickle ``.metadata``."""


class ByteCheckpointFormat(ItemFormat):
    """A ``model/`` or ``optimizer/`` directory that ByteCheckpoint wrote."""

    name = "bytecheckpoint"
    title = "ByteCheckpoint directory: global_step_N/model or global_step_N/optimizer"
    recognized = "a `.metadata` file that refers to ByteCheckpoint's metadata class"
    marks = re.compile(re.escape(METADATA))
    specializes = frozenset({"dcp"})
    wholeness = (
        "the chunks in `.metadata` tile every tensor; they fill each file from the first to the "
        "last byte without gaps (changed bytes are not detected, because there are no checksums)"
    )
    tested = "bytecheckpoint 0.0.2 (2 ranks)"
    proof = (
        "reading: tensors saved by bytecheckpoint 0.0.2 on 2 ranks equal the output of its "
        "merge_bcp.py (tests/unit/formats/test_wrappers.py)"
    )

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        metadata = listing.items.get(METADATA)
        if metadata is None or not metadata.is_file():
            return None
        try:
            with metadata.open("rb") as file:
                has_class = CLASS_PREFIX in file.read(64)
        except OSError:
            return None  # the error is reported when the file is read
        return f"ByteCheckpoint's {METADATA}" if has_class else None

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        from ckptctl.formats.dcp.bytecheckpoint import read_catalog

        return read_catalog(path, options, self.name)


FORMAT = ByteCheckpointFormat()
