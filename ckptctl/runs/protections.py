"""Protections of checkpoints against removal; :data:`PROTECTIONS` at the end lists them all.

Each protection is a function that claims checkpoints of a run, with a reason. A claimed checkpoint
either *stays* and counts for the rules of ``prune`` like any other, or is *left alone*: it stays
and does not count. :mod:`ckptctl.planner.retention` contains the rules themselves.

Many protections claim by a text. It may be a name, a path of this system or of Windows, a file
inside the checkpoint, quoted, one line of several, a value in JSON, or only a number. A pointer
that cannot be interpreted protects all checkpoints: see :meth:`Pointers.require_understood`.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from ckptctl.errors import CkptError, RefusedError, StorageError
from ckptctl.formats.megatron.megatron_folder import POINTER_FILE as ITERATION
from ckptctl.formats.shared.tags import LATEST, LATEST_UNIVERSAL, read_pointer
from ckptctl.formats.sidecar_files import RUN_FILE
from ckptctl.planner.retention import BEING_WRITTEN, NOT_INTERRUPTED, find_abandoned_checkpoints
from ckptctl.runs.entries import entry_at
from ckptctl.runs.health import Checkpoint, health
from ckptctl.runs.names import is_last, parse, staged
from ckptctl.runs.notes import LAST, TRAINER, noted, trainer_state
from ckptctl.storage.paths import resolve_links
from ckptctl.storage.two_phase_delete import TRASH_FOLDER
from ckptctl.storage.urls import is_url
from ckptctl.tree import TreePath

POINTERS = {
    LATEST: "DeepSpeed",
    LATEST_UNIVERSAL: "DeepSpeed",
    "last_checkpoint": "detectron2",
    ITERATION: "Megatron-LM, verl",
}
"""Files in a run that name the checkpoint that their trainer opens next."""
MAX_TEXT = 1 << 13
SHOWN = 80
"""Maximum number of shown characters of a pointer."""
AT_WORK_WITH = "the running training process"
ENDLESS = frozenset({"release"})
"""Megatron's word for published weights, in place of a step."""
PARTS = 256
"""Maximum number of parts of a text that are looked up."""
HOPS = 40
"""Maximum length of a chain of links, as in Linux (man 7 path_resolution)."""
MAX_ENTRIES = 1_000_000
"""Maximum number of entries searched below one folder of the run."""
_MARKS = ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_BETWEEN = re.compile(r"[\\/\r\n]+")
_QUOTED = re.compile(r'"([^"\r\n]*)"')
_AROUND = " \t\"'`“”‘’«»{}[]()<>,;"
_NUMBER = re.compile(
    r"(?:^[^\S\n]*+|:\s*+)[\"']?(\d{1,18})[\"']?(?:[^\S\n]*+$|\s*+[,}]|\s*+\Z)",
    re.ASCII | re.MULTILINE,
)
"""Number on a separate line, or as a value in JSON."""
_LIKE_A_STEP = re.compile(r"(?:[A-Za-z_.=+-]*+\d)++[A-Za-z_.=+-]*+", re.ASCII)

Alike = Callable[[str], str | None]


class PointerFile(NamedTuple):
    """Content of a pointer file, whether it was read to its end, or the error."""

    content: str = ""
    is_whole: bool = True
    error: CkptError | None = None

    @classmethod
    def read(cls, root: TreePath, file: str) -> PointerFile:
        """Read a pointer in UTF-8 or UTF-16 (as on Windows), which is empty if there is none."""
        try:
            if not (root / file).is_file():
                return cls()
            content, is_whole = read_pointer(root, file, MAX_TEXT)
        except CkptError as error:
            return cls(error=error)
        except OSError as error:
            return cls(error=StorageError(str(error)))
        marks = (name for mark, name in _MARKS if content.startswith(mark))
        text = content.decode(next(marks, "utf-8"), "replace")
        return cls(text.replace("\0", "").removeprefix("\ufeff").strip(), is_whole)

    @property
    def tells_a_step(self) -> bool:
        """Whether it names a checkpoint of a run or its number, existing or not."""
        return names_a_step(self.content) or (
            self.content.isdecimal() and len(self.content) < SHOWN
        )


