"""torchsnapshot directories, with ``.snapshot_metadata`` and files of raw tensor bytes.

Source: torchsnapshot 0.1.0, ``manifest.py`` (entries), ``flatten.py`` (paths), ``batcher.py``
(files of many tensors). The path of an entry starts with the rank that saved it. Replicated and
sharded entries belong to all ranks.
"""

from __future__ import annotations

import re

from ckptctl.catalog import Catalog
from ckptctl.formats.base import DEFAULT_READ_OPTIONS, Format, Listing, ReadOptions
from ckptctl.tree import TreePath

MANIFEST = ".snapshot_metadata"


class TorchSnapshotFormat(Format):
    """A torchsnapshot directory, which contains ``.snapshot_metadata``."""

    name = "torchsnapshot"
    title = "torchsnapshot directory"
    recognized = "`.snapshot_metadata`"
    marks = re.compile(re.escape(MANIFEST))
    data_folders = re.compile(r"\d+|batched|(replicated_)?sharded|replicated", re.ASCII)
    wholeness = (
        "every file listed in `.snapshot_metadata` exists; the entries fill each file from the "
        "first to the last byte without gaps; shards tile their tensors (changed bytes are not "
        "detected, because there are no checksums)"
    )
    tested = "torchsnapshot 0.1.0 (2-3 ranks)"
    proof = (
        "reading: snapshots of torchsnapshot 0.1.0 equal the live model's weights "
        "(tests/unit/formats/test_torchsnapshot.py); reading: snapshots taken on 2 and 3 ranks "
        "equal the live weights (tests/oracle/trainers/test_frameworks.py)"
    )

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        return MANIFEST if (listing.path / MANIFEST).is_file() else None

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        from ckptctl.formats.torchsnapshot.torchsnapshot_reader import read_catalog

        return read_catalog(path, options, self.name)


FORMAT = TorchSnapshotFormat()
