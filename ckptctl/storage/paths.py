"""Paths and URLs given by users, and relative names found inside checkpoints.

Names and links that come from inside a checkpoint must not lead out of it.
"""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path, PureWindowsPath
from typing import TypeVar, cast

from ckptctl.errors import CkptError, UnsupportedError, UsageError, find_nearest, quote_names
from ckptctl.storage.urls import (
    HUB_SCHEME,
    PACKAGES,
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
"""Hub repository, ``ORG/NAME``."""
_FILE_SUFFIXES = frozenset(
    (".bin", ".ckpt", ".gguf", ".json", ".pt", ".pth", ".safetensors", ".zip")
)
"""File suffixes that repository names do not have."""
_SHARED_BLOB = re.compile(r"[0-9a-f]{64}")


def parse_path(path: str | os.PathLike[str]) -> TreePath:
    """Parse a path or URL given by the user, without accessing it."""
    if isinstance(path, UrlPath):
        return path
    if is_url(path):
        return open_url(os.fspath(path))
    if "\0" in os.fspath(path):
        raise UsageError("a path cannot contain the character NUL", where=str(path))
    return path if isinstance(path, Path) else Path(to_local_path(path))


def resolve_source_path(path: str | os.PathLike[str]) -> TreePath:
    """Parse a path or URL to read from, accessing a URL to resolve it."""
    parsed = parse_path(path)
    return (
        UrlPath(parsed.tree, parsed.tree.resolve_url(parsed.url))
        if isinstance(parsed, UrlPath)
        else parsed
    )


def expand_home(path: P) -> P:
    """Expand a leading ``~`` of a path given by the user."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise UsageError(
            f"`{path.parts[0]}` is not a home directory",
            where=str(path),
            hint=f"write `./{path}` if the name starts with `~`",
        ) from None


def redact_path(path: str | os.PathLike[str]) -> str:
    """Return *path* as given, without the secrets of a URL."""
    return str(parse_path(path)) if is_url(path) else str(path)


def has_known_scheme(path: str | os.PathLike[str]) -> bool:
    """Return whether *path* is a local path, or a URL with a scheme supported by fsspec."""
    if not is_url(path):
        return True
    import fsspec

    return parse_scheme(os.fspath(path)) in fsspec.available_protocols()


def require_no_failure(path: TreePath) -> None:
    """Raise if any request to a remote tree has failed.

    Readers treat an unreadable file as damaged, which is only right for local files.
    """
    if isinstance(path, UrlPath) and (failure := path.tree.last_failure(path.url)):
        raise failure


def require_local(
    path: str | os.PathLike[str],
    message: str,
    *,
    why: str | None = None,
    hint: str | None = None,
    error: type[CkptError] = UsageError,
) -> None:
    """Raise if *path* is a URL."""
    if is_url(path):
        raise error(message, where=mask_secrets(os.fspath(path)), why=why, hint=hint)


def path_hint(path: str | TreePath) -> str:
    """Return a hint for a path that does not exist."""
    if is_url(path):
        return "check the URL; nothing was found there"
    absolute = expand_home(Path(path)).absolute()
    if absolute.exists():
        return f"`{absolute}` is a file"
    parent_folder = next(parent for parent in absolute.parents if parent.is_dir())
    missing_name = absolute.relative_to(parent_folder).parts[0]
    if (parent_folder / missing_name).is_symlink():
        return _link_hint(parent_folder / missing_name)
    scheme, colon, _ = missing_name.partition(":")
    if colon and scheme in (HUB_SCHEME, *PACKAGES):
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
    repository = hub_url(path)
    return f"{contents}; write a Hub repository as `{repository}`" if repository else contents


def could_be_repository(path: str | TreePath) -> bool:
    """Return whether a path could also be a Hub repository ``ORG/NAME``."""
    return bool(_REPOSITORY.fullmatch(str(path))) and Path(path).suffix not in _FILE_SUFFIXES


def hub_url(path: str | TreePath) -> str | None:
    """Return the URL of the Hub repository that *path* may mean, or None.

    It is None if a local folder ``ORG`` exists.
    """
    has_local_folder = Path(path).absolute().parent.is_dir()
    return f"{HUB_SCHEME}://{path}" if could_be_repository(path) and not has_local_folder else None


def _link_hint(link: Path) -> str:
    """Return the hint for a broken symbolic link."""
    message = f"`{link}` is a symbolic link to `{link.readlink()}`"
    try:
        link.stat()
    except FileNotFoundError:
        return f"{message}, which does not exist"
    except OSError as error:
        return f"{message}: {os.strerror(error.errno or 0)}"
    return message


class OutsideError(UnsupportedError):
    """A name or link leads out of the checkpoint and is not read.

    The file it leads to may be complete, so this is no evidence that the checkpoint is damaged.
    """


def require_relative(name: str, where: str) -> str:
    """Normalize *name*, which must be a relative path without ``..``."""
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
    """Resolve symbolic links, except a link to itself (URLs have none).

    ``Path.resolve`` raises ``RuntimeError`` for such a link before Python 3.13, which no caller
    expects of a file. Opening the result raises the system's own error.
    """
    try:
        return path.resolve()
    except RuntimeError:
        return cast(P, Path(os.path.realpath(path)))


def find_hub_repository(root: TreePath) -> TreePath | None:
    """Return the repository in a Hugging Face cache whose snapshot contains *root*, or None."""
    repositories = (parent.parent for parent in root.parents if parent.name == "snapshots")
    return next(repositories, None)


def leads_outside(path: TreePath, root: TreePath) -> bool:
    """Return whether symbolic links lead from *path* out of *root*.

    The links of the Hugging Face cache are allowed: from ``snapshots/<revision>/`` into the
    ``blobs/`` directory of the same repository, and on to the ``blobs/`` shared by all repositories
    (huggingface_hub, ``utils/_shared_blobs.py``).
    """
    root, resolved = resolve_links(root), resolve_links(path)
    if resolved.is_relative_to(root):
        return False
    repository = find_hub_repository(root)
    if repository is None:
        return True
    shared = resolved.parent.parent == repository.parent / "blobs"
    return resolved.parent != repository / "blobs" and not (
        shared and _SHARED_BLOB.fullmatch(resolved.name)
    )


def is_present(path: TreePath) -> bool:
    """Return whether *path* is a file, or a link to itself or out of its folder.

    The target of such a link is unknown. A link to a missing file in the folder does not count.
    """
    return path.is_file() or (
        path.is_symlink() and (resolve_links(path).is_symlink() or leads_outside(path, path.parent))
    )
