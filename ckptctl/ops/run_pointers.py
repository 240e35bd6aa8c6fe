"""What names a checkpoint of a run from outside: pointer files, links, the Trainer's best one.

Sources: DeepSpeed ``latest``, Megatron and verl ``latest_checkpointed_iteration.txt``, detectron2
``last_checkpoint``, Lightning ``last.ckpt`` as a link and what its callbacks note, transformers
``trainer_state.json``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from ckptctl.errors import CkptError
from ckptctl.formats.megatron.files import POINTER as ITERATION
from ckptctl.formats.shared.tags import LATEST, LATEST_UNIVERSAL
from ckptctl.ops.run_callbacks import LAST, noted
from ckptctl.ops.run_names import parse
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.json_reader import read_json

NAMES = (LATEST, LATEST_UNIVERSAL, "last_checkpoint")
TRAINER = "trainer_state.json"
SIDECAR = "ckptctl.run.json"
MAX_TEXT = 4096

Pins = dict[str, tuple[str, ...]]


def pins(root: Path, members: Sequence[str]) -> Pins:
    """Return what names each checkpoint, for those that something names.

    Args:
        root: The run.
        members: The names of its checkpoints, the newest last.
    """
    found: Pins = {}
    sources = (_pointers(root, members), _links(root, members), _best(root, members))
    for name, said in chain.from_iterable((*sources, _noted(root, members))):
        if name in members and said not in found.get(name, ()):
            found[name] = (*found.get(name, ()), said)
    return found


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
        yield Path(_text(root, pointer)).name, f"`{pointer}`"
    text = _text(root, ITERATION)
    if text.isascii() and text.isdigit() and len(text) <= 18:
        for name in members:
            known = parse(name)
            if known and known.step == int(text):
                yield name, f"`{ITERATION}`"


def _links(root: Path, members: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the entries of *root* that links lead to, or into.

    They may lie in it, beside it, or in another of its checkpoints, which would lose its files.
    """
    real = root.resolve()
    inside = (link for name in members for link in _links_in(real / name, below=True))
    for link in chain(_links_in(real), _links_in(real.parent), inside):
        with suppress(OSError, RuntimeError, ValueError):
            target = link.resolve().relative_to(real)
            if target.parts and not link.is_relative_to(real / target.parts[0]):
                yield target.parts[0], f"the link `{os.path.relpath(link, real)}`"


def _links_in(folder: Path, *, below: bool = False) -> Iterator[Path]:
    """Yield the links in a folder, in order; none where it cannot be listed, or is a file."""
    try:
        with os.scandir(folder) as found:
            items = sorted(found, key=lambda item: item.name)
    except OSError:
        return
    for item in items:
        if item.is_symlink():
            yield Path(item.path)
        elif below and item.is_dir(follow_symlinks=False):
            yield from _links_in(Path(item.path), below=True)


def _best(root: Path, members: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what the Trainer holds for its best checkpoint, as of its newest state."""
    newest = next((name for name in reversed(members) if _document(root / name, TRAINER)), None)
    for folder in (root, *([root / newest] if newest else ())):
        best = _document(folder, TRAINER).get("best_model_checkpoint")
        if isinstance(best, str):
            yield Path(best).name, f"`{TRAINER}` as the best"


def _noted(root: Path, members: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what Lightning holds for best, as the newest checkpoint of each kind of name says."""
    newest = {known.series: name for name in members if (known := parse(name))}
    for name in (LAST, *newest.values()):
        for best in noted(root / name).best:
            yield best, f"`{name}` as the best"


def _text(root: Path, name: str) -> str:
    path = root / name
    try:
        if path.is_symlink() or not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(MAX_TEXT).decode(errors="replace").strip()
    except OSError:
        return ""


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
