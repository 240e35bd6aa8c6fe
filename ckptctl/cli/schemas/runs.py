"""What ``ls``, ``latest`` and ``prune`` print with ``--json``."""

from __future__ import annotations

from ckptctl.cli.schemas.program import ERROR
from ckptctl.cli.schemas.words import (
    array,
    boolean,
    document,
    integer,
    mapping,
    number,
    record,
    string,
)

CHECKPOINT = {
    "path": string("where it is"),
    "step": integer(
        "number in its name: the step, or the epoch where there is none; of `last.ckpt`, the step "
        "that it states"
    ),
    "time": string(
        "when the newest file of its weights or its trainer's state was written, RFC 3339, UTC"
    ),
    "bytes": integer("size of all its files"),
    "format": string("[format](formats.md); null: none is known", null=True),
    "state": string(
        "`complete`, `incomplete` (there is evidence), `writing` (incomplete, and changed less "
        "than ten minutes ago or locked), `not understood` (it may be complete, or none at all)",
        among=("complete", "incomplete", "writing", "not understood"),
    ),
    "problem": string("why it is not complete", null=True),
    "lacks": string(
        "a file that most others have and that trainers write last: training may not go on from "
        "this one, so that others are kept as if it did not count",
        null=True,
    ),
    "protected_by": array(
        string(), "pointers, links and states of trainers that name it, and what it is itself"
    ),
    "metrics": mapping(number(null=True), "what it was rated with; null: NaN or infinite"),
    "link": string("where it leads, if it is a symbolic link", null=True),
}
NEWEST = boolean("whether it is the newest complete one of its series, which is never pruned")
LS = document(
    "ls",
    {
        "root": string("as it was named"),
        "series": array(string(), "what the names of each series of checkpoints have in common"),
        "checkpoints": array(record({**CHECKPOINT, "newest": NEWEST}), "by series and step"),
        "others": array(string(), "names of what else lies there, hidden things apart"),
    },
)
LATEST = document(
    "latest",
    {**CHECKPOINT, "skipped": array(record(CHECKPOINT), "newer ones that are not complete")},
)
PRUNE = document(
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
