"""What a cast could not keep, in the documents of the commands that may publish it."""

from __future__ import annotations

from ckptctl.cli.schemas.words import integer, mapping, record

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
