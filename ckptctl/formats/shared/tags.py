"""Selection of one of several DeepSpeed saves in a folder, by tag or pointer file.

Source: ``deepspeed/runtime/engine.py`` (``save_checkpoint``). Rank 0 writes ``latest``, neither
atomically nor after all ranks have finished.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptctl.errors import (
    FormatError,
    UnsupportedError,
    UsageError,
    find_nearest,
    quote_names,
    spell_option,
)
from ckptctl.storage.files import source_files
from ckptctl.storage.paths import require_relative
from ckptctl.tree import TreePath
from ckptctl.units import sort_naturally

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
MAX_TAG = 4096
Evidence = Callable[[TreePath], str | None]


def tags(root: TreePath, evidence: Evidence) -> list[str]:
    """Return the folders of saves directly in *root*, in natural order."""
    return sort_naturally([item.name for item in root.iterdir() if evidence(item)])


def is_run(root: TreePath, pointer: str, evidence: Evidence) -> bool:
    """Return whether *root* is a folder of saves with a pointer file."""
    return root.is_dir() and (root / pointer).is_file() and bool(tags(root, evidence))


def tag_folder(
    root: TreePath,
    tag: str | None,
    pointer: str,
    evidence: Evidence,
    meant: Callable[[str], str] = str,
) -> str:
    """Return the folder to read, relative to *root*, or ``""`` for *root* itself.

    This is *tag*, or else the folder that *meant* derives from the text of the file *pointer*.
    *evidence* returns the evidence that a folder is a save, or None.
    """
    found = tags(root, evidence)
    if tag is not None:
        return _asked(root, tag, found, evidence)
    if (root / pointer).exists():
        return _pointed_at(root, pointer, found, meant)
    if evidence(root):
        return ""
    raise FormatError(
        f"`{pointer}` is missing",
        where=str(root),
        why=f"this file selects one of the saves, which are {quote_names(found)}"
        if found
        else "no saves were found",
        hint=f"select a save with {spell_option('--tag')}" if found else None,
    )


def _asked(root: TreePath, tag: str, found: list[str], evidence: Evidence) -> str:
    if tag in found:
        return tag
    if tag == root.name and evidence(root):
        return ""
    close = find_nearest(tag, found)
    raise UsageError(
        f"unknown tag `{tag}`",
        where=str(root),
        why=f"found {quote_names(found)}" if found else "no saves were found",
        hint=f"did you mean {spell_option(f'--tag {close}')}?" if close else None,
    )


def pointer_content(root: TreePath, pointer: str, most: int = MAX_TAG) -> tuple[bytes, bool]:
    """Read the start of a pointer file, and return whether that is all of it.

    A link that leads out of *root* is not followed, so that no message quotes its target.
    """
    with source_files(root) as files:
        size = files.size(pointer)
        return files.read(pointer, 0, min(size, most)), size <= most


def _pointed_at(root: TreePath, pointer: str, found: list[str], meant: Callable[[str], str]) -> str:
    content, whole = pointer_content(root, pointer)
    named = content.decode(errors="replace").strip()
    where = str(root / pointer)
    # Prefer the run's own saves to the one that it was initialized from.
    own = [one for one in found if any(map(str.isdigit, one))] or found
    hint = f"select a save, for example {spell_option(f'--tag {own[-1]}')}" if found else None
    if not named or not whole or not named.isprintable() or "\ufffd" in named:
        raise UnsupportedError(
            f"`{pointer}` is {'not the name of a save' if named else 'empty'}",
            where=where,
            why="the save was interrupted, or another program wrote the file",
            hint=hint,
        )
    named = meant(named)
    if not (root / require_relative(named, where)).is_dir():
        raise UnsupportedError(
            f"`{pointer}` points to `{named}`, which does not exist",
            where=where,
            why=f"found {quote_names(found)}" if found else "no saves were found",
            hint=hint,
        )
    return require_relative(named, where)
