"""Paths and URLs given by users, and relative names found inside checkpoints.

Names and links in a checkpoint must not refer to files outside of the checkpoint.
"""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path, PureWindowsPath
from typing import TypeVar, cast

from ckptctl.errors import CkptError, UnsupportedError, UsageError, find_nearest, quote_names
from ckptctl.storage.urls import (
    FSSPEC_PACKAGES,
    HUB_SCHEME,
    is_url,
    mask_secrets,
    parse_scheme,
    to_local_path,
)
from ckptctl.tree import TreePath, UrlPath, open_url
from ckptctl.units import to_natural_key

P = TypeVar("P", bound=TreePath)
MAX_LISTED_NAMES = 1000
MAX_SHOWN_NAMES = 3
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w-]*/[\w.-]+")
"""Pattern of the name of a Hub repository, ``ORG/NAME``."""
_FILE_SUFFIXES = frozenset(
    (".bin", ".ckpt", ".gguf", ".json", ".pt", ".pth", ".safetensors", ".zip")
)
"""File name suffixes, which names of Hub repositories do not have."""
_SHARED_BLOB = re.compile(r"[0-9a-f]{64}")


def parse_path(path: str | os.PathLike[str]) -> TreePath:
    """Parse a path or URL given by the user, without accessing the file."""
    if isinstance(path, UrlPath):
        return path
    if is_url(path):
        return open_url(os.fspath(path))
    if "\0" in os.fspath(path):
        raise UsageError("a path cannot contain the character NUL", where=str(path))
    return path if isinstance(path, Path) else Path(to_local_path(path))


def resolve_source_path(path: str | os.PathLike[str]) -> TreePath:
    """Parse a path or URL to read from, and resolve a URL, which accesses the remote store."""
    parsed = parse_path(path)
    return (
        UrlPath(parsed.tree, parsed.tree.resolve_url(parsed.url))
        if isinstance(parsed, UrlPath)
        else parsed
    )


