"""The digests that git and the Hugging Face Hub know files by.

Sources: gitglossary(7), "object identifier": the SHA-1 of ``blob``, the size and the content;
git-lfs' ``docs/spec.md``: the SHA-256 of the content. ``huggingface_hub/utils/_verification.py``
tells them apart as it is done here.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash

GIT = "git-"
ALGORITHMS = {64: "sha256", 40: f"{GIT}sha1"}
_HEXADECIMAL = re.compile(r"[0-9a-f]+")


def algorithm_of(digest: str) -> str | None:
    """Return what made a digest, told by its length; None: it is none."""
    return ALGORITHMS.get(len(digest)) if _HEXADECIMAL.fullmatch(digest) else None


def hasher(algorithm: str, size: int) -> _Hash:
    """Return what computes a digest of a file.

    Args:
        algorithm: ``git-sha1``, or a name that :mod:`hashlib` knows.
        size: Bytes of the whole file.
    """
    found = hashlib.new(algorithm.removeprefix(GIT), usedforsecurity=False)
    if algorithm.startswith(GIT):
        found.update(b"blob %d\0" % size)
    return found


def is_digest_of(digest: str, content: bytes) -> bool:
    """Return whether *digest* is that of *content*."""
    algorithm = algorithm_of(digest)
    if algorithm is None:
        return False
    found = hasher(algorithm, len(content))
    found.update(content)
    return found.hexdigest() == digest