@dataclass(frozen=True, slots=True)
class Pointers:
    """Pointer files of a run, each read once."""

    root: TreePath
    files: Mapping[str, PointerFile]

    @classmethod
    def read(cls, root: TreePath) -> Pointers:
        """Read all pointer files in *root*."""
        return cls(root, {file: PointerFile.read(root, file) for file in POINTERS})

    def _members(self) -> list[TreePath]:
        named = (item for item in self.root.iterdir() if parse(item.name) or is_last(item.name))
        return sorted(named)

    def require_understood(self) -> None:
        """Raise if a pointer of the run cannot be read or interpreted.

        The best checkpoint according to one with a torn write only counts if it can be read, since
        training does not resume from there.
        """
        root, members = self.root, [item for item in self._members() if not item.is_symlink()]
        names = [item.name for item in members]
        spelt = alike(root, names)
        for file, (text, is_whole, error) in self.files.items():
            _require_read(root / file, error)
            known = mentioned(text, names, spelt) or understood(text, root)
            if not is_whole or (text and not known):
                raise RefusedError(
                    "a pointer has unrecognized content",
                    where=str(root / file),
                    why=f"it contains {text[:SHOWN]!r}; "
                    "the checkpoint that it names could be removed",
                    hint="write the name of a checkpoint into it, or move it away",
                )
        _require_read(root / TRAINER, trainer_state(root).error)
        for path in members:
            note, state = noted(path), trainer_state(path)
            torn = (note.error or state.error) and health(path, model=False).torn
            if not torn or (is_last(path.name) and isinstance(note.error, StorageError | None)):
                _require_read(path, note.error)
            if not torn:
                _require_read(path / TRAINER, state.error)

    def dangling(self) -> Iterator[str]:
        """Yield a message for each pointer file whose checkpoint no longer exists."""
        names = [item.name for item in self._members()]
        spelt = alike(self.root, names)
        for file, pointer in self.files.items():
            if pointer.tells_a_step and not mentioned(pointer.content, names, spelt):
                text = pointer.content[:SHOWN]
                yield f"`{file}` names checkpoint {text!r}, which does not exist"


def _require_read(path: TreePath, error: CkptError | None) -> None:
    if error:
        failed = isinstance(error, StorageError)
        raise (StorageError if failed else RefusedError)(
            "a pointer cannot be read",
            where=str(path),
            why=f"{error.what}; the checkpoint that it names could be removed",
            hint="run it as a user who can read the file"
            if failed
            else "restore a copy of the file, or move its checkpoint out of the run",
        )


class Claim(NamedTuple):
    """Claim on a checkpoint by its name, or by a *text* that may name it in several ways.

    For a checkpoint that stays and counts, the reason is the file or link that names it.
    """

    reason: str
    name: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class RunView:
    """Everything that protections see of a run, with the newest of *checkpoints* last.

    A running job uses those in *in_use*. With *branches*, abandoned checkpoints stay.
    """

    root: TreePath
    checkpoints: Sequence[Checkpoint]
    pointers: Pointers
    in_use: Collection[str] = ()
    branches: bool = True

    @property
    def own(self) -> list[Checkpoint]:
        """Checkpoints that are not links."""
        return [one for one in self.checkpoints if not one.entry.link]

    @property
    def names(self) -> list[str]:
        """Names of finished checkpoints that are not links."""
        return [one.name for one in self.own if not one.entry.staging]

    def names_where(self, holds: Callable[[Checkpoint], bool]) -> list[str]:
        """Return the names of checkpoints that are not links and satisfy *holds*."""
        return [one.name for one in self.own if holds(one)]


@dataclass(frozen=True, slots=True)
class Protection:
    """Reason why a checkpoint is not removed.

    Attributes:
        trainer: Program that writes the file.
        file: File that contains the claim.
        effect: ``stays``, or ``left alone`` if it also does not count.
    """

    name: str
    trainer: str
    file: str
    claims: Callable[[RunView], Iterator[Claim]]
    effect: Literal["stays", "left alone"] = "stays"


class Protected(NamedTuple):
    """Protection of one checkpoint, by references or by a reason to leave it alone."""

    pinned: tuple[str, ...] = ()
    exempt: str = ""


