"""What downloads leave in place of a file: a pointer of Git LFS, a web page, an error message.

Sources: the Git LFS specification (``docs/spec.md``: a pointer begins with its version line and has
less than 1,024 bytes); the S3 API reference, "Error responses".
"""

from __future__ import annotations

from ckptctl.errors import DamagedError
from ckptctl.storage.files import SourceFiles

LONGEST = 1 << 20
"""Bytes; nothing that stands in for a file is longer."""
HEAD = 512
"""Bytes that tell what it is."""
GIT_LFS = b"version https://git-lfs.github.com/spec/"
PULL = "`git lfs pull` in the repository fetches the file"
_PAGE = (b"<!doctype html", b"<html")
_ERROR = (b"<?xml", b"<error>")


def require_content(files: SourceFiles, name: str) -> None:
    """Refuse a file that holds something else instead of what it is called after.

    For files that could not be read: others need not be looked at.

    Raises:
        DamagedError: It is the pointer, page or error message that a download left there.
    """
    size = files.size(name)
    if size > LONGEST:
        return
    begin = files.read(name, 0, min(size, HEAD)).lstrip().lower()
    if begin.startswith(GIT_LFS):
        what, hint = "a pointer of Git LFS", PULL
    elif begin.startswith(_PAGE):
        what, hint = "a web page", "download the file itself: on the Hub `resolve`, not `blob`"
    elif begin.startswith(_ERROR) and b"<error>" in begin:
        what, hint = "the error message of an object store", "download it again"
    else:
        return
    where = str(files.root / name)
    raise DamagedError(f"this is {what}, not the file", where=where, hint=hint)
