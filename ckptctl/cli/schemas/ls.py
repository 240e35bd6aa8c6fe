"""What ``ckptctl ls --json`` prints."""

from __future__ import annotations

from ckptctl.cli.schemas.checkpoint import CHECKPOINT
from ckptctl.cli.schemas.words import array, boolean, document, record, string

NEWEST = boolean("whether it is the newest complete one of its series, which is never pruned")
DOCUMENT = document(
    "ls",
    {
        "root": string("as it was named"),
        "series": array(string(), "what the names of each series of checkpoints have in common"),
        "checkpoints": array(record({**CHECKPOINT, "newest": NEWEST}), "by series and step"),
        "others": array(string(), "names of what else lies there, hidden things apart"),
    },
)