def protect(view: RunView) -> dict[str, Protected]:
    """Collect the protections of each checkpoint, by its name."""
    known, names = {one.name for one in view.checkpoints}, view.names
    spelt = alike(view.root, names)
    found: dict[str, Protected] = {}
    for protection in PROTECTIONS:
        for claim in protection.claims(view):
            named = mentioned(claim.text, names, spelt) if claim.text else (claim.name,)
            for name in named:
                name = name if name in known else spelt(name) or ""
                if not name:
                    continue
                pinned, exempt = found.get(name, Protected())
                if protection.effect == "left alone":
                    exempt = exempt or claim.reason
                elif claim.reason not in pinned:
                    pinned = (*pinned, claim.reason)
                found[name] = Protected(pinned, exempt)
    return found


# --- what names a checkpoint -------------------------------------------------------------------


def _pointer(file: str, view: RunView) -> Iterator[Claim]:
    """Claim the checkpoint in a pointer file, which its trainer opens next."""
    yield Claim(f"`{file}`", text=view.pointers.files[file].content)


def _best_of_trainer(view: RunView) -> Iterator[Claim]:
    """Claim the best checkpoint according to transformers' newest trainer states.

    If a state is truncated, the part before the truncation counts, and also the newest state that
    is readable to its end.
    """
    states = {name: trainer_state(view.root / name) for name in view.names}
    stating = [name for name in view.names if states[name].there]
    newest = _newest(stating, view)
    clear = _newest([name for name in stating if not states[name].error], view)
    yield from (Claim(f"`{TRAINER}` as the best", text=t) for t in trainer_state(view.root).best)
    for name in dict.fromkeys((*newest, *clear)):
        cut = (one for one in newest if states[one].error and _series(one) == _series(name))
        other = next((one for one in cut if one != name), None)
        instead = f" of `{name}` as the best (the one of `{other}` cannot be read)"
        reason = f"`{TRAINER}`{instead if other else ' as the best'}"
        yield from (Claim(reason, text=text) for text in states[name].best)


def _best_of_lightning(view: RunView) -> Iterator[Claim]:
    """Claim the best checkpoints according to Lightning's newest states."""
    lasts = (name for name in view.names if is_last(name))
    for name in dict.fromkeys((LAST, *lasts, *_newest(view.names, view))):
        for best in noted(view.root / name).best:
            yield Claim(f"`{name}` as the best", text=best)


def _link_to_it(view: RunView) -> Iterator[Claim]:
    """Claim checkpoints that links lead to, into or through."""
    links = {one.name for one in view.checkpoints if one.entry.link}
    for name, link in linked(view.root, view.names):
        if name not in links:
            yield Claim(link, name)


def _in_use(view: RunView) -> Iterator[Claim]:
    """Claim the last save of a running job and the checkpoint that it resumed from."""
    yield from (Claim(AT_WORK_WITH, name) for name in view.in_use if name)


# --- what a checkpoint is ----------------------------------------------------------------------


def _left_behind(view: RunView) -> Iterator[Claim]:
    """Claim checkpoints that were abandoned when the run resumed from an earlier one."""
    for name, step in find_abandoned_checkpoints(view.own).items() if view.branches else ():
        yield Claim(f"abandoned: the run resumed from step {step}", name)


def _is_link(view: RunView) -> Iterator[Claim]:
    """Claim links that are named like checkpoints, since their targets are managed elsewhere."""
    yield from (Claim("a symbolic link", one.name) for one in view.checkpoints if one.entry.link)


def _is_last(view: RunView) -> Iterator[Claim]:
    """Claim ``last.ckpt``, which Lightning overwrites with each save and opens next."""
    lasts = (one.name for one in view.checkpoints if is_last(one.name))
    yield from (Claim("the newest according to its trainer", name) for name in lasts)


def _unread_record(view: RunView) -> Iterator[Claim]:
    """Claim complete checkpoints with an unreadable record.

    They may be the best ones, or abandoned.
    """
    for one in view.own:
        if one.record.error and _may_resume(one):
            yield Claim(f"its `{RUN_FILE}` cannot be read: {one.record.error.what}", one.name)


def _being_written(view: RunView) -> Iterator[Claim]:
    """Claim checkpoints that are locked, or incomplete and changed recently."""
    yield from (Claim(BEING_WRITTEN, name) for name in view.names_where(lambda one: one.writing))


