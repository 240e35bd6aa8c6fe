"""Who protects a checkpoint from being removed: one list, :data:`PROTECTIONS`, at the end.

Each protection is a function that claims checkpoints of a run, with a reason. What is claimed
*stays*, and counts for the rules of ``prune`` as before; or it is *left alone*: it stays and does
not count. What the rules themselves keep stands in :mod:`ckptctl.planner.retention`.

A pointer of which nobody knows what it names protects all: see :func:`require_pointers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple

from ckptctl.errors import CkptError, RefusedError, StorageError
from ckptctl.formats.megatron.files import POINTER as ITERATION
from ckptctl.formats.shared.tags import LATEST, LATEST_UNIVERSAL, pointer_content
from ckptctl.formats.sidecar_files import SIDECAR
from ckptctl.ops.runs.entries import entry_at
from ckptctl.ops.runs.health import Checkpoint, health
from ckptctl.ops.runs.names import is_last, parse
from ckptctl.ops.runs.notes import LAST, TRAINER, noted, trainer_state
from ckptctl.ops.runs.references import alike, decoded, linked, mentioned, names_a_step, understood
from ckptctl.planner.retention import NOT_TORN, WRITING, left_in
from ckptctl.storage.tree import TreePath

POINTERS = {
    LATEST: "DeepSpeed",
    LATEST_UNIVERSAL: "DeepSpeed",
    "last_checkpoint": "detectron2",
    ITERATION: "Megatron-LM, verl",
}
"""Files in a run that name one of its checkpoints, and whose trainers open that one next."""
MAX_TEXT = 1 << 13
SHOWN = 80
"""How many characters of a pointer are shown."""
AT_WORK_WITH = "the running training process"


class Claim(NamedTuple):
    """A checkpoint that stays, by its name or by a *text* that may name it in many ways.

    The reason of one that stays and counts is what names it.
    """

    reason: str
    name: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class RunView:
    """What protections see of a run: *checkpoints*, the newest last.

    Those in *in_use* a training is at work with; *branches*: what the run left behind stays.
    """

    root: TreePath
    checkpoints: Sequence[Checkpoint]
    in_use: Collection[str] = ()
    branches: bool = True

    @property
    def own(self) -> list[Checkpoint]:
        """Return those that are no links."""
        return [one for one in self.checkpoints if not one.entry.link]

    @property
    def names(self) -> list[str]:
        """Return the names of those that are finished and no links."""
        return [one.name for one in self.own if not one.entry.staging]

    def names_where(self, holds: Callable[[Checkpoint], bool]) -> list[str]:
        """Return the names of those of which something *holds*, and that are no links."""
        return [one.name for one in self.own if holds(one)]


@dataclass(frozen=True, slots=True)
class Protection:
    """Something because of which a checkpoint is not removed.

    Attributes:
        trainer: Who writes the file, or is known by it.
        file: Where that stands.
        effect: ``stays``, or ``left alone``: it does not count, either.
    """

    name: str
    trainer: str
    file: str
    claims: Callable[[RunView], Iterator[Claim]]
    effect: Literal["stays", "left alone"] = "stays"


class Protected(NamedTuple):
    """What protects one checkpoint: what names it, and why it is left alone (empty: it is not)."""

    pinned: tuple[str, ...] = ()
    exempt: str = ""


def protect(view: RunView) -> dict[str, Protected]:
    """Return the protections of each checkpoint that has any, by its name."""
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
    """Claim what a pointer file names: its trainer opens that next."""
    with suppress(CkptError, OSError):
        yield Claim(f"`{file}`", text=_text(view.root, file)[0])


def _best_of_trainer(view: RunView) -> Iterator[Claim]:
    """Claim what the Trainer holds for its best checkpoint, as of its newest states.

    Of one that is cut off, what stands before the cut; then also what the newest one says that can
    be read to its end.
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
    """Claim what Lightning holds for best, as the newest checkpoints of each kind of name say."""
    lasts = (name for name in view.names if is_last(name))
    for name in dict.fromkeys((LAST, *lasts, *_newest(view.names, view))):
        for best in noted(view.root / name).best:
            yield Claim(f"`{name}` as the best", text=best)


def _link_to_it(view: RunView) -> Iterator[Claim]:
    """Claim what a link leads to, into or through: without it the link would lead nowhere."""
    links = {one.name for one in view.checkpoints if one.entry.link}
    for name, link in linked(view.root, view.names):
        if name not in links:
            yield Claim(link, name)


def _in_use(view: RunView) -> Iterator[Claim]:
    """Claim what a running training saved last, and what it went on from."""
    yield from (Claim(AT_WORK_WITH, name) for name in view.in_use if name)


# --- what a checkpoint is ----------------------------------------------------------------------


def _left_behind(view: RunView) -> Iterator[Claim]:
    """Claim what a run left behind when it went on from an earlier checkpoint."""
    for name, step in left_in(view.own).items() if view.branches else ():
        yield Claim(f"abandoned: the run resumed from step {step}", name)


def _is_link(view: RunView) -> Iterator[Claim]:
    """Claim links that are named as checkpoints: what they lead to is somebody else's."""
    yield from (Claim("a symbolic link", one.name) for one in view.checkpoints if one.entry.link)


