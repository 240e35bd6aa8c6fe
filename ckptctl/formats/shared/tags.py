"""Select one of several DeepSpeed saves in a folder, by tag or by pointer file.

Source: ``deepspeed/runtime/engine.py`` (``save_checkpoint``). Rank 0 writes the pointer file
``latest``, but not atomically, and possibly before other ranks have finished the save.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptctl.errors import (
    FormatError,
    UnsupportedError,
    UsageError,
    find_nearest,
    format_option,
    quote_names,
)
from ckptctl.storage.files import source_files
from ckptctl.storage.paths import require_relative
from ckptctl.tree import TreePath
from ckptctl.units import sort_naturally

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
MAX_TAG_BYTES = 4096
EvidenceFinder = Callable[[TreePath], str | None]


def list_tags(root: TreePath, find_evidence: EvidenceFinder) -> list[str]:
    """Return the names of the saves directly in *root*, in natural order.

    *find_evidence* describes why a folder is a save, or returns None if it is not.
    """
    return sort_naturally([item.name for item in root.iterdir() if find_evidence(item)])


def is_run_folder(root: TreePath, pointer: str, find_evidence: EvidenceFinder) -> bool:
    """Return whether *root* contains the pointer file *pointer* and at least one save."""
    return root.is_dir() and (root / pointer).is_file() and bool(list_tags(root, find_evidence))


def find_tag_folder(
    root: TreePath,
    tag: str | None,
    pointer: str,
    find_evidence: EvidenceFinder,
    get_folder_name: Callable[[str], str] = str,
) -> str:
    """Return the path of the save to read, relative to *root*, or ``""`` for *root* itself.

    Args:
        root: Folder that contains saves, or is a save.
        tag: Name of the save to read, or None to follow the pointer file.
        pointer: Name of the pointer file.
        find_evidence: Function that describes why a folder is a save, or returns None if it is not.
        get_folder_name: Function that converts the text of the pointer file to a folder name.
    """
    saves = list_tags(root, find_evidence)
    if tag is not None:
        return _select_tag(root, tag, saves, find_evidence)
    if (root / pointer).exists():
        return _follow_pointer(root, pointer, saves, get_folder_name)
    if find_evidence(root):
        return ""
    raise FormatError(
        f"`{pointer}` is missing",
        where=str(root),
        why=f"this file selects one of the saves, which are {quote_names(saves)}"
        if saves
        else "no saves were found",
        hint=f"select a save with {format_option('--tag')}" if saves else None,
    )


def _select_tag(root: TreePath, tag: str, saves: list[str], find_evidence: EvidenceFinder) -> str:
    if tag in saves:
        return tag
    if tag == root.name and find_evidence(root):
        return ""
    close = find_nearest(tag, saves)
    raise UsageError(
        f"unknown tag `{tag}`",
        where=str(root),
        why=f"found {quote_names(saves)}" if saves else "no saves were found",
        hint=f"did you mean {format_option(f'--tag {close}')}?" if close else None,
    )


def read_pointer(
    root: TreePath, pointer: str, max_bytes: int = MAX_TAG_BYTES
) -> tuple[bytes, bool]:
    """Read up to *max_bytes* of a pointer file, and return whether this is the complete file.

    A symlink that leads out of *root* is not followed, so that no message shows its content.
    """
    with source_files(root) as files:
        size = files.size(pointer)
        return files.read(pointer, 0, min(size, max_bytes)), size <= max_bytes


def _follow_pointer(
    root: TreePath, pointer: str, saves: list[str], get_folder_name: Callable[[str], str]
) -> str:
    content, is_complete = read_pointer(root, pointer)
    tag = content.decode(errors="replace").strip()
    where = str(root / pointer)
    # Prefer the run's own saves to the one that it was initialized from.
    numbered = [save for save in saves if any(map(str.isdigit, save))] or saves
    hint = f"select a save, for example {format_option(f'--tag {numbered[-1]}')}" if saves else None
    if not tag or not is_complete or not tag.isprintable() or "\ufffd" in tag:
        raise UnsupportedError(
            f"`{pointer}` is {'not the name of a save' if tag else 'empty'}",
            where=where,
            why="the save was interrupted, or another program wrote the file",
            hint=hint,
        )
    tag = get_folder_name(tag)
    if not (root / require_relative(tag, where)).is_dir():
        raise UnsupportedError(
            f"`{pointer}` points to `{tag}`, which does not exist",
            where=where,
            why=f"found {quote_names(saves)}" if saves else "no saves were found",
            hint=hint,
        )
    return require_relative(tag, where)