def _not_torn(view: RunView) -> Iterator[Claim]:
    """Claim checkpoints that are not complete and show no torn write."""
    names = view.names_where(lambda one: not (one.complete or one.torn))
    yield from (Claim(NOT_INTERRUPTED, name) for name in names)


def _may_resume(one: Checkpoint) -> bool:
    """Return whether the checkpoint shows no torn write, so that training may resume from it."""
    return not (one.torn or one.writing)


def _newest(names: Sequence[str], view: RunView) -> list[str]:
    """Return the newest of *names* in each series, and the newest that training may resume from.

    A checkpoint with a torn write may name itself as the best, so the newest complete one and the
    newest one without a torn write count as well.
    """
    kinds = {name: series for name in names if (series := _series(name))}
    bases = view.names_where(lambda one: one.complete), view.names_where(_may_resume)
    newest = [
        {series: name for name, series in kinds.items() if name in some}.values()
        for some in (kinds, *bases)
    ]
    return list(dict.fromkeys(chain.from_iterable(newest)))


def _series(name: str) -> str:
    known = parse(name)
    return known.series if known else ""


def points_inside(root: TreePath) -> bool:
    """Return whether a pointer or link in *root*, or next to it, names an entry of *root*.

    A pointer to a missing checkpoint also counts, since that checkpoint belonged to a run.
    """
    pointers = Pointers.read(root)
    if any(pointer.tells_a_step for pointer in pointers.files.values()):
        return True
    found = (entry for item in root.iterdir() if (entry := entry_at(item)))
    view = RunView(root, [Checkpoint.of(entry) for entry in found], pointers)
    names = [one.name for one in view.checkpoints if one.path.is_dir()]
    spelt = alike(root, names)
    texts = (claim.text for protection in NAMING for claim in protection.claims(view))
    return any(mentioned(text, names, spelt) for text in texts) or any(
        name in names for name, _ in linked(root, names, near=True)
    )


# --- what a text names ---------------------------------------------------------------------------


def mentioned(text: str, names: Sequence[str], alike: Alike) -> tuple[str, ...]:
    """Return the checkpoints that *text* mentions, by name, path or number."""
    # Only as separate words: step-10 does not mention step-1.
    words = (
        (name, rf"(?<![\w.=+-]){re.escape(name)}(?![\w=+-])") for name in names if name in text
    )
    found = [name for name, word in words if re.search(word, text)]
    found += [known for part in _parts(text) if (known := alike(part))]
    if not found:
        steps = {int(digits) for digits in _NUMBER.findall(text)}
        found = [name for name in names if (one := parse(name)) and one.step in steps]
    return tuple(dict.fromkeys(found))


def alike(root: TreePath, names: Sequence[str]) -> Alike:
    """Build a function that resolves an alternative spelling of a checkpoint name.

    A file system may fold case or normalize accents, and a hard link has two names.
    """

    @cache
    def known() -> Mapping[tuple[int, int], str]:
        return {place: name for name in names if (place := _place(root / name))}

    def find(name: str) -> str | None:
        place = _place(root / name) if name else None
        return known().get(place) if place else None

    return find


def understood(text: str, root: TreePath) -> bool:
    """Return whether a text without a checkpoint of *root* names something else.

    That is a missing checkpoint, another entry of the folder, or an existing path elsewhere.
    """
    if text in ENDLESS or _LIKE_A_STEP.fullmatch(text) or names_a_step(text):
        return True
    parts = [part for part in _parts(text) if part not in (os.curdir, os.pardir)]
    with suppress(ValueError):
        there = [*(root / part for part in parts), *([Path(text)] if text.startswith("/") else [])]
        return any(path.exists() if is_url(path) else os.path.lexists(path) for path in there)
    return False


def names_a_step(text: str) -> bool:
    """Return whether *text* contains a name of a checkpoint, existing or not."""
    return any(parse(part) or staged(part) or is_last(part) for part in _parts(text))


def _parts(text: str) -> list[str]:
    """Split a text into path components and quoted strings, without quotes."""
    words = [text, *_QUOTED.findall(text)]
    parts = (part.strip(_AROUND) for word in words for part in _BETWEEN.split(word))
    return [part for part in dict.fromkeys(parts) if part][:PARTS]


