"""What names a checkpoint of a run from outside: pointer files, links, the Trainer's best one.

Sources: DeepSpeed ``latest``, Megatron and verl ``latest_checkpointed_iteration.txt``, detectron2
``last_checkpoint``, Lightning ``last.ckpt`` as a link and what its callbacks note, transformers
``trainer_state.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path

from ckptctl.errors import CkptError
from ckptctl.formats.megatron.files import POINTER as ITERATION
from ckptctl.formats.shared.tags import LATEST, LATEST_UNIVERSAL, pointer_content
from ckptctl.ops.runs.callbacks import LAST, noted
from ckptctl.ops.runs.links import linked
from ckptctl.ops.runs.names import is_last, parse
from ckptctl.ops.runs.run_record import record
from ckptctl.ops.runs.spellings import decoded, mentioned, names_a_step, understood
from ckptctl.ops.runs.trainer_state import NAME as TRAINER
from ckptctl.ops.runs.trainer_state import trainer_state

POINTERS = {
    LATEST: "DeepSpeed",
    LATEST_UNIVERSAL: "DeepSpeed",
    "last_checkpoint": "detectron2",
    ITERATION: "Megatron-LM, verl",
}
"""Files in a run that name one of its checkpoints, and whose trainers open that one next."""
MAX_TEXT = 1 << 16

Pins = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Unclear:
    """A pointer of which nobody knows what it names.

    Attributes:
        path: The file.
        why: What keeps it from being read; empty: it can be.
        text: What it says, which is not understood.
        damaged: Whether it is its content that keeps it from being read.
    """

    path: Path
    why: str = ""
    text: str = ""
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Members:
    """The checkpoints of a run that are no links.

    Attributes:
        root: The run.
        names: Their names, the newest last.
        bases: Those from which training may go on: the complete ones; these and what is not
            understood. It holds for best what the newest of them says, whatever a newer one says
            that is torn.
    """

    root: Path
    names: Sequence[str]
    bases: Sequence[Collection[str]] = ()


@dataclass(frozen=True, slots=True)
class Protection:
    """Something that a trainer writes down because of which a checkpoint stays.

    Attributes:
        trainer: Whose it is.
        file: Where it is written.
        texts: Yields what is said there, and how to name the place.
    """

    trainer: str
    file: str
    texts: Callable[[Members], Iterator[tuple[str, str]]]


def protections() -> tuple[Protection, ...]:
    """Return all that names checkpoints of a run and is no link."""
    pointers = (Protection(POINTERS[name], name, partial(_pointer, name)) for name in POINTERS)
    return (
        *pointers,
        Protection("transformers", TRAINER, _best),
        Protection("Lightning", LAST, _noted),
    )


def pins(members: Members) -> Pins:
    """Return what names each checkpoint, for those that something names."""
    root, names = members.root, members.names
    found: Pins = {}
    alike = _alike(root, names)
    texts = chain.from_iterable(one.texts(members) for one in protections())
    in_texts = ((name, said) for text, said in texts for name in mentioned(text, names, alike))
    for named, said in chain(in_texts, linked(root, names)):
        name = named if named in names else alike(named)
        if name and said not in found.get(name, ()):
            found[name] = (*found.get(name, ()), said)
    return found


def unclear(root: Path, torn: Callable[[Path], bool]) -> Unclear | None:
    """Return a pointer that is there and does not tell what it names; None: there is none.

    What a torn checkpoint calls the best counts only while it can be read: training does not go on
    from it.

    Args:
        root: The run.
        torn: Returns whether a checkpoint is torn.
    """
    members = _members(root)
    pointers = (_unclear(root, name, members) for name in POINTERS)
    states = (_unclear_best(root, name, torn) for name in members)
    return next((one for one in (*pointers, _unclear_state(root), *states) if one), None)


def _members(root: Path) -> list[str]:
    """Return the names of the checkpoints in *root* that are no links."""
    found = (item for item in root.iterdir() if parse(item.name) or is_last(item.name))
    return sorted(item.name for item in found if not item.is_symlink())


def _unclear(root: Path, name: str, members: Sequence[str]) -> Unclear | None:
    try:
        text, whole = _text(root, name)
    except (CkptError, OSError) as error:
        return Unclear(root / name, str(error))
    known = mentioned(text, members, _alike(root, members)) or understood(text, root)
    return None if whole and (not text or known) else Unclear(root / name, text=text)


def _unclear_state(folder: Path) -> Unclear | None:
    state = trainer_state(folder)
    path = folder / TRAINER
    return Unclear(path, state.problem, damaged=state.damaged) if state.problem else None


def _unclear_best(root: Path, name: str, torn: Callable[[Path], bool]) -> Unclear | None:
    """Return what notes the best one in a checkpoint and cannot be read."""
    path, note = root / name, noted(root / name)
    if note.problem and ((is_last(name) and not note.damaged) or not torn(path)):
        return Unclear(path, note.problem, damaged=note.damaged)
    state = _unclear_state(path)
    return state if state and not torn(path) else None


def points_inside(root: Path, names: Sequence[str]) -> bool:
    """Return whether a pointer or a link directly in *root*, or beside it, leads to one of *names*.

    So does a pointer to a checkpoint that is gone: it was one of a run.

    Args:
        root: A folder that may be a run, or a checkpoint itself.
        names: Folders in it that are named as checkpoints of a run.
    """
    alike, members = _alike(root, names), Members(root, names)
    for protection in protections():
        for text, _ in protection.texts(members):
            gone = protection.file in POINTERS and names_a_step(text)
            if gone or mentioned(text, names, alike):
                return True
    return any(name in names for name, _ in linked(root, names, near=True))


def metrics(folder: Path) -> dict[str, float]:
    """Return what a checkpoint was rated with, as it says itself."""
    rated: dict[str, object] = {**noted(folder).scores, **trainer_state(folder).rated}
    own = record(folder).get("metrics")
    rated |= own if isinstance(own, dict) else {}
    rated.pop("step", None)
    return {
        key: float(value)
        for key, value in rated.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _pointer(name: str, members: Members) -> Iterator[tuple[str, str]]:
    with suppress(CkptError, OSError):
        yield _text(members.root, name)[0], f"`{name}`"


def _best(members: Members) -> Iterator[tuple[str, str]]:
    """Yield what the Trainer holds for its best checkpoint, as of its newest states.

    Of one that is cut off, what stands before the cut; then also what the newest one says that can
    be read to its end.
    """
    states = {name: trainer_state(members.root / name) for name in members.names}
    stating = [name for name in members.names if states[name].there]
    newest = _newest(stating, members.bases)
    clear = _newest([name for name in stating if not states[name].problem], members.bases)
    yield trainer_state(members.root).best, f"`{TRAINER}` as the best"
    for name in dict.fromkeys((*newest, *clear)):
        cut = [
            one
            for one in newest
            if states[one].problem and _kind(one) == _kind(name) and one != name
        ]
        of = (
            f" of `{name}` as the best: that of `{cut[0]}` cannot be read"
            if cut
            else " as the best"
        )
        yield states[name].best, f"`{TRAINER}`{of}"


def _noted(members: Members) -> Iterator[tuple[str, str]]:
    """Yield what Lightning holds for best, as the newest checkpoints of each kind of name say."""
    lasts = (name for name in members.names if is_last(name))
    for name in dict.fromkeys((LAST, *lasts, *_newest(members.names, members.bases))):
        for best in noted(members.root / name).best:
            yield best, f"`{name}` as the best"


def _newest(members: Sequence[str], bases: Sequence[Collection[str]]) -> list[str]:
    """Return the newest member of each kind of name, and the newest of these among each base."""
    kinds = {name: kind for name in members if (kind := _kind(name))}
    newest = [
        {kind: name for name, kind in kinds.items() if name in some}.values()
        for some in (kinds, *bases)
    ]
    return list(dict.fromkeys(chain.from_iterable(newest)))


def _kind(name: str) -> str:
    known = parse(name)
    return known.series if known else ""


def _alike(root: Path, members: Sequence[str]) -> Callable[[str], str | None]:
    """Return what tells which member a name means that is spelt otherwise.

    A file system may fold cases or compose accents, and a hard link has two names.
    """

    @cache
    def known() -> Mapping[tuple[int, int], str]:
        return {place: name for name in members if (place := _place(root / name))}

    def find(name: str) -> str | None:
        place = _place(root / name) if name else None
        return known().get(place) if place else None

    return find


def _place(path: Path) -> tuple[int, int] | None:
    with suppress(OSError, ValueError):
        status = path.lstat()
        return (status.st_dev, status.st_ino) if status.st_ino else None
    return None


def _text(root: Path, name: str) -> tuple[str, bool]:
    """Return what a pointer says, and whether that is all; nothing where there is none.

    Raises:
        CkptError: It is there and cannot be read, or leads out of the run.
        OSError: The system does not let us look.
    """
    if not (root / name).is_file():
        return "", True
    content, whole = pointer_content(root, name, MAX_TEXT)
    return decoded(content), whole
