"""What lies in a universal checkpoint: model states, settings, and a folder per parameter.

Source: ``deepspeed/checkpoint/ds_to_universal.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.formats.deepspeed.absent import complete_models
from ckptctl.formats.deepspeed.files import ZERO, require_world
from ckptctl.formats.deepspeed.states import ModelState, read_model
from ckptctl.formats.shared.faults import Faults
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.local_files import is_there
from ckptctl.storage.zips.reader import StoredTensor, read_archive

SETTINGS = "optimizer_state.pt"
Values = Mapping[str, Mapping[str, object]]


def read_folders(source: SourceFiles, folder: str, faults: Faults | None) -> Values:
    """Return by parameter and key (``fp32``, ``exp_avg``, ...) what that file holds.

    Args:
        source: The checkpoint's files.
        folder: What holds the parameters' folders, relative to the root.
        faults: Takes files that cannot be read; None: they are refused.

    Raises:
        DamagedError: A file is not what it is called.
    """
    return {
        item.name: dict(_values(source, f"{folder}/{item.name}", faults))
        for item in sorted((source.root / folder).iterdir())
        if item.is_dir()
    }


def _values(
    source: SourceFiles, folder: str, faults: Faults | None
) -> Iterator[tuple[str, object]]:
    for item in sorted((source.root / folder).iterdir()):
        if item.suffix != ".pt":
            continue
        name = f"{folder}/{item.name}"
        if faults is None:
            yield item.stem, _value(source, name)
            continue
        found = faults.read([name], lambda file: (_value(source, file),))[0]
        if found is not None:
            yield item.stem, found[0]


def _value(source: SourceFiles, name: str) -> object:
    archive = read_archive(source, name, unknown="inert")
    file = name.rpartition("/")[2]
    if archive.folder not in (file.removesuffix(".pt"), "archive"):
        raise UnsupportedError(
            f"`{file}` is not what it is called",
            where=str(source.root / name),
            why=f"it was saved as `{archive.folder}.pt`",
        )
    return archive.root


def tensor_in(value: object) -> StoredTensor | None:
    """Return the tensor that a file of a parameter holds, plain or as ``param``."""
    tensor = value.get("param") if isinstance(value, dict) else value
    return tensor if isinstance(tensor, StoredTensor) else None


def lacking(values: Values, groups: Iterable[Sequence[str]]) -> dict[tuple[str, str], object]:
    """Return what parameters lack that others of their group have.

    Args:
        values: By parameter and key.
        groups: Names of the parameters that one group of the optimizer holds.

    Returns:
        For each ``(parameter, key)`` what that file holds for another parameter.
    """
    found: dict[tuple[str, str], object] = {}
    for names in groups:
        usual: dict[str, object] = {}
        for name in names:
            usual = {**values.get(name, {}), **usual}
        for name in names:
            for key in usual.keys() - values.get(name, {}).keys():
                found[name, key] = usual[key]
    return found


def require_finished(
    folder: Path, prefix: str, names: Sequence[str], faults: Faults | None
) -> None:
    """Refuse what the converter did not finish, unless *faults* takes that its settings lack.

    Args:
        folder: The tag's folder.
        prefix: The same, relative to the checkpoint's root.
        names: Files of model states.
        faults: Takes what is missing; None: it is refused.

    Raises:
        DamagedError: There are no model states, or no settings of the optimizer.
    """
    finished = is_there(folder / ZERO / SETTINGS)
    if names and not finished and faults is not None:
        faults.missing(f"{prefix}{ZERO}/{SETTINGS}", "the optimizer's settings")
    elif not names or not finished:
        raise DamagedError(
            "the conversion to a universal checkpoint was not finished",
            where=str(folder),
            why=f"`{ZERO}/{SETTINGS}` is missing" if names else "the model states are missing",
            hint="run ds_to_universal.py again",
        )


def read_models(
    source: SourceFiles, names: tuple[str, ...], partitioned: bool, faults: Faults | None
) -> tuple[ModelState, ...]:
    """Read the model states of all ranks.

    Args:
        source: The checkpoint's files.
        names: Files of model states.
        partitioned: Whether there is one of each rank.
        faults: Takes ranks that cannot be read; None: they are refused.

    Raises:
        FormatError: They need more than they say.
        DamagedError: A rank's cannot be read, or none can.
    """
    read = partial(read_model, source, whole=False)
    held = [read(name) for name in names] if faults is None else faults.read(names, read)
    first = next((model for model in held if model is not None), None)
    if first is None:
        read(names[0])
        raise UnsupportedError("the model states changed", where=str(source.root / names[0]))
    world = first.content.get("dp_world_size")
    if partitioned and isinstance(world, int) and len(names) != world:
        names = require_world(source.root, names, world, "model", faults)
    return complete_models([*held, *(None,) * (len(names) - len(held))], names)
