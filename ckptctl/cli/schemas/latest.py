"""What ``ckptctl latest --json`` prints."""

from __future__ import annotations

from ckptctl.cli.schemas.checkpoint import CHECKPOINT
from ckptctl.cli.schemas.words import array, document, record

DOCUMENT = document(
    "latest",
    {**CHECKPOINT, "skipped": array(record(CHECKPOINT), "newer ones that are not complete")},
)
