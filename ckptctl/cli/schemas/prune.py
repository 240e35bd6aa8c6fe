"""What ``ckptctl prune --json`` prints."""

from __future__ import annotations

from ckptctl.cli.schemas.checkpoint import CHECKPOINT
from ckptctl.cli.schemas.error import ERROR
from ckptctl.cli.schemas.words import (
    array,
    boolean,
    document,
    integer,
    mapping,
    record,
    string,
)

DOCUMENT = document(
    "prune",
    {
        "dry_run": boolean("whether this is a plan; then `done`, `failed` and `freed` are absent"),
        "thin": boolean("whether optimizer state is taken away instead of whole checkpoints"),
        "root": string("absolute path"),
        "series": array(string(), "what the names of each series of checkpoints have in common"),
        "decisions": array(
            record(
                {
                    **CHECKPOINT,
                    "action": string(
                        "`keep`, `remove`, `thin`, or `skip`: it is left alone and does not count",
                        among=("keep", "remove", "thin", "skip"),
                    ),
                    "keep": boolean("whether it is there afterwards"),
                    "reasons": array(string(), "why"),
                    "freed": integer("bytes that are freed"),
                    "dropped": array(string(), "names of the tensors that thinning takes away"),
                }
            ),
            "what becomes of each checkpoint, by series and step",
        ),
        "kept": integer("number of those"),
        "removed": integer("likewise, those that are thinned included"),
        "thinned": integer("number of those that are thinned"),
        "skipped": integer("likewise"),
        "bytes": integer("bytes that are freed in all"),
        "leftovers": array(
            string(), "what an earlier run has left in the trash, which is removed, too"
        ),
        "others": array(
            string(), "names of what else lies there and is not touched, hidden things apart"
        ),
        "done": array(string(), "names of what was removed, or thinned", optional=True),
        "failed": mapping(
            record(ERROR, "the error"), "what could not be removed, by name", optional=True
        ),
        "freed": integer("bytes that were freed", optional=True),
    },
)
