"""Paths and URLs as users name them, of which it is asked here which one is; and names inside.

Names and links that come from inside a checkpoint must not lead out of it.
"""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path, PureWindowsPath
from typing import TypeVar, cast

from ckptctl.errors import CkptError, UnsupportedError, UsageError, listed, nearest
from ckptctl.storage.urls import HUB, PACKAGES, is_url, local_path, masked, scheme_of
from ckptctl.tree import TreePath, UrlPath, open_url
from ckptctl.units import natural_key

P = TypeVar("P", bound=TreePath)
LOOKED_AT = 1000
SHOWN = 3
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w-]*/[\w.-]+")
"""``ORG/NAME``."""
_FILES = frozenset((".bin", ".ckpt", ".gguf", ".json", ".pt", ".pth", ".safetensors", ".zip"))
"""What names of files end with, and those of repositories do not."""
_SHARED_BLOB = re.compile(r"[0-9a-f]{64}")


def named(path: str | os.PathLike[str]) -> TreePath:
    """Return the path that a user names, which may be a URL; nothing is looked at yet."""
    if isinstance(path, UrlPath):
        return path
    if is_url(path):
        return open_url(os.fspath(path))
    if "\0" in os.fspath(path):
        raise UsageError("a path cannot contain the character NUL", where=str(path))
    return path if isinstance(path, Path) else Path(local_path(path))


def source_path(path: str | os.PathLike[str]) -> TreePath:
    """Return the path that a user wants to be read; behind a URL it is looked at."""
    found = named(path)
    return UrlPath(found.tree, found.tree.look(found.url)) if isinstance(found, UrlPath) else found


def home_expanded(path: P) -> P:
    """Return a path that a user names, with the home that a ``~`` in front stands for."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise UsageError(
            f"`{path.parts[0]}` is not a home directory",
            where=str(path),
            hint=f"write `./{path}` if the name starts with `~`",
        ) from None


def shown(path: str | os.PathLike[str]) -> str:
    """Return *path* as it was named, without what is secret in a URL."""
    return str(named(path)) if is_url(path) else str(path)


def is_known(path: str | os.PathLike[str]) -> bool:
    """Return whether *path* is a path, or a URL of a kind that fsspec knows."""
    if not is_url(path):
        return True
    import fsspec

    return scheme_of(os.fspath(path)) in fsspec.available_protocols()


def require_answers(path: TreePath) -> None:
    """Prove that what is behind a URL has answered whenever it was asked.

    Readers take a file that cannot be read for a damaged one, which is right on this machine only.
    """
    if isinstance(path, UrlPath) and (failure := path.tree.failure(path.url)):
        raise failure


def require_local(
    path: str | os.PathLike[str],
    what: str,
    *,
    why: str | None = None,
    hint: str | None = None,
    error: type[CkptError] = UsageError,
) -> None:
    """Refuse a URL where only paths of this machine make sense."""
    if is_url(path):
        raise error(what, where=masked(os.fspath(path)), why=why, hint=hint)


def path_hint(path: str | TreePath) -> str:
    """Return a hint on a path at which there is nothing: what there is in its place."""
    if is_url(path):
        return "check the URL; nothing was found there"
    absolute = home_expanded(Path(path)).absolute()
    if absolute.exists():
        return f"`{absolute}` is a file"
    there = next(one for one in absolute.parents if one.is_dir())
    wanted = absolute.relative_to(there).parts[0]
    if (there / wanted).is_symlink():
        return _link_hint(there / wanted)
    scheme, colon, _ = wanted.partition(":")
    if colon and scheme in (HUB, *PACKAGES):
        return f"start the URL with `{scheme}://`"
    try:
        with os.scandir(there) as found:
            names = [one.name for one in islice(found, LOOKED_AT) if one.name[0] != "."]
    except OSError:
        return f"`{there}` cannot be listed"
    close = nearest(wanted, names)
    if close:
        return f"did you mean `{there / close}`?"
    inside = sorted(names, key=natural_key)
    holds = f"`{there}` contains {listed(inside, SHOWN) if inside else 'nothing'}"
    repository = hub_url(path)
    return f"{holds}; write a Hub repository as `{repository}`" if repository else holds


def names_repository(path: str | TreePath) -> bool:
    """Return whether a path is what a repository of the Hub is called, too: ``ORG/NAME``."""
    return bool(_REPOSITORY.fullmatch(str(path))) and Path(path).suffix not in _FILES


def hub_url(path: str | TreePath) -> str | None:
    """Return the URL of the Hub's repository that *path* may mean; None: none.

    There is none where there is a folder ``ORG`` here.
    """
    here = Path(path).absolute().parent.is_dir()
    return f"{HUB}://{path}" if names_repository(path) and not here else None


def _link_hint(link: Path) -> str:
    """Return the hint on a symbolic link that leads to nothing."""
    said = f"`{link}` is a symbolic link to `{link.readlink()}`"
    try:
        link.stat()
    except FileNotFoundError:
        return f"{said}, which does not exist"
    except OSError as error:
        return f"{said}: {os.strerror(error.errno or 0)}"
    return said


class OutsideError(UnsupportedError):
    """A name or a link leads out of a checkpoint, and so is not read.

    What it leads to may be whole: for who wants to know whether a checkpoint is, it proves nothing.
    """


def contained(name: str, where: str) -> str:
    """Return *name* if it is a plain relative path below a checkpoint's root."""
    pure = PureWindowsPath(name)
    parts = pure.parts
    if not parts or pure.drive or pure.root or ".." in parts or "\0" in name or "\\" in name:
        raise OutsideError(
            f"`{name}` is not a path inside the checkpoint",
            where=where,
            why="names in a checkpoint must be relative and must not contain `..`",
        )
    return "/".join(parts)


def real_path(path: P) -> P:
    """Return *path* without links, up to a link that leads to itself; a URL has none.

    ``Path.resolve`` raises ``RuntimeError`` there before Python 3.13: an error that nobody expects
    of a file. Whoever opens what this returns gets the system's own.
    """
    try:
        return path.resolve()
    except RuntimeError:
        return cast(P, Path(os.path.realpath(path)))


def hub_repository(root: TreePath) -> TreePath | None:
    """Return the repository in a Hugging Face cache whose snapshot *root* is, or lies in."""
    found = (parent.parent for parent in root.parents if parent.name == "snapshots")
    return next(found, None)


def leads_outside(path: TreePath, root: TreePath) -> bool:
    """Return whether links lead from *path* out of *root*.

    They may leave it only the way the Hugging Face cache uses them: from
    ``snapshots/<revision>/`` into the ``blobs/`` directory of the same repository, and on to
    the ``blobs/`` that all repositories share (huggingface_hub, ``utils/_shared_blobs.py``).
    """
    root, real = real_path(root), real_path(path)
    if real.is_relative_to(root):
        return False
    repository = hub_repository(root)
    if repository is None:
        return True
    shared = real.parent.parent == repository.parent / "blobs"
    return real.parent != repository / "blobs" and not (
        shared and _SHARED_BLOB.fullmatch(real.name)
    )


def is_there(path: TreePath) -> bool:
    """Return whether *path* is a file, or a link to itself or out of its folder.

    Nothing tells what such a link stands for. One that leads to nothing inside stands for no file.
    """
    return path.is_file() or (
        path.is_symlink() and (real_path(path).is_symlink() or leads_outside(path, path.parent))
    )
