"""What names a checkpoint of a run from outside: pointer files, links, the Trainer's best one.

Sources: DeepSpeed ``latest``, Megatron and verl ``latest_checkpointed_iteration.txt``, detectron2
``last_checkpoint``, Lightning ``last.ckpt`` as a link and what its callbacks note, transformers
``trainer_state.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path

from ckptctl.errors import CkptError
from ckptctl.formats.megatron.files import POINTER as ITERATION
from ckptctl.formats.shared.tags import LATEST, LATEST_UNIVERSAL
from ckptctl.ops.runs.callbacks import LAST, noted
from ckptctl.ops.runs.links import linked
from ckptctl.ops.runs.names import parse
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.json_reader import read_json

NAMES = (LATEST, LATEST_UNIVERSAL, "last_checkpoint")
TRAINER = "trainer_state.json"
SIDECAR = "ckptctl.run.json"
MAX_TEXT = 4096

Pins = dict[str, tuple[str, ...]]


def pins(root: Path, members: Sequence[str], whole: Collection[str] = ()) -> Pins:
    """Return what names each checkpoint, for those that something names.

    Args:
        root: The run.
        members: The names of its checkpoints, the newest last.
        whole: Those that are complete. Training goes on from the newest of them, and holds for best
            what that one says, whatever a newer one says that is torn.
    """
    found: Pins = {}
    alike = _alike(root, members)
    sources = (_pointers(root, members), linked(root, members), _noted(root, members, whole))
    for named, said in chain(*sources, _best(root, members, whole)):
        name = named if named in members else alike(named)
        if name and said not in found.get(name, ()):
            found[name] = (*found.get(name, ()), said)
    return found


def unreadable(root: Path) -> tuple[Path, str] | None:
    """Return a pointer that is there and cannot be read, and why; None: there is none."""
    for name in (*NAMES, ITERATION):
        try:
            _text(root, name)
        except OSError as error:
            return root / name, str(error.strerror or error)
    return None


def metrics(folder: Path) -> dict[str, float]:
    """Return what a checkpoint was rated with, as it says itself."""
    state = _document(folder, TRAINER)
    history = state.get("log_history")
    rated: dict[str, object] = {**noted(folder).scores}
    for entry in history if isinstance(history, list) else ():
        if isinstance(entry, dict) and entry.get("step") == state.get("global_step"):
            rated |= entry
    own = _document(folder, SIDECAR).get("metrics")
    rated |= own if isinstance(own, dict) else {}
    rated.pop("step", None)
    return {
        key: float(value)
        for key, value in rated.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _pointers(root: Path, members: Sequence[str]) -> Iterator[tuple[str, str]]:
    for pointer in NAMES:
        yield Path(_said(root, pointer)).name, f"`{pointer}`"
    text = _said(root, ITERATION)
    if text.isascii() and text.isdigit() and len(text) <= 18:
        for name in members:
            known = parse(name)
            if known and known.step == int(text):
                yield name, f"`{ITERATION}`"


def _best(root: Path, members: Sequence[str], whole: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield what the Trainer holds for its best checkpoint, as of its newest states."""
    stating = [name for name in members if _document(root / name, TRAINER)]
    for folder in (root, *(root / name for name in _newest(stating, whole))):
        best = _document(folder, TRAINER).get("best_model_checkpoint")
        if isinstance(best, str):
            yield Path(best).name, f"`{TRAINER}` as the best"


def _noted(root: Path, members: Sequence[str], whole: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield what Lightning holds for best, as the newest checkpoints of each kind of name say."""
    for name in (LAST, *_newest(members, whole)):
        for best in noted(root / name).best:
            yield best, f"`{name}` as the best"


def _newest(members: Sequence[str], whole: Collection[str]) -> list[str]:
    """Return the newest member of each kind of name, and the newest complete one."""
    series = {name: known.series for name in members if (known := parse(name))}
    newest = {kind: name for name, kind in series.items()}
    newest_whole = {kind: name for name, kind in series.items() if name in whole}
    return list(dict.fromkeys((*newest.values(), *newest_whole.values())))


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


def _said(root: Path, name: str) -> str:
    with suppress(OSError):
        return _text(root, name)
    return ""


def _text(root: Path, name: str) -> str:
    """Return what a pointer says; nothing where there is none.

    Raises:
        OSError: It is there and cannot be read.
    """
    path = root / name
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(MAX_TEXT).decode(errors="replace").removeprefix("\ufeff").strip()


def _document(folder: Path, name: str) -> Mapping[str, object]:
    """Return the object in a JSON file; nothing where there is none that can be read."""
    try:
        if not (folder / name).is_file():
            return {}
        with SourceFiles(folder) as files:
            found = read_json(files, name, constants=True)
    except (CkptError, OSError):
        return {}
    return found if isinstance(found, dict) else {}
