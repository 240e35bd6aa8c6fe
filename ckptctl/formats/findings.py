"""What readers say of a checkpoint of which they read a part."""

from __future__ import annotations

from pathlib import Path

from ckptctl.catalog import Finding
from ckptctl.errors import CkptError


def of_error(error: CkptError, root: Path, tensor: str | None = None) -> Finding:
    """Return what *error* says as a finding.

    Args:
        error: What a reader raised.
        root: Directory of the checkpoint, which is left out of paths.
        tensor: The tensor that was being looked at.
    """
    file = error.where.replace(f"{root}/", "") if error.where else None
    return Finding(error.what, error.why, file=file, tensor=tensor)
