"""What readers say of a checkpoint of which they read a part."""

from __future__ import annotations

import re
from pathlib import Path

from ckptctl.catalog import Finding
from ckptctl.errors import CkptError

_PLACE = re.compile(r"(.+), (at byte [0-9,]+|`.*`)")


def of_error(error: CkptError, root: Path, tensor: str | None = None) -> Finding:
    """Return what *error* says as a finding.

    Args:
        error: What a reader raised.
        root: Directory of the checkpoint, which is left out of paths.
        tensor: The tensor that was being looked at.
    """
    file = error.where.replace(f"{root}/", "") if error.where else None
    why, place = error.why, _PLACE.fullmatch(file or "")
    if place:
        file, inside = place.groups()
        why = f"{inside}: {why}" if why else inside
    return Finding(error.what, why, file=file, tensor=tensor)
