"""What ``convert``, ``consolidate``, ``merge`` and ``extract`` print with ``--json``."""

from __future__ import annotations

from ckptctl.cli.schemas.words import (
    Document,
    Shape,
    array,
    boolean,
    document,
    integer,
    mapping,
    number,
    record,
    string,
)

OUT_OF_RANGE = mapping(
    record(
        {
            "infinite": integer("elements that became infinite"),
            "nan": integer("elements that became NaN"),
            "saturated": integer("elements that became the largest number of the dtype"),
        }
    ),
    "what a cast, a dequantisation or a merge could not keep, and the source had "
    "otherwise, by the name of the tensor in the output; on model-parallel ranks a "
    "repeated tensor counts each time",
    optional=True,
)
CONVERT = document(
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
METADATA = {
    "dry_run": boolean("only with `--dry-run`", optional=True),
    "source": string("absolute path of the directory"),
    "target": string("absolute path of the file that is added"),
    "from_format": string("`dcp-rank-local`"),
    "ranks": integer("ranks whose files were found"),
    "tensors": integer("tensors"),
    "blobs": integer("other leaves"),
    "chunks": integer("boxes that the tensors consist of, replicas counted once"),
    "data_bytes": integer("bytes of all tensors, none of which moves"),
    "bytes": integer("bytes of the file that is added"),
    "seconds": number("time it took; not with `--dry-run`", optional=True),
    "notes": array(string(), "what the user should know"),
}
CONSOLIDATE = Document(
    "consolidate", (Shape({}, like=CONVERT), Shape(METADATA, "With `--metadata-only`"))
)
MERGED = {
    "adapter": string("absolute path of the adapter"),
    "adapter_format": string("its [format](formats.md)"),
    "adapter_layout": string("its layout"),
    "merged": integer("tensors of the model that low-rank factors change"),
    "replaced": integer(
        "tensors of the model that those of the adapter replace (`modules_to_save`)"
    ),
    "scales": array(number(), "the different factors of B A, ascending"),
}
MERGE = Document("merge", (Shape(MERGED, "For the merged model", like=CONVERT),))
EXTRACT = document(
    "extract",
    {
        "source": string("the checkpoint as it was named"),
        "output": string("the file that was written", null=True),
        "tensors": array(
            record(
                {
                    "name": string("name, in the layout that was asked for"),
                    "sources": array(string(), "names in the checkpoint"),
                    "dtype": string("dtype, after a cast"),
                    "shape": array(integer(), "shape of what was taken"),
                    "whole": array(integer(), "shape of the tensor"),
                    "bytes": integer("bytes of what was taken"),
                    "preview": string(
                        "its first and last values as text; null: a file was written, or many "
                        "tensors were named",
                        null=True,
                    ),
                }
            ),
            "what was taken",
        ),
        "bytes": integer("size of the file; 0: none was written"),
        "bytes_read": integer("bytes of elements that were read"),
        "notes": array(string(), "what the user should know"),
        "out_of_range": OUT_OF_RANGE,
    },
)
