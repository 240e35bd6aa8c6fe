"""``torch_checkpointing`` directories, with one file per top-level item and rank.

Source: torch_checkpointing 0.1.1 (``<item>_<rank>.pt``, ``LayoutInfo``).
"""

from __future__ import annotations

from ckptctl.catalog import Catalog
from ckptctl.errors import DamagedError, quote_names
from ckptctl.formats.base import DEFAULT_READ_OPTIONS, Format, Listing, ReadOptions, require_folder
from ckptctl.formats.torch_checkpointing.item_files import (
    ITEM_FILE,
    METADATA,
    NAME,
    is_item_file,
)
from ckptctl.tree import TreePath

UNFINISHED_PREFIX = "tmp_"


class TorchCheckpointingFormat(Format):
    """A directory with one file per top-level item and rank."""

    name = NAME
    title = "torch_checkpointing: one file per item and rank"
    recognized = (
        "`metadata.pkl` next to files such as `model_0.pt`; a folder of only such files, without "
        "`.metadata`"
    )
    marks = ITEM_FILE
    wholeness = (
        "`metadata.pkl` lists the tensors and ranks of items that can be resharded; every item "
        "has the files of all ranks that `metadata.pkl` or a DTensor's mesh records; items "
        "without tensors may exist only on rank 0 (truncated `.bin` files are not detected, nor "
        "are non-reshardable items missing on all ranks); shards tile their tensors, and "
        "replicas have equal checksums"
    )
    tested = "torch_checkpointing 0.1.1 (1-4 ranks)"
    proof = (
        "reading: checkpoints of torch_checkpointing 0.1.1 on 1 and 2 ranks equal the live state,"
        " with and without `metadata.pkl` (tests/unit/formats/test_torch_checkpointing.py); "
        "reading: checkpoints saved on 2 to 4 ranks equal the live state "
        "(tests/oracle/trainers/test_frameworks.py)"
    )

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        if listing.has_file(".metadata"):
            return None
        names = listing.files
        item_files = [
            name for name in names if (match := ITEM_FILE.fullmatch(name)) and is_item_file(match)
        ]
        if METADATA in names:
            return quote_names([METADATA, *sorted(item_files)[:1]]) if item_files else None
        visible = [name for name in names if not name.startswith(".")]
        if len(item_files) < len(visible) or not any(name.endswith("_0.pt") for name in item_files):
            return None
        return quote_names(sorted(item_files), 2)

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        require_folder(path)
        if path.name.startswith(UNFINISHED_PREFIX):
            raise DamagedError(
                "the save did not finish",
                where=str(path),
                why=f"its directory still has the prefix `{UNFINISHED_PREFIX}`",
            )
        from ckptctl.formats.torch_checkpointing.directory_reader import read_catalog

        return read_catalog(path, options)


FORMAT = TorchCheckpointingFormat()
