"""Whether a checkpoint of a run is complete, by the same readers as ``verify --level fast``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptctl import formats
from ckptctl.errors import (
    CkptError,
    DamagedError,
    MappingError,
    SourceNotFoundError,
    StorageError,
    UnsafePickleError,
)
from ckptctl.formats.dcp.metadata import METADATA
from ckptctl.ops.verification.options import VerifyOptions
from ckptctl.ops.verification.result import Verification
from ckptctl.ops.verification.structure import root_of
from ckptctl.ops.verification.verify import verify
from ckptctl.storage.contained import OutsideError
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.remote.path import require_answers
from ckptctl.storage.remote.unfinished import unfinished

BUILT_IN_RULES = Path("megatron-core")
DATA = ".distcp"
COMPANIONS = (
    "trainer_state.json",
    "meta.pt",
    "recipe_state.pt",
    "recipe_state/recipe_state.pt",
    "common.pt",
    "random_states_0.pkl",
)
"""What trainers write beside the weights, and after them: transformers, Lightning, torchtune,
Megatron, accelerate."""


@dataclass(frozen=True, slots=True)
class Health:
    """What is known of a checkpoint.

    Attributes:
        format: Its format; None: none is known.
        parts: What it consists of: itself, or checkpoints inside of it; nothing: it is none.
        problem: Why it is not complete; empty: it is.
        known: Whether it is known to be incomplete, or complete. What cannot be read here (a disk
            that fails, permissions, a link that leads out of it, a pickle of somebody's own
            classes) may be whole elsewhere.
    """

    format: str | None
    parts: tuple[Path, ...]
    problem: str = ""
    known: bool = True


def health(path: Path) -> Health:
    """Return what is known of the checkpoint at *path*; every part of it has to be whole.

    Raises:
        StorageError: What is behind a URL did not answer.
    """
    try:
        found = _health(path)
    except OSError as error:
        what = StorageError.from_os_error(error, "look into it", str(path)).what
        return Health(None, (), what, known=False)
    require_answers(path)
    return found


def _health(path: Path) -> Health:
    torn = _unfinished(path)
    if torn:
        return Health("dcp", (path,), f"`{(torn / METADATA).relative_to(path)}` is missing")
    writing = unfinished(path)
    if writing is not None:
        return Health(next(iter(formats.sniff(path)), None), (path,), _whole_text(writing))
    found = tuple((part, name) for part in _parts(path) for name in formats.sniff(part))
    parts = tuple(dict.fromkeys(part for part, _ in found))
    if not found:
        return Health(None, (), "nothing in it is recognised as a checkpoint")
    several = len(parts) != len(found)
    for part, name in found:
        problem, certain = _problem(part, name if several else None)
        if problem:
            inside = "" if part == path else f"`{part.relative_to(path)}`: "
            return Health(name, parts, inside + problem, certain)
    model = [name for part, name in found if not formats.NO_MODEL.fullmatch(part.name)]
    return Health((model or [found[0][1]])[0], parts)


def _unfinished(path: Path) -> Path | None:
    """Return a folder with what ranks save in DCP's format and without what is saved last."""
    for folder in (path, *(item for item in _inside(path) if item.is_dir())):
        saved = any(item.name.endswith(DATA) for item in _inside(folder))
        last = folder / METADATA
        if saved and not (last.exists() or last.is_symlink()) and not formats.sniff(folder):
            return folder
    return None


def _inside(folder: Path) -> list[Path]:
    """Return what lies in a folder, in order; nothing where it is a file, or not to be listed."""
    try:
        return sorted(folder.iterdir())
    except (NotADirectoryError, PermissionError):
        return []


class Company:
    """Which of the files that trainers write last the checkpoints of a series have.

    Args:
        members: The checkpoints, and of which series each is.
    """

    def __init__(self, members: Mapping[Path, str]) -> None:
        self._have = {path: [name for name in COMPANIONS if _has(path, name)] for path in members}
        self._count = Counter(members.values())
        self._having = Counter(
            (members[p], name) for p, names in self._have.items() for name in names
        )

    def lacking(self, path: Path, series: str) -> str:
        """Return which file *path* lacks that most others have, as a sentence; empty: none.

        Args:
            path: A member of *series*, or a link to something like one, which does not count.
            series: Those that it is compared with.
        """
        member = path in self._have
        have = self._have[path] if member else [name for name in COMPANIONS if _has(path, name)]
        others = self._count[series] - member
        for name in COMPANIONS:
            if name not in have and self._having[series, name] * 2 > others:
                return f"`{name}`, which the others have, is missing"
        return ""


def _has(folder: Path, name: str) -> bool:
    try:
        return (folder / name).exists()
    except OSError:
        return False


def _whole_text(error: CkptError) -> str:
    return f"{error.what} ({error.why})" if error.why else error.what


def _parts(path: Path) -> list[Path]:
    if formats.sniff(path):
        return [path]
    return formats.list_run(path) or formats.below(path)


def _problem(path: Path, name: str | None) -> tuple[str, bool]:
    """Return why *path* is not whole, and whether that is certain; empty: it is whole."""
    asked = VerifyOptions(format=name, level="fast")
    try:
        found = verify(path, asked)
    except MappingError as error:
        # The files do not say how ranks divide tensors; whether all are there can be told.
        by_rules = _by_rules(path, asked)
        if by_rules is None:
            return error.what, False
        certain = by_rules.verdict != "not understood" and not _leads_outside(path, by_rules)
        return _first(by_rules, path), certain
    except CkptError as error:
        return error.what, _tells(error)
    problem = _first(found, path)
    if found.verdict == "not understood":
        return problem, False
    certain = not problem or (_can_be_read(path, name) and not _leads_outside(path, found))
    return problem, certain


def _leads_outside(path: Path, found: Verification) -> bool:
    """Return whether a file that something is wrong with leads out of the checkpoint."""
    files = {one.file for one in found.errors if one.file and not Path(one.file).is_absolute()}
    with SourceFiles(root_of(path)) as source:
        for file in files if source.local else ():
            try:
                source.path(file)
            except OutsideError:
                return True
            except CkptError:
                continue
    return False


def _can_be_read(path: Path, name: str | None) -> bool:
    """Return whether nothing but damage keeps the index from being read."""
    try:
        formats.open_checkpoint(path, name)
    except CkptError as error:
        return _tells(error)
    return True


def _tells(error: CkptError) -> bool:
    """Return whether *error* says that a checkpoint is not whole, and not that it is not ours."""
    damage = isinstance(error, DamagedError | SourceNotFoundError)
    return damage and not isinstance(error, UnsafePickleError | OutsideError)


def _by_rules(path: Path, asked: VerifyOptions) -> Verification | None:
    try:
        return verify(path, replace(asked, rules=BUILT_IN_RULES))
    except CkptError:
        return None


def _first(found: Verification, path: Path) -> str:
    """Return what is wrong first, and where inside of *path*."""
    wrong = (*found.errors, *found.unknown)
    more = len(wrong) - 1
    if not wrong:
        return ""
    first = wrong[0]
    told = first.where in ("", str(path.absolute())) or first.where in first.what
    where = "" if told else f" ({first.where})"
    return f"{first.what}{where}" + (f" and {more:,} more" if more else "")
