"""What ``ckptctl doctor --json`` prints."""

from __future__ import annotations

from ckptctl.cli.schemas.words import array, boolean, document, integer, record, string

CHECK = {
    "group": string(
        "what it belongs to: `installation`, `plug-ins`, `file system`, `surroundings`"
    ),
    "name": string("what was looked at"),
    "status": string(
        "`ok`; `warn`: slower, or something cannot be done; `fail`: broken",
        among=("ok", "warn", "fail"),
    ),
    "found": string("what there is, for people"),
    "hint": string("what to do about it", null=True),
}
DOCUMENT = document(
    "doctor",
    {
        "directory": string("as it was named"),
        "healthy": boolean("whether nothing is broken; the exit code is 0, else 1"),
        "warnings": integer("how many there are"),
        "failures": integer("how many things are broken"),
        "checks": array(record(CHECK), "all that was looked at"),
    },
)
