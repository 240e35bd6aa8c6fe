"""Names of the files in ``torch_checkpointing`` directories."""

from __future__ import annotations

import re

from ckptctl.formats import rank_files

NAME = "torch-checkpointing"
METADATA = "metadata.pkl"
ITEM_FILE = re.compile(
    r"(?P<item>[a-zA-Z0-9_-]+)_(?P<rank>\d{1,7})\.(?P<kind>pt|json|bin|safetensors)", re.ASCII
)


def is_item_file(match: re.Match[str]) -> bool:
    """Return whether a name that :data:`ITEM_FILE` matches is not one of a rank file."""
    return rank_files.parse_rank_file_name(match.string) is None
