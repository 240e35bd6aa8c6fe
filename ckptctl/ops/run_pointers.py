"""What names a checkpoint of a run from outside: pointer files, links, the Trainer's best one.

Sources: DeepSpeed ``latest``, Megatron and verl ``latest_checkpointed_iteration.txt``, detectron2
``last_checkpoint``, Lightning ``last.ckpt`` as a link, transformers ``trainer_state.json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ckptctl.errors import CkptError
from ckptctl.formats.megatron.files import POINTER as ITERATION
from ckptctl.formats.shared.tags import LATEST, LATEST_UNIVERSAL
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
    for name, said in (*_pointers(root, members), *_links(root), *_best(root, members)):
        if name in members and said not in found.get(name, ()):
            found[name] = (*found.get(name, ()), said)
    return found


def metrics(folder: Path) -> dict[str, float]:
    """Return what a checkpoint was rated with, as it says itself."""
    state = _document(folder, TRAINER)
    history = state.get("log_history")
    rated: dict[str, object] = {}
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


def _links(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the entries of *root* that links in it lead to, or into."""
    real = root.resolve()
    for item in root.iterdir():
        if item.is_symlink():
            with suppress(OSError, RuntimeError):
                target = item.resolve()
                if target.is_relative_to(real) and target != real:
                    yield target.relative_to(real).parts[0], f"the link `{item.name}`"


def _best(root: Path, members: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what the Trainer holds for its best checkpoint, as of its newest state."""
    newest = next((name for name in reversed(members) if (root / name / TRAINER).is_file()), None)
    for folder in (root, *([root / newest] if newest else ())):
        best = _document(folder, TRAINER).get("best_model_checkpoint")
        if isinstance(best, str):
            yield Path(best).name, f"`{TRAINER}` as the best"


def _text(root: Path, name: str) -> str:
    path = root / name
    if path.is_symlink() or not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            return file.read(MAX_TEXT).decode(errors="replace").strip()
    except OSError:
        return ""


def _document(folder: Path, name: str) -> Mapping[str, object]:
    """Return the object in a JSON file; nothing where there is none that can be read."""
    if not (folder / name).is_file():
        return {}
    try:
        with SourceFiles(folder) as files:
            found = read_json(files, name, constants=True)
    except CkptError:
        return {}
    return found if isinstance(found, dict) else {}
