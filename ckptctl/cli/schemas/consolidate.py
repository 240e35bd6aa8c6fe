"""What ``ckptctl consolidate --json`` prints."""

from __future__ import annotations

from ckptctl.cli.schemas.convert import DOCUMENT as CONVERT
from ckptctl.cli.schemas.words import Document, Shape, array, boolean, integer, number, string

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
DOCUMENT = Document(
    "consolidate", (Shape({}, like=CONVERT), Shape(METADATA, "With `--metadata-only`"))
)
