"""Which files of a legacy Megatron checkpoint are one save, and which rank wrote each.

Source: ``megatron/training/checkpointing.py`` (``get_checkpoint_name``, ``read_metadata``):
``iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` with the numbers of the tensor, pipeline
and expert-parallel rank, the latter two only where there are several.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ckptctl.errors import FormatError, UnsupportedError
from ckptctl.formats.shared.tags import tag_folder, tags

POINTER = "latest_checkpointed_iteration.txt"
MODEL, OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"
_RANK = re.compile(r"mp_rank_(\d{2,7})((?:_\d{3,7}){0,2})", re.ASCII)
_ITERATION = re.compile(r"\d{1,15}", re.ASCII)

Numbers = tuple[int, ...]
"""What a folder's name says: the tensor-parallel rank, and up to two more numbers."""


def evidence(folder: Path) -> str | None:
    """Return what tells that *folder* is one save, or None."""
    if not folder.is_dir():
        return None
    found = sorted(item.name for item in folder.iterdir() if _is_rank(item))
    return f"{len(found)} of mp_rank_*/{MODEL}" if found else None


def _is_rank(item: Path) -> bool:
    return numbers(item.name) is not None and (item / MODEL).is_file()


def numbers(name: str) -> Numbers | None:
    """Return the numbers in a folder's name, or None when it is no rank's folder."""
    found = _RANK.fullmatch(name)
    if found is None:
        return None
    return (int(found[1]), *map(int, found[2].split("_")[1:]))


def is_run(path: Path) -> bool:
    """Return whether *path* is a folder of saves with the file that names the latest."""
    return path.is_dir() and (path / POINTER).is_file() and bool(tags(path, evidence))


def save_folder(path: Path, tag: str | None) -> str:
    """Return the folder of the save to read, relative to *path*; ``""`` where *path* is it.

    Raises:
        UsageError: There is no save *tag*.
        FormatError: Nothing says which save.
        UnsupportedError: The pointer is torn or names a save that is not there.
    """
    return tag_folder(path, tag, POINTER, evidence, _folder)


def _folder(text: str) -> str:
    """Return the folder that the pointer's text means: a number, or ``release``."""
    return f"iter_{int(text):07d}" if _ITERATION.fullmatch(text) else text


def rank_folders(root: Path, folder: str) -> dict[Numbers, str]:
    """Return the folders of the ranks by their numbers, whether or not their file is there.

    Raises:
        FormatError: There are none.
        UnsupportedError: They have different amounts of numbers, or two have the same.
    """
    found: dict[Numbers, str] = {}
    for name, parsed in sorted(_named(root / folder)):
        if found.setdefault(parsed, name) != name:
            raise mixed(root / folder, f"`{found[parsed]}` and `{name}` are the same rank's")
    if len({len(parsed) for parsed in found}) > 1:
        few = {len(parsed): name for parsed, name in found.items()}
        raise mixed(root / folder, " and ".join(f"`{name}`" for name in few.values()))
    if not found:
        raise FormatError(
            "there is no folder of a rank", where=str(root / folder), why="as in `mp_rank_00`"
        )
    return found


def _named(folder: Path) -> Iterator[tuple[str, Numbers]]:
    for item in folder.iterdir():
        parsed = numbers(item.name)
        if parsed is not None and item.is_dir():
            yield item.name, parsed


def mixed(where: Path | str, why: str) -> UnsupportedError:
    """Return the error for files that are not of one save."""
    return UnsupportedError(
        "files of several saves lie together",
        where=str(where),
        why=why,
        hint="move away those of the other save",
    )
