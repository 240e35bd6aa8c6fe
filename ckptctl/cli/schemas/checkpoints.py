"""What ``inspect``, ``verify``, ``diff`` and ``report`` print with ``--json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptctl.cli.schemas.program import ERROR_DOCUMENT
from ckptctl.cli.schemas.words import (
    Document,
    Value,
    array,
    boolean,
    document,
    integer,
    mapping,
    number,
    record,
    string,
)

FILE = {"path": string("relative to the checkpoint"), "bytes": integer("its size")}
USE = {
    "tensors": integer("tensors of that dtype"),
    "elements": integer("their elements"),
    "bytes": integer("their bytes"),
}
STATISTICS = {
    "count": integer("number of values; of complex ones, both parts"),
    "nan": integer("those that are no number"),
    "inf": integer("those that are infinite"),
    "min": number("of the finite values, as the four below", null=True),
    "max": number(null=True),
    "mean": number(null=True),
    "std": number("of the population", null=True),
    "histogram": array(integer(), "ten equal steps from min to max"),
}
TENSOR = {
    "name": string("as it is stored"),
    "dtype": string("torch's name, as in `bfloat16`"),
    "shape": array(integer(), "as torch counts it"),
    "bytes": integer("its size; 0: its elements cannot be read"),
    "chunks": integer("boxes that it is stored in"),
    "alias_of": string("the tensor whose memory it shares", null=True),
    "unsupported": string("why its elements cannot be read", null=True),
    "stats": record(
        STATISTICS, "with `--stats` only, and not of dtypes without numbers", optional=True
    ),
}
CONTENTS = {
    "model_type": string("[model type](models.md), if exactly one fits", null=True),
    "candidates": array(string(), "model types that fit"),
    "layout": string("how the tensors are named", null=True),
    "root": string("prefix of the model's tensors, with its dot"),
    "parameters": integer("elements of the model's tensors, without optimizer state and aliases"),
    "bytes": integer("bytes of all tensors, aliases counted once"),
    "dtypes": mapping(record(USE), "by torch's name of the dtype, most bytes first"),
    "assets": array(record(FILE), "side files: configuration, tokenizer, ..."),
    "notes": array(string(), "what a reader should know"),
}
STATE = string(
    "`complete`, `incomplete` (there is evidence), `not understood` (it may be complete)",
    among=("complete", "incomplete", "not understood"),
)
MEMBER = {
    "path": string("where it is"),
    "format": string("null: it cannot be read", null=True),
    "tensors": integer("how many it has"),
    "bytes": integer("bytes of them"),
    "complete": boolean("whether every byte of them is there"),
    "state": STATE,
    "problems": array(string(), "why it is not complete"),
}
INSPECT = document(
    "inspect",
    {
        "path": string("as given"),
        "format": string("[format](formats.md); `run`: a folder of checkpoints"),
        **CONTENTS,
        "complete": boolean("whether every byte of every tensor is there, once"),
        "state": STATE,
        "problems": array(string(), "why it is not complete"),
        "lacks": array(
            string(),
            "[tensors that its model type has](../explanation/coverage.md) and it does not",
        ),
        "files": array(record(FILE), "data files, in natural order"),
        "metadata": mapping(
            string(), "what the format carries: `__metadata__`, the index's `metadata`"
        ),
        "quantised": mapping(
            string("how, for people"),
            "tensors that are quantised, by the name of the plain one that each stands for",
        ),
        "dequantisable": boolean(
            "whether something is quantised and `--dequantize` understands all of it"
        ),
        "tensors": array(
            record(TENSOR), "in the checkpoint's own order; with `--include` those that match"
        ),
        "blobs": array(string(), "names of the leaves that are not tensors"),
        "values": mapping(
            string("as Python writes it"),
            "those of them that are numbers or short text; of many in files of their own those "
            "nearest to the root, behind a URL none of these",
        ),
        "checkpoints": array(record(MEMBER), "members of a run folder, in natural order"),
    },
)
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
DATA_FILE = {
    "path": string("relative to the checkpoint"),
    "bytes": integer("its size"),
    "proven": integer("its bytes that a checksum proves; null below `full`", null=True),
}
VERIFY = document(
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
        "files": array(record(DATA_FILE), "every data file"),
        "errors": integer("findings that are evidence of its being torn"),
        "unknown": integer("findings about what is not understood, or cannot be read"),
        "warnings": integer("the other findings"),
        "findings": array(record(FINDING), "all that is wrong, errors first"),
        "manifest": string("the list of SHA-256 sums that was written", null=True),
        "notes": array(string(), "what else a reader should know"),
        "seconds": number("time that it took"),
    },
)
SIDE = {
    "path": string("as it was named"),
    "format": string("[format](formats.md)"),
    "layout": string("layout; null: names did not have to be mapped", null=True),
    "only": array(string(), "tensors that only this one has"),
    "only_leaves": array(string(), "leaves that are no tensors and that only this one has"),
    "left_out": mapping(string("the reason"), "what was not compared"),
}
FIELDS = {
    "same": boolean("whether nothing differs of what was compared; the exit code is 0, else 1"),
    "a": record(SIDE, "the first checkpoint"),
    "b": record(SIDE, "the second checkpoint"),
    "model_type": string("[model type](models.md), where names were mapped", null=True),
    "structure": boolean("whether values were left alone"),
    "compared": integer("tensors that both have"),
    "by_checksum": integer(
        "those of them that recorded checksums show to be equal; they were not read"
    ),
    "within": integer("those whose elements differ by no more than the tolerances allow"),
    "tensors": array(
        record(
            {
                "name": string("name in A"),
                "sources": array(string(), "names in B"),
                "kinds": array(
                    string(among=("shape", "dtype", "values")),
                    "what differs: `shape`, `dtype`, `values`",
                ),
                "shape_a": array(integer(), "shape in A"),
                "shape_b": array(integer(), "shape of B's in the layout of A"),
                "dtype_a": string("dtype in A"),
                "dtype_b": string("dtype in B; several, joined by commas, where its parts differ"),
                "values": record(
                    {
                        "count": integer("elements"),
                        "differing": integer(
                            "elements that differ by more than the tolerances allow"
                        ),
                        "nonfinite": integer("those of them of which one is NaN or infinite"),
                        "max_abs": number(
                            "largest absolute difference of finite elements", null=True
                        ),
                        "max_rel": number(
                            "largest difference relative to B, where that is not 0", null=True
                        ),
                        "worst": array(
                            integer(),
                            "index of the element that differs most: the first that is not "
                            "finite, else that of `max_abs`; null: not known",
                            null=True,
                        ),
                    },
                    "how the elements differ; null: not compared, or equal",
                    null=True,
                ),
            }
        ),
        "those that differ: other shapes first, then values that are not finite, then by "
        "`max_abs`, the largest first",
    ),
    "compared_leaves": integer("leaves that are no tensors and that both have"),
    "leaves": array(
        record(
            {
                "name": string("name in A"),
                "a": string("value in A, in short"),
                "b": string("value in B, in short"),
            }
        ),
        "those that differ",
    ),
    "bytes_read": integer("bytes of elements of A that were compared"),
    "notes": array(string(), "what else a reader should know"),
    "seconds": number("time that it took"),
}
DIFF = document("diff", FIELDS)


def _fields(of: Document) -> Mapping[str, Value]:
    return of.shapes[0].fields


def _inside(value: Value) -> Mapping[str, Value]:
    """Return the fields of an object, or of the items of an array."""
    return (value.items or value).fields or {}


INSPECTED = _fields(INSPECT)
VERIFIED = _fields(VERIFY)
LISTED = _inside(INSPECTED["tensors"])
STATS = _inside(LISTED["stats"])
CHUNK = {
    "file": integer("where it lies, or should lie: a place in `files`", null=True),
    **BOX,
}
REPORT = document(
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
                    **LISTED,
                    "stats": replace(
                        LISTED["stats"],
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
            _fields(DIFF),
            "how the two differ, as `ckptctl diff` says it; null: there is no second one, or they "
            "cannot be compared",
            null=True,
        ),
        "difference_error": replace(
            _fields(ERROR_DOCUMENT)["error"], text="why they cannot be compared", null=True
        ),
    },
)
