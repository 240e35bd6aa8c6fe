"""What ``ckptctl verify --json`` prints."""

from __future__ import annotations

from ckptctl.cli.schemas.words import array, boolean, document, integer, number, record, string

LEVEL = string("`fast`, `headers` or `full`", among=("fast", "headers", "full"))
BOX = {
    "offsets": array(integer(), "its first index along each dimension"),
    "sizes": array(integer(), "its length along each dimension"),
}
FINDING = {
    "severity": string(
        "`error`: evidence that it is torn; `unknown`: not understood, or it cannot be read; "
        "`warning`",
        among=("error", "unknown", "warning"),
    ),
    "what": string("the finding in one line"),
    "where": string("tensor, box and file in one line; empty: the whole"),
    "file": string("the file concerned", null=True),
    "tensor": string("the tensor, or other leaf, concerned", null=True),
    "box": record(BOX, "the part of the tensor", null=True),
    "why": string("the evidence", null=True),
}
FILE = {
    "path": string("relative to the checkpoint"),
    "bytes": integer("its size"),
    "proven": integer("its bytes that a checksum proves; null below `full`", null=True),
}
DOCUMENT = document(
    "verify",
    {
        "path": string("as it was named"),
        "format": string("[format](formats.md)"),
        "level": LEVEL,
        "verdict": string(
            "`whole`, `torn` (with evidence) or `not understood`",
            among=("whole", "torn", "not understood"),
        ),
        "whole": boolean("whether the verdict is `whole`"),
        "tensors": integer("tensors that could be read"),
        "bytes": integer("size of all data files"),
        "proven_bytes": integer("bytes that a checksum proves; null below `full`", null=True),
        "structure_only_bytes": integer(
            "bytes that no checksum covers; null below `full`", null=True
        ),
        "nan_checked": boolean("whether floating values were searched for NaN and Inf"),
        "files": array(record(FILE), "every data file"),
        "errors": integer("findings that are evidence of its being torn"),
        "unknown": integer("findings about what is not understood, or cannot be read"),
        "warnings": integer("the other findings"),
        "findings": array(record(FINDING), "all that is wrong, errors first"),
        "manifest": string("the list of SHA-256 sums that was written", null=True),
        "notes": array(string(), "what else a reader should know"),
        "seconds": number("time that it took"),
    },
)
