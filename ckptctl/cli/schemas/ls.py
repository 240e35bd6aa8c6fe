"""What ``ckptctl ls --json`` prints."""

from __future__ import annotations

from ckptctl.cli.schemas.checkpoint import CHECKPOINT
from ckptctl.cli.schemas.words import array, document, record, string

DOCUMENT = document(
    "ls",
    {
        "root": string("as it was named"),
        "series": array(string(), "what the names of each series of checkpoints have in common"),
        "checkpoints": array(record(CHECKPOINT), "by series and step"),
        "others": array(string(), "names of what else lies there, hidden things apart"),
    },
)
