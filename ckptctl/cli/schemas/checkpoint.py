"""What is said of a checkpoint of a run, by all commands that do."""

from __future__ import annotations

from ckptctl.cli.schemas.words import array, integer, mapping, number, string

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
