"""What ``ckptctl diff --json`` prints."""

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
DOCUMENT = document("diff", FIELDS)
