"""Detection of Git LFS pointers, web pages, error messages and zeros in place of a checkpoint file.

Sources: the Git LFS specification (``docs/spec.md``: a pointer begins with a version line and has
less than 1,024 bytes); the S3 API reference, "Error responses".
"""

from __future__ import annotations

import os

from ckptctl.errors import DamagedError
from ckptctl.storage.files import SourceFiles
from ckptctl.tree import TreePath

MAX_STAND_IN_BYTES = 1 << 20
"""Maximum size in bytes of a file that is checked for a pointer, web page or error message."""
EDGE_BYTES = 1 << 16
ZIP, ZIP_END, ZIP_TAIL = b"PK\3\4", b"PK\5\6", 22
"""Signatures of local header and end record of a zip, and size of an end record without comment."""
ZIP_REACH = ZIP_TAIL + 0xFFFF
"""Number of bytes at the end of a file in which torch searches for the end record of a zip."""
HEAD_BYTES = 512
"""Number of bytes at the start of a file from which its kind is guessed."""
GIT_LFS = b"version https://git-lfs.github.com/spec/"
GIT_LFS_HINT = "run `git lfs pull` in the repository to fetch the file"
HDF5 = b"\x89HDF\r\n\x1a\n"
LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_AGAIN = "copy or download the file again"
_SIGNATURES = (
    (ZIP, "a zip such as `torch.save` writes", "rename the file to end in `.pt`"),
    (b"GGUF", "GGUF", "rename the file to end in `.gguf`"),
    (HDF5, "HDF5 (Keras)", "load it with Keras and save the weights as safetensors"),
    (
        LEGACY_TORCH,
        "a legacy torch file",
        "load it once with torch and save it again with `torch.save`",
    ),
    (tuple(b"\x80%c" % n for n in range(2, 6)), "a pickle", "save its tensors as safetensors"),
    (b"\x1f\x8b", "gzip", "unpack it"),
    (b"\x28\xb5\x2f\xfd", "Zstandard", "unpack it"),
    (b"BZh", "bzip2", "unpack it"),
    (b"\xfd7zXZ\0", "xz", "unpack it"),
)
"""Magic bytes, name and hint of each known kind of file."""
_PAGE = (b"<!doctype html", b"<html")
_ERROR = (b"<?xml", b"<error>")


def describe_zeros(files: SourceFiles, name: str) -> str:
    """Describe for messages whether a file that starts with zeros contains only zeros."""
    return "it contains only zeros" if has_only_zeros(files.path(name)) else "it starts with zeros"


def has_only_zeros(path: TreePath) -> bool:
    """Return whether the first and last 64 KiB of a non-empty file are zeros.

    A crash after allocating space and before writing data leaves such a file. No format starts with
    zeros.
    """
    with path.open("rb") as file:
        head = file.read(EDGE_BYTES)
        file.seek(max(0, file.seek(0, os.SEEK_END) - EDGE_BYTES))
        return bool(head) and not any(head) and not any(file.read(EDGE_BYTES))


def explain_incomplete(path: TreePath) -> str:
    """Return why a ``torch.save`` file is incomplete, or an empty string if it seems complete."""
    size = path.stat().st_size
    if not size:
        return "it is empty"
    if has_only_zeros(path):
        return "it contains only zeros"
    with path.open("rb") as file:
        begin = file.read(len(ZIP))
        file.seek(max(0, size - ZIP_REACH))
        is_complete = begin != ZIP or ZIP_END in file.read(ZIP_REACH)
    return "" if is_complete else "it starts like a zip but does not end like one"


def guess_file_kind(head: bytes) -> tuple[str, str] | None:
    """Guess the kind of a file from its first bytes.

    Returns:
        Name of the kind and a hint, or None if the kind is unknown.
    """
    for magic, kind, hint in _SIGNATURES:
        if head.startswith(magic):
            return kind, hint
    if head[257:262] == b"ustar":
        return "a tar archive", "unpack it"
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:
            return None
        text = head[: error.start].decode()  # truncated inside a character
    if not all(character.isprintable() or character.isspace() for character in text):
        return None
    return ("JSON" if text.lstrip()[:1] in ("{", "[") else "text"), _AGAIN


def starts_like_zip(files: SourceFiles, name: str) -> bool:
    """Return whether the file *name* starts with the signature of a zip."""
    return files.size(name) > len(ZIP) and files.read(name, 0, len(ZIP)) == ZIP


def raise_if_placeholder(files: SourceFiles, name: str) -> None:
    """Raise if a file is a Git LFS pointer, a web page or an error message of an object store.

    Call this for files that could not be parsed.
    """
    size = files.size(name)
    if size > MAX_STAND_IN_BYTES:
        return
    begin = files.read(name, 0, min(size, HEAD_BYTES)).lstrip().lower()
    if begin.startswith(GIT_LFS):
        description, hint = "a Git LFS pointer", GIT_LFS_HINT
    elif begin.startswith(_PAGE):
        description, hint = (
            "a web page",
            "download the file itself (on the Hub, the URL contains `resolve`, not `blob`)",
        )
    elif begin.startswith(_ERROR) and b"<error>" in begin:
        description, hint = "an error message from an object store", "download it again"
    else:
        return
    where = str(files.root / name)
    raise DamagedError(f"this is {description} instead of the file", where=where, hint=hint)
