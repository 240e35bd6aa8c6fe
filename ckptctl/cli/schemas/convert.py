"""What ``ckptctl convert --json`` prints."""

from __future__ import annotations

from ckptctl.cli.schemas.out_of_range import OUT_OF_RANGE
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

DOCUMENT = document(
    "convert",
    {
        "dry_run": boolean(
            "whether this is a plan; then the last four fields of this table are absent"
        ),
        "source": string("absolute path"),
        "target": string("absolute path"),
        "from_format": string("[format](formats.md) of the source"),
        "to_format": string("format that is written"),
        "model_type": string(
            "[model type](models.md), if exactly one fits or it was named; with `-lora` behind it "
            "for an adapter",
            null=True,
        ),
        "candidates": array(string(), "model types that fit"),
        "from_layout": string("layout of the source; null: unknown", null=True),
        "to_layout": string("layout that is written", null=True),
        "root": string("the model's prefix in the source, with its dot; empty: the top"),
        "tensors": integer("tensors in the output"),
        "mapped": integer("those that have another name or axis order than in the source"),
        "bytes": integer("size of the whole output"),
        "free_bytes": integer("free space of the target's file system"),
        "memory_bytes": integer("estimate of the peak memory"),
        "arithmetic": boolean("whether elements are cast"),
        "digest": string("SHA-256 of the plan; equal digests mean equal outputs"),
        "files": array(
            record({"path": string("relative to the target"), "bytes": integer("its size")}),
            "every file of the output",
        ),
        "dropped": mapping(
            string("the reason"),
            "source keys that a rule of the family, or `--tied drop`, leaves out",
        ),
        "left_out": mapping(string("the reason"), "other leaves of the source that do not travel"),
        "missing": mapping(
            string("the reason"),
            "what `--allow-missing` left out because it is not whole: tensors and other leaves by "
            "their names in the source, and files that cannot be used and of which nothing tells "
            "what they hold",
        ),
        "decided": mapping(
            string("what was taken, and what it was taken of"),
            "facts of the model that files state in different ways, where `--trust-assets` decided",
        ),
        "not_carried": mapping(
            string("the reason"),
            "what lies beside the weights and is not carried along, by its path there; folders "
            "with a slash behind them",
        ),
        "notes": array(string(), "what the user should know"),
        "seconds": number("time that copying and publishing took", optional=True),
        "resumed_bytes": integer("bytes that an earlier run had written", optional=True),
        "verified": boolean("whether the result was read again and found right", optional=True),
        "out_of_range": OUT_OF_RANGE,
    },
)
