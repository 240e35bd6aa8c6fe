"""What lies around a checkpoint and does not belong there: orphans and leftovers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from ckptctl.catalog import Catalog, Finding
from ckptctl.errors import CkptError
from ckptctl.formats.shared.tags import LATEST, LATEST_UNIVERSAL, pointer_content
from ckptctl.ops.verification.hub_digests import unfinished
from ckptctl.storage.destinations import staging_directory
from ckptctl.storage.paths import path_at

OWNED = (".distcp", ".safetensors")
LEFTOVER = re.compile(
    r".*\.(tmp|temp|partial|part|incomplete|crdownload|aria2|ckptctl-staging)|tmp-.*|\.tmp.*"
    r"|.*-tmp-\d+",
    re.IGNORECASE,
)


def surroundings(path: Path, catalog: Catalog | None) -> Iterator[Finding]:
    """Yield warnings about what lies in and beside a checkpoint."""
    yield from _unfinished(path)
    root = path_at(catalog.root) if catalog else path
    if not path.is_dir():
        return
    yield from _downloads(root)
    used = catalog.files if catalog else {}
    for folder in sorted({root, *((root / name).parent for name in used)}):
        yield from _strays(root, folder, catalog)
    yield from _emptied(root, used)
    for folder in {root, root.parent}:
        yield from _pointers(folder)


def _emptied(root: Path, used: Collection[str]) -> Iterator[Finding]:
    """Yield empty folders among those of parameters, as universal checkpoints have them."""
    above = {Path(name).parent.parent for name in used} - {Path()}
    for folder in sorted(above):
        for item in sorted((root / folder).iterdir()):
            if item.is_dir() and not any(item.iterdir()):
                why = "the folders beside it hold data"
                yield Finding("this folder is empty", why, "error", str(item.relative_to(root)))


def _unfinished(path: Path) -> Iterator[Finding]:
    stage = staging_directory(path)
    if stage.is_dir():
        why = f"`{stage.name}` beside it is of a run that ended early or is at work"
        yield Finding("an unfinished output for this place", why, "warning", str(stage))


def _downloads(root: Path) -> Iterator[Finding]:
    for item in unfinished(root):
        name = str(item.relative_to(root)) if item.is_relative_to(root) else str(item)
        yield Finding("a download did not finish", None, "warning", name)


def _strays(root: Path, folder: Path, catalog: Catalog | None) -> Iterator[Finding]:
    files = catalog.files if catalog else {}
    forms = {_form(Path(name).name) for name in files}
    known = {*files, *(one.file for one in catalog.findings)} if catalog else set()
    for item in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = str(item.relative_to(root))
        if name in known:
            continue
        if LEFTOVER.fullmatch(item.name):
            yield Finding("something is left over from a save", None, "warning", name)
        elif catalog and name not in catalog.assets and _is_data(item, forms):
            yield Finding("nothing refers to this file", None, "warning", name)


def _is_data(item: Path, forms: Collection[str]) -> bool:
    known = item.suffix in OWNED or _form(item.name) in forms
    return known and item.is_file() and item.stat().st_size > 0


def _form(name: str) -> str:
    """Return *name* with all numbers alike, as in ``rank_0.pt`` and ``rank_1.pt``."""
    return re.sub(r"\d+", "0", name)


def _pointers(folder: Path) -> Iterator[Finding]:
    """Yield pointers to saves that are not there; they stand beside the saves."""
    for name in (LATEST, LATEST_UNIVERSAL):
        pointer = folder / name
        if not pointer.is_file():
            continue
        try:
            content, whole = pointer_content(folder, name)
        except CkptError as error:
            yield Finding("a pointer cannot be read", error.what, "warning", str(pointer))
            continue
        if not whole:
            continue
        text = content.decode(errors="replace").strip()
        target = folder / text if text.isprintable() and "\ufffd" not in text else None
        if not text or target is None or not target.is_dir():
            why = f"it says {text[:100]!r}" if text else "it is empty"
            yield Finding("the pointer names no save that is here", why, "warning", str(pointer))
