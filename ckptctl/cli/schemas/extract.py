"""What ``ckptctl extract --json`` prints."""

from __future__ import annotations

from ckptctl.cli.schemas.out_of_range import OUT_OF_RANGE
from ckptctl.cli.schemas.words import (
    array,
    document,
    integer,
    record,
    string,
)

DOCUMENT = document(
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