def _is_last(view: RunView) -> Iterator[Claim]:
    """Claim what Lightning overwrites with each save, and opens next."""
    lasts = (one.name for one in view.checkpoints if is_last(one.name))
    yield from (Claim("the newest according to its trainer", name) for name in lasts)


def _unread_record(view: RunView) -> Iterator[Claim]:
    """Claim what may be the best, or of another branch: its record cannot be read."""
    for one in view.own:
        if one.record.error and _may_resume(one):
            yield Claim(f"its `{SIDECAR}` cannot be read: {one.record.error.what}", one.name)


def _being_written(view: RunView) -> Iterator[Claim]:
    """Claim what is locked, or is not complete and was changed of late: see ``health.examine``."""
    yield from (Claim(WRITING, name) for name in view.names_where(lambda one: one.writing))


def _not_torn(view: RunView) -> Iterator[Claim]:
    """Claim what is not complete although no file shows a torn write: see ``health.health``."""
    names = view.names_where(lambda one: not (one.complete or one.torn))
    yield from (Claim(NOT_TORN, name) for name in names)


def _may_resume(one: Checkpoint) -> bool:
    """Return whether training may resume from *one*: its files show no torn write."""
    return not (one.torn or one.writing)


def _newest(names: Sequence[str], view: RunView) -> list[str]:
    """Return the newest of *names* of each series, and those from which training may go on.

    These are the newest that is complete, and the newest whose files show no torn write: a torn
    one may call itself the best.
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


# --- what nobody understands -------------------------------------------------------------------


def require_pointers(root: TreePath) -> None:
    """Refuse a run of which a pointer cannot be read, or not be understood.

    What a torn checkpoint calls the best counts only while it can be read: training does not go on
    from it.
    """
    items = sorted(item for item in root.iterdir() if parse(item.name) or is_last(item.name))
    members = [item for item in items if not item.is_symlink()]
    for file in POINTERS:
        _require_pointer(root, file, [item.name for item in members])
    _require_read(root / TRAINER, trainer_state(root).error)
    for path in members:
        note, state = noted(path), trainer_state(path)
        torn = (note.error or state.error) and health(path, model=False).torn
        if not torn or (is_last(path.name) and isinstance(note.error, StorageError | None)):
            _require_read(path, note.error)
        if not torn:
            _require_read(path / TRAINER, state.error)


def _require_pointer(root: TreePath, file: str, names: Sequence[str]) -> None:
    try:
        text, whole = _text(root, file)
    except (CkptError, OSError) as error:
        failed = error if isinstance(error, CkptError) else StorageError(str(error))
        _require_read(root / file, failed)
        return
    known = mentioned(text, names, alike(root, names)) or understood(text, root)
    if not whole or (text and not known):
        raise RefusedError(
            "a pointer has unrecognized content",
            where=str(root / file),
            why=f"it contains {text[:SHOWN]!r}; the checkpoint that it names could be removed",
            hint="write the name of a checkpoint into it, or move it away",
        )


def dangling(root: TreePath) -> Iterator[str]:
    """Yield what pointers say whose checkpoint is gone."""
    names = [item.name for item in root.iterdir() if parse(item.name) or is_last(item.name)]
    for file in POINTERS:
        with suppress(CkptError, OSError):
            text, _ = _text(root, file)
            if _tells_a_step(text) and not mentioned(text, names, alike(root, names)):
                yield f"`{file}` names checkpoint {text[:SHOWN]!r}, which does not exist"


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


def points_inside(root: TreePath) -> bool:
    """Return whether a pointer or a link directly in *root*, or beside it, names an entry of it.

    So does a pointer to a checkpoint that is gone: it was one of a run.
    """
    found = (one for item in root.iterdir() if (one := entry_at(item)))
    view = RunView(root, [Checkpoint.of(one) for one in found])
    names = [one.name for one in view.checkpoints if one.path.is_dir()]
    spelt = alike(root, names)
    for protection in NAMING:
        for claim in protection.claims(view):
            gone = protection.file in POINTERS and _tells_a_step(claim.text)
            if gone or mentioned(claim.text, names, spelt):
                return True
    return any(name in names for name, _ in linked(root, names, near=True))


def _tells_a_step(text: str) -> bool:
    """Return whether a pointer's text names a checkpoint of a run, or its number, here or gone."""
    return names_a_step(text) or (text.isdecimal() and len(text) < SHOWN)


def _text(root: TreePath, file: str) -> tuple[str, bool]:
    """Return the text of a pointer, and whether that is all of it; none where there is no file."""
    if not (root / file).is_file():
        return "", True
    content, whole = pointer_content(root, file, MAX_TEXT)
    return decoded(content), whole


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
    Protection("abandoned branch", "CheckpointManager", SIDECAR, _left_behind, "left alone"),
    Protection("is a link", "any", "the checkpoint itself", _is_link, "left alone"),
    Protection("last checkpoint", "Lightning", LAST, _is_last, "left alone"),
    Protection("unreadable record", "CheckpointManager", SIDECAR, _unread_record, "left alone"),
    Protection("being written", "any", "a lock, or a fresh file", _being_written, "left alone"),
    Protection("no incomplete write", "any", "any of its files", _not_torn, "left alone"),
)
"""All that protects a checkpoint, whatever the rules of a policy say.

Of several reasons to leave one alone the first is told.
"""
