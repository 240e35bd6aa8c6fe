"""What lies in a universal checkpoint: model states, settings, and a folder per parameter.

Source: ``deepspeed/checkpoint/ds_to_universal.py``. In ZeRO's checkpoints, too, states of ranks
that cannot be read are stood in for, so that those of others keep their places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptctl import dtypes
from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.formats.deepspeed.files import ZERO, require_world
from ckptctl.formats.deepspeed.partitions import Segment, Shape, partition_numels
from ckptctl.formats.deepspeed.states import ModelState, OptimState, read_model
from ckptctl.formats.shared.findings import Faults
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.paths import is_there
from ckptctl.storage.zips.reader import StoredTensor, read_archive

SETTINGS = "optimizer_state.pt"
FolderValues = Mapping[str, Mapping[str, object]]


def complete_models(
    found: Sequence[ModelState | None], names: Sequence[str]
) -> tuple[ModelState, ...]:
    """Return the model states of all ranks."""
    like = next(model for model in found if model is not None)
    return tuple(
        model or replace(like, file=name, absent=True)
        for model, name in zip(found, names, strict=True)
    )


def complete_optims(
    found: Sequence[OptimState | None],
    names: Sequence[str],
    groups: Sequence[Mapping[str, Shape]],
    where: str,
) -> tuple[OptimState, ...]:
    """Return the optimizer states of all ranks."""
    like = next(optim for optim in found if optim is not None)
    if None not in found:
        return tuple(optim for optim in found if optim is not None)
    numels = [[segment.numel for segment in like.partitions]] * len(names)
    if like.stage < 3:
        columns = [_column(found, n, *group, where) for n, group in _groups(like, groups, where)]
        numels = [list(row) for row in zip(*columns, strict=True)]
    return tuple(
        optim or _absent(like, name, row)
        for optim, name, row in zip(found, names, numels, strict=True)
    )


def _groups(
    like: OptimState, groups: Sequence[Mapping[str, Shape]], where: str
) -> Iterator[tuple[int, tuple[Mapping[str, Shape], Sequence[int]]]]:
    gaps: Sequence[Sequence[int]] = like.paddings or [()] * len(groups)
    if not len(gaps) == len(groups) == len(like.partitions):
        why = f"{len(groups)} groups of parameters, {len(like.partitions)} of partitions"
        raise _misfit(where, why)
    return enumerate(zip(groups, gaps, strict=True))


def _column(
    found: Sequence[OptimState | None],
    number: int,
    shapes: Mapping[str, Shape],
    gaps: Sequence[int],
    where: str,
) -> list[int]:
    """The length of each rank's partition of a group, stripped if those that are there are."""
    limits = partition_numels(shapes, gaps, len(found))
    stripped = True
    for optim, (least, most) in zip(found, limits, strict=True):
        part = optim.partitions[number] if optim else None
        if part is not None and not least <= part.numel <= most:
            why = f"`{part.file}` has {part.numel:,} elements, {least:,} to {most:,} are expected"
            raise _misfit(where, why)
        stripped = stripped and (part is None or part.numel == least)
    return [least if stripped else most for least, most in limits]


def _misfit(where: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        "the optimizer states do not fit the model states", where=where, why=why
    )


def _absent(like: OptimState, name: str, numels: Sequence[int]) -> OptimState:
    parts = zip(like.partitions, numels, strict=True)
    states = zip(like.states, numels, strict=True)
    return replace(
        like,
        file=name,
        partitions=tuple(Segment(name, _blank(part.tensor, numel)) for part, numel in parts),
        mappings=None,
        states=tuple(
            {key: _blank_moment(value, numel) for key, value in state.items()}
            for state, numel in states
        ),
        absent=True,
    )


def _blank_moment(value: object, numel: int) -> object:
    flat = isinstance(value, StoredTensor) and len(value.shape) == 1 and value.strides is None
    return _blank(value, numel) if flat and isinstance(value, StoredTensor) else value


def _blank(tensor: StoredTensor, numel: int) -> StoredTensor:
    nbytes = numel * dtypes.itemsize(tensor.dtype)
    return replace(
        tensor, shape=(numel,), strides=None, offset=0, nbytes=nbytes, crc32=None, within=None
    )


def read_folders(source: SourceFiles, folder: str, faults: Faults) -> FolderValues:
    """Return by parameter and key (``fp32``, ``exp_avg``, ...) what that file holds."""
    return {
        item.name: dict(_values(source, f"{folder}/{item.name}", faults))
        for item in sorted((source.root / folder).iterdir())
        if item.is_dir()
    }


def _values(source: SourceFiles, folder: str, faults: Faults) -> Iterator[tuple[str, object]]:
    for item in sorted((source.root / folder).iterdir()):
        if item.suffix != ".pt":
            continue
        name = f"{folder}/{item.name}"
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


def lacking(values: FolderValues, groups: Iterable[Sequence[str]]) -> dict[tuple[str, str], object]:
    """Return what parameters lack that others of their group have.

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


def require_finished(folder: Path, prefix: str, names: Sequence[str], faults: Faults) -> None:
    """Refuse what the converter did not finish, unless *faults* takes that its settings lack."""
    finished = is_there(folder / ZERO / SETTINGS)
    if names and not finished and faults.partial:
        faults.missing(f"{prefix}{ZERO}/{SETTINGS}", "the optimizer's settings")
    elif not names or not finished:
        raise DamagedError(
            "the conversion to a universal checkpoint was not finished",
            where=str(folder),
            why=f"`{ZERO}/{SETTINGS}` is missing" if names else "the model states are missing",
            hint="run ds_to_universal.py again",
        )


def read_models(
    source: SourceFiles, names: tuple[str, ...], partitioned: bool, faults: Faults
) -> tuple[ModelState, ...]:
    """Read the model states of all ranks."""
    read = partial(read_model, source, whole=False)
    held = faults.read(names, read)
    first = next((model for model in held if model is not None), None)
    if first is None:
        read(names[0])
        raise UnsupportedError("the model states changed", where=str(source.root / names[0]))
    world = first.content.get("dp_world_size")
    if partitioned and isinstance(world, int) and len(names) != world:
        names = require_world(source.root, names, world, "model", faults)
    return complete_models([*held, *(None,) * (len(names) - len(held))], names)