def expand_home(path: P) -> P:
    """Expand a leading ``~`` of a path to the home directory."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise UsageError(
            f"`{path.parts[0]}` is not a home directory",
            where=str(path),
            hint=f"write `./{path}` if the name starts with `~`",
        ) from None


def redact_path(path: str | os.PathLike[str]) -> str:
    """Return *path* as text, with the secrets of a URL masked."""
    return str(parse_path(path)) if is_url(path) else str(path)


def has_known_scheme(path: str | os.PathLike[str]) -> bool:
    """Return whether *path* is a local path, or a URL with a scheme supported by fsspec."""
    if not is_url(path):
        return True
    import fsspec

    return parse_scheme(os.fspath(path)) in fsspec.available_protocols()


def raise_if_request_failed(path: TreePath) -> None:
    """Raise the error of the last failed request to a remote tree, if any.

    Readers treat an unreadable file as damaged, which is wrong if a request failed.
    """
    if isinstance(path, UrlPath) and (failure := path.tree.get_last_error(path.url)):
        raise failure


def require_local(
    path: str | os.PathLike[str],
    message: str,
    *,
    hint: str | None = None,
    error: type[CkptError] = UsageError,
) -> None:
    """Raise *error* with the given message and hint if *path* is a URL."""
    if is_url(path):
        raise error(message, where=mask_secrets(os.fspath(path)), hint=hint)


def build_path_hint(path: str | TreePath) -> str:
    """Build the hint for a path that does not exist, such as a similar name."""
    if is_url(path):
        return "check the URL; nothing was found there"
    absolute = expand_home(Path(path)).absolute()
    if absolute.exists():
        return f"`{absolute}` is a file"
    parent_folder = next(parent for parent in absolute.parents if parent.is_dir())
    missing_name = absolute.relative_to(parent_folder).parts[0]
    if (parent_folder / missing_name).is_symlink():
        return _build_link_hint(parent_folder / missing_name)
    scheme, colon, _ = missing_name.partition(":")
    if colon and scheme in (HUB_SCHEME, *FSSPEC_PACKAGES):
        return f"start the URL with `{scheme}://`"
    try:
        with os.scandir(parent_folder) as entries:
            names = [
                entry.name for entry in islice(entries, MAX_LISTED_NAMES) if entry.name[0] != "."
            ]
    except OSError:
        return f"`{parent_folder}` cannot be listed"
    similar_name = find_nearest(missing_name, names)
    if similar_name:
        return f"did you mean `{parent_folder / similar_name}`?"
    sorted_names = sorted(names, key=to_natural_key)
    contents = (
        f"`{parent_folder}` contains "
        f"{quote_names(sorted_names, MAX_SHOWN_NAMES) if sorted_names else 'nothing'}"
    )
    repository = guess_hub_url(path)
    return f"{contents}; write a Hub repository as `{repository}`" if repository else contents


def could_be_repository(path: str | TreePath) -> bool:
    """Return whether *path* could also be the name of a Hub repository, ``ORG/NAME``."""
    return bool(_REPOSITORY.fullmatch(str(path))) and Path(path).suffix not in _FILE_SUFFIXES


def guess_hub_url(path: str | TreePath) -> str | None:
    """Return a Hub URL if *path* could be the name of a repository ``ORG/NAME``, or None.

    If a local folder ``ORG`` exists, *path* is considered a local path.
    """
    has_local_folder = Path(path).absolute().parent.is_dir()
    return f"{HUB_SCHEME}://{path}" if could_be_repository(path) and not has_local_folder else None


def _build_link_hint(link: Path) -> str:
    """Build the hint for a broken symbolic link, which names its target."""
    message = f"`{link}` is a symbolic link to `{link.readlink()}`"
    try:
        link.stat()
    except FileNotFoundError:
        return f"{message}, which does not exist"
    except OSError as error:
        return f"{message}: {os.strerror(error.errno or 0)}"
    return message


class OutsideError(UnsupportedError):
    """A name or link refers to a file outside of the checkpoint, which is not read.

    That file may be complete, so this does not mean that the checkpoint is damaged.
    """


def require_relative(name: str, where: str) -> str:
    """Normalize *name*, or raise if it is not a relative path without ``..``."""
    pure = PureWindowsPath(name)
    parts = pure.parts
    if not parts or pure.drive or pure.root or ".." in parts or "\0" in name or "\\" in name:
        raise OutsideError(
            f"`{name}` is not a path inside the checkpoint",
            where=where,
            why="names in a checkpoint must be relative and must not contain `..`",
        )
    return "/".join(parts)


def resolve_links(path: P) -> P:
    """Resolve symbolic links of a local path, except links in a loop, or return a URL unchanged.

    Before Python 3.13, ``Path.resolve`` raises ``RuntimeError`` for a loop. Opening the result of
    this function raises an ``OSError`` instead, which callers expect.
    """
    try:
        return path.resolve()
    except RuntimeError:
        return cast(P, Path(os.path.realpath(path)))


def make_comparable(path: TreePath) -> TreePath:
    """Return a local path that is absolute and has no links, or a URL unchanged."""
    return path if isinstance(path, UrlPath) else resolve_links(path.absolute())


def find_hub_cache_repository(root: TreePath) -> TreePath | None:
    """Return the repository folder of the Hugging Face cache whose snapshot contains *root*.

    The result is None if *root* is not inside a ``snapshots/`` folder.
    """
    repositories = (parent.parent for parent in root.parents if parent.name == "snapshots")
    return next(repositories, None)


def leads_outside(path: TreePath, root: TreePath) -> bool:
    """Return whether *path* resolves to a file outside of *root*.

    Symbolic links of the Hugging Face cache are allowed. They lead from ``snapshots/<revision>/``
    to the ``blobs/`` directory of the same repository, and from there to the ``blobs/`` directory
    shared by all repositories (huggingface_hub, ``utils/_shared_blobs.py``).
    """
    if isinstance(path, Path) and isinstance(root, Path) and _has_no_links_below(path, root):
        return False
    root, resolved = resolve_links(root), resolve_links(path)
    if resolved.is_relative_to(root):
        return False
    repository = find_hub_cache_repository(root)
    if repository is None:
        return True
    shared = resolved.parent.parent == repository.parent / "blobs"
    return resolved.parent != repository / "blobs" and not (
        shared and _SHARED_BLOB.fullmatch(resolved.name)
    )


def _has_no_links_below(path: Path, root: Path) -> bool:
    """Return whether *path* is inside *root* by its name, and no part of it below that is a link.

    This is much faster than resolving both paths, whose common part may have many components.
    """
    try:
        parts = path.relative_to(root).parts
    except ValueError:
        return False
    place = os.fspath(root)
    for part in parts:
        place = os.path.join(place, part)  # noqa: PTH118
        if part == ".." or os.path.islink(place):  # noqa: PTH114
            return False
    return True


def is_present(path: TreePath) -> bool:
    """Return whether *path* is a file or a symbolic link that must not be followed.

    A link in a loop, or to a path outside of its folder, counts as present without being followed.
    A link to a missing file in the same folder does not count as present.
    """
    return path.is_file() or (
        path.is_symlink() and (resolve_links(path).is_symlink() or leads_outside(path, path.parent))
    )
