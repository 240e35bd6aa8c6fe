"""What is said of a checkpoint of a run, by all commands that do."""

from __future__ import annotations

from ckptctl.cli.schemas.words import array, integer, mapping, number, string

CHECKPOINT = {
    "path": string("where it is"),
    "step": integer("number in its name: the step, or the epoch where there is none"),
    "time": string("when its newest file was written, RFC 3339, UTC"),
    "bytes": integer("size of all its files"),
    "format": string("[format](formats.md); null: none is known", null=True),
    "state": string(
        "`complete`, `incomplete`, `writing` (incomplete, and changed less than ten minutes ago "
        "or locked), `unknown` (nothing that ckptctl reads)",
        among=("complete", "incomplete", "writing", "unknown"),
    ),
    "problem": string("why it is not complete", null=True),
    "protected_by": array(string(), "pointers, links and states of trainers that name it"),
    "metrics": mapping(number(null=True), "what it was rated with; null: NaN or infinite"),
}
