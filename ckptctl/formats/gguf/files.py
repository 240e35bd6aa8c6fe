"""Which files are GGUF, and which of them are one model."""

from __future__ import annotations

import re
from pathlib import Path

from ckptctl.errors import DamagedError, FormatError, listed
from ckptctl.units import counted

MAGIC = b"GGUF"
SUFFIX = ".gguf"
_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


def models(folder: Path) -> list[str]:
    """Return the GGUF files in a folder that hold a language model, not what sees pictures."""
    found = (item for item in folder.iterdir() if item.name.endswith(SUFFIX))
    return sorted(i.name for i in found if not i.name.startswith("mmproj") and is_gguf(i))


def is_gguf(path: Path) -> bool:
    """Return whether a file begins as one of this format."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def parts_of(root: Path, path: Path) -> list[str]:
    """Return the names of the files of one model."""
    names = [path.name] if path != root else models(root)
    parts = [_PART.fullmatch(name) for name in names]
    first = parts[0] if parts else None
    if first is None and len(names) == 1:
        return names
    if first is None or any(one is None or one[1] != first[1] for one in parts):
        raise FormatError(
            f"this folder contains {counted(len(names), 'GGUF file')}, and each may be a model",
            where=str(root),
            why=listed(names),
            hint="pass one of these files",
        )
    count = int(first[3])
    wanted = [f"{first[1]}-{n:05d}-of-{first[3]}{SUFFIX}" for n in range(1, count + 1)]
    missing = [name for name in wanted if not (root / name).is_file()]
    if missing or not wanted:
        raise DamagedError(
            f"{len(missing):,} of {counted(count, 'file is', 'files are')} missing",
            where=str(root),
            why=listed(missing),
            hint="copy the remaining files of the model",
        )
    return wanted