def _place(path: TreePath) -> tuple[int, int] | None:
    with suppress(OSError, ValueError):
        status = path.lstat()
        return (status.st_dev, status.st_ino) if status.st_ino else None
    return None


# --- where links lead ----------------------------------------------------------------------------


def linked(
    root: TreePath, names: Sequence[str], *, near: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield entries of *root* that links lead to, into or through, with a name for the link.

    If a folder has too many entries to search, all of *names*, the run's checkpoints, are yielded.
    With *near*, only links directly in the run and next to it are searched.
    """
    if is_url(root):
        return
    real = resolve_links(Path(root))
    folders = () if near else (*names, *_others(real, names))
    inside = ((name, link) for name in folders for link in _all(real, name))
    items = (item for folder in (real, real.parent) for item in _listed(folder))
    beside = (("", Path(item.path)) for item in items if item.is_symlink())
    for folder, link in chain(beside, inside):
        if link is None:
            full = f"`{folder}`, which has too many entries to search for links"
            yield from ((name, full) for name in names)
            continue
        with suppress(OSError, RuntimeError, ValueError):
            # Entries that the link needs: without any one of them it would be broken.
            passed = (at.relative_to(real).parts for at in _way(link) if at.is_relative_to(real))
            for name in dict.fromkeys(parts[0] for parts in passed if parts):
                if not link.is_relative_to(real / name):
                    yield name, f"the link `{os.path.relpath(link, real)}`"


def _way(link: Path) -> Iterator[Path]:
    """Yield every path that the system resolves to follow *link*, whose folder is a real path."""
    at, left, hops = link.parent, [link.name], 0
    while left:
        part = left.pop(0)
        if part == os.pardir:
            at = at.parent
            continue
        found = at / part
        yield found
        if not found.is_symlink():
            at = found
            continue
        hops += 1
        if hops > HOPS:
            return
        target = found.readlink()
        at = Path(target.anchor) if target.is_absolute() else at
        left = [*(word for word in target.parts if word != target.anchor), *left]


def _others(root: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield the folders in *root* that are not checkpoints."""
    known = {*names, TRASH_FOLDER}
    with suppress(OSError), os.scandir(root) as found:
        for item in found:
            if item.name not in known and item.is_dir(follow_symlinks=False):
                yield item.name


def _all(root: Path, name: str) -> Iterator[Path | None]:
    """Yield the links below a folder of *root* in order, then None if there may be more."""
    waiting = [iter(_listed(root / name))]
    for _ in range(MAX_ENTRIES):
        while waiting and (item := next(waiting[-1], None)) is None:
            waiting.pop()
        if not waiting or item is None:
            return
        if item.is_symlink():
            yield Path(item.path)
        elif item.is_dir(follow_symlinks=False):
            waiting.append(iter(_listed(item.path)))
    yield None


def _listed(folder: Path | str) -> list[os.DirEntry[str]]:
    """List a folder in order, or return an empty list for a file or an unreadable folder."""
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda item: item.name)
    except OSError:
        return []


NAMING: tuple[Protection, ...] = (
    *(
        Protection("pointer file", POINTERS[name], name, partial(_pointer, name))
        for name in POINTERS
    ),
    Protection("best checkpoint", "transformers", TRAINER, _best_of_trainer),
    Protection("best checkpoint", "Lightning", LAST, _best_of_lightning),
)
"""Files that name a checkpoint."""

PROTECTIONS: tuple[Protection, ...] = (
    *NAMING,
    Protection("link to it", "any", "any symbolic link", _link_to_it),
    Protection("in use", "CheckpointManager", "none: the running process", _in_use),
    Protection("abandoned branch", "CheckpointManager", RUN_FILE, _left_behind, "left alone"),
    Protection("is a link", "any", "the checkpoint itself", _is_link, "left alone"),
    Protection("last checkpoint", "Lightning", LAST, _is_last, "left alone"),
    Protection("unreadable record", "CheckpointManager", RUN_FILE, _unread_record, "left alone"),
    Protection("being written", "any", "a lock, or a fresh file", _being_written, "left alone"),
    Protection("no incomplete write", "any", "any of its files", _not_torn, "left alone"),
)
"""All protections of checkpoints, independent of the rules of a policy.

If there are several reasons to leave one alone, the first is reported.
"""
