"""Which of several DeepSpeed saves in one folder is meant: tags and the file that points at one.

Source: ``deepspeed/runtime/engine.py`` (``save_checkpoint``): ``latest`` is written by rank 0,
neither atomically nor after all ranks have finished.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptctl.errors import FormatError, UnsupportedError, UsageError, listed, nearest, spell_option
from ckptctl.storage.files import source_files
from ckptctl.storage.paths import contained
from ckptctl.tree import TreePath
from ckptctl.units import natural

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
MAX_TAG = 4096
Evidence = Callable[[TreePath], str | None]


def tags(root: TreePath, evidence: Evidence) -> list[str]:
    """Return the folders of saves directly in *root*, in natural order."""
    return natural([item.name for item in root.iterdir() if evidence(item)])


def is_run(root: TreePath, pointer: str, evidence: Evidence) -> bool:
    """Return whether *root* is a folder of saves with the file that names the latest."""
    return root.is_dir() and (root / pointer).is_file() and bool(tags(root, evidence))


def tag_folder(
    root: TreePath,
    tag: str | None,
    pointer: str,
    evidence: Evidence,
    meant: Callable[[str], str] = str,
) -> str:
    """Return the folder to read, relative to *root*; ``""`` where *root* is it.

    It is *tag*, or else what the file *pointer* says, whose text *meant* turns into a folder.
    *evidence* says what tells that a folder is a save.
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
        why=f"this file selects one of the saves, which are {listed(found)}"
        if found
        else "no saves were found",
        hint=f"select a save with {spell_option('--tag')}" if found else None,
    )


def _asked(root: TreePath, tag: str, found: list[str], evidence: Evidence) -> str:
    if tag in found:
        return tag
    if tag == root.name and evidence(root):
        return ""
    close = nearest(tag, found)
    raise UsageError(
        f"unknown tag `{tag}`",
        where=str(root),
        why=f"found {listed(found)}" if found else "no saves were found",
        hint=f"did you mean {spell_option(f'--tag {close}')}?" if close else None,
    )


def pointer_content(root: TreePath, pointer: str, most: int = MAX_TAG) -> tuple[bytes, bool]:
    """Return what a pointer holds, and whether that is all of it.

    What a link out of *root* leads to is not read, so that no message quotes it.
    """
    with source_files(root) as files:
        size = files.size(pointer)
        return files.read(pointer, 0, min(size, most)), size <= most


def _pointed_at(root: TreePath, pointer: str, found: list[str], meant: Callable[[str], str]) -> str:
    content, whole = pointer_content(root, pointer)
    named = content.decode(errors="replace").strip()
    where = str(root / pointer)
    # Of a run's own saves rather than what it began with.
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
    if not (root / contained(named, where)).is_dir():
        raise UnsupportedError(
            f"`{pointer}` points to `{named}`, which does not exist",
            where=where,
            why=f"found {listed(found)}" if found else "no saves were found",
            hint=hint,
        )
    return contained(named, where)
