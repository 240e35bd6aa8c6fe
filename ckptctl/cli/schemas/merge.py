"""What ``ckptctl merge --json`` prints."""

from __future__ import annotations

from ckptctl.cli.schemas.convert import DOCUMENT as CONVERT
from ckptctl.cli.schemas.words import Document, Shape, array, integer, number, string

FIELDS = {
    "adapter": string("absolute path of the adapter"),
    "adapter_format": string("its [format](formats.md)"),
    "adapter_layout": string("its layout"),
    "merged": integer("tensors of the model that low-rank factors change"),
    "replaced": integer(
        "tensors of the model that those of the adapter replace (`modules_to_save`)"
    ),
    "scales": array(number(), "the different factors of B A, ascending"),
}
DOCUMENT = Document("merge", (Shape(FIELDS, "For the merged model", like=CONVERT),))
