"""What ``ckptctl report --json`` prints, which is also what its page is drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptctl.cli.schemas import diff, error, inspect, verify
from ckptctl.cli.schemas.words import (
    Document,
    Value,
    array,
    boolean,
    document,
    integer,
    record,
    string,
)


def _fields(of: Document) -> Mapping[str, Value]:
    return of.shapes[0].fields


def _inside(value: Value) -> Mapping[str, Value]:
    """Return the fields of an object, or of the items of an array."""
    return (value.items or value).fields or {}


INSPECTED = _fields(inspect.DOCUMENT)
VERIFIED = _fields(verify.DOCUMENT)
TENSOR = _inside(INSPECTED["tensors"])
STATS = _inside(TENSOR["stats"])
BOX = _inside(_inside(VERIFIED["findings"])["box"])
CHUNK = {
    "file": integer("where it lies, or should lie: a place in `files`", null=True),
    **BOX,
}
DOCUMENT = document(
    "report",
    {
        "path": string("as it was named"),
        "output": string("the page that was written", null=True),
        "readable": boolean("whether anything of it could be read; else the exit code is 4 or 9"),
        "verdict": VERIFIED["verdict"],
        "whole": VERIFIED["whole"],
        "level": VERIFIED["level"],
        "errors": VERIFIED["errors"],
        "unknown": VERIFIED["unknown"],
        "warnings": VERIFIED["warnings"],
        "findings": replace(
            VERIFIED["findings"], text="what is wrong, errors first; 1,000 at most"
        ),
        "format": VERIFIED["format"],
        **{name: INSPECTED[name] for name in ("model_type", "candidates", "layout", "root")},
        "parameters": INSPECTED["parameters"],
        "bytes": INSPECTED["bytes"],
        "file_bytes": integer("size of all data files"),
        "tensor_count": integer("tensors that it has, listed or not"),
        "leaf_count": integer("other leaves that it has"),
        "dtypes": INSPECTED["dtypes"],
        "assets": INSPECTED["assets"],
        "notes": INSPECTED["notes"],
        "files": array(
            record(
                {
                    "path": string("relative to the checkpoint"),
                    "bytes": integer("its size; null: it is missing or cannot be used", null=True),
                    "rank": integer("the rank that wrote it, where its name says so", null=True),
                }
            ),
            "every data file, and those that are needed and are missing",
        ),
        "stats": boolean("whether values were read"),
        "tensors": array(
            record(
                {
                    **TENSOR,
                    "stats": replace(
                        TENSOR["stats"],
                        fields={
                            **STATS,
                            "histogram": array(integer(), "forty equal steps from min to max"),
                        },
                    ),
                    "missing": integer("boxes of it that are missing"),
                    "map": array(
                        record(CHUNK),
                        "the boxes that it is stored in; `file` is null: computed when it is read",
                    ),
                    "holes": array(
                        record(CHUNK),
                        "the boxes that are missing; `file` is null: no file is known to hold it",
                    ),
                }
            ),
            "those that are listed, in the checkpoint's own order",
        ),
        "left_out": record(
            {
                "tensors": integer("tensors that are not listed"),
                "bytes": integer("bytes of them"),
                "chunks": integer("boxes of listed tensors that are not listed"),
                "holes": integer("missing boxes of listed tensors that are not listed"),
                "findings": integer("findings that are not listed"),
                "differences": integer("entries of the difference that are not listed"),
            },
            "what there is no room for, or was not asked for",
        ),
        "other": string("the second checkpoint, as it was named", null=True),
        "difference": record(
            _fields(diff.DOCUMENT),
            "how the two differ, as `ckptctl diff` says it; null: there is no second one, or they "
            "cannot be compared",
            null=True,
        ),
        "difference_error": replace(
            _fields(error.DOCUMENT)["error"], text="why they cannot be compared", null=True
        ),
    },
)
