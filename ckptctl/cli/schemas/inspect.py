"""What ``ckptctl inspect --json`` prints."""

from __future__ import annotations

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
DOCUMENT = document(
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
