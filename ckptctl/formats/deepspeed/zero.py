"""Combine the ranks of a ZeRO checkpoint, and locate parameters in partitions of all stages.

Source: ``deepspeed/utils/zero_to_fp32.py``. In contrast to it, ``BF16_Optimizer`` is read as stage
1, frozen parameters of stage 1 are read from the model states, and files of other ranks or other
saves are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from ckptctl import dtypes
from ckptctl.errors import CkptError, DamagedError, UnsupportedError, spell_option
from ckptctl.formats.deepspeed.deepspeed_files import SaveFiles, require_world
from ckptctl.formats.deepspeed.partitions import (
    FlatPart,
    FlatParts,
    Segment,
    Shape,
    Strip,
    in_groups,
    in_ranks,
    is_flat,
    partition_numels,
)
from ckptctl.formats.deepspeed.states import ModelState, OptimState, read_model, read_optim
from ckptctl.formats.shared.findings import Faults
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.read_ahead import prefetch_zips
from ckptctl.storage.schema import MalformedError, malformed_errors
from ckptctl.storage.zips.zip_reader import StoredTensor
from ckptctl.units import pluralize

_State = TypeVar("_State", ModelState, OptimState)


@dataclass(frozen=True, slots=True)
class Save:
    """The states of all ranks of one save, and the places of parameters in their partitions.

    Attributes:
        models: Model states, one for stages 0 to 2, one per rank for stage 3.
        optims: Optimizer states, one per rank; none for stage 0.
        strips: Flat fp32 vectors of groups, or for stage 3 of ranks.
        parts: Place of each optimized parameter in *strips*.
        partitioned: Whether the model's parameters are divided among ranks (stage 3).
    """

    models: tuple[ModelState, ...]
    optims: tuple[OptimState, ...]
    strips: tuple[Strip, ...] = ()
    parts: Mapping[str, FlatPart] = field(default_factory=dict)
    partitioned: bool = False

    @property
    def files(self) -> list[str]:
        """Files that could be read."""
        models = [model.file for model in self.models if not model.absent]
        return [*models, *(optim.file for optim in self.optims if not optim.absent)]

    @property
    def stage(self) -> int:
        """ZeRO stage, or 0 without ZeRO."""
        return self.optims[0].stage if self.optims else 0

    @property
    def model(self) -> ModelState:
        """Model states of the first rank with usable ones."""
        return next(model for model in self.models if not model.absent)

    @property
    def optim(self) -> OptimState:
        """Optimizer states of the first rank with usable ones."""
        return next(optim for optim in self.optims if not optim.absent)


def read_save(files: SourceFiles, found: SaveFiles, partitions: bool, faults: Faults) -> Save:
    """Read the states of all ranks, with placeholders for unreadable ones."""
    models = _states(files, found.models, read_model, faults)
    optims = _states(files, found.optims, read_optim, faults)
    model = next((model for model in models if model is not None), None)
    optim = next((optim for optim in optims if optim is not None), None)
    if model is None:  # no other file has the parameter names
        missing = DamagedError(
            "all model states are missing", where=str(faults.root / found.models[0])
        )
        raise next(filter(None, map(faults.files.get, found.models)), missing)
    where = str(files.root / model.file)
    if optim is None:
        faults.require_kind(found.optims)
        needed = found.partitioned or (model.groups is not None and partitions)
        if needed and not faults.partial:
            instead = "to read the weights that the model computed with"
            raise DamagedError(
                "the optimizer states of all ranks are missing",
                where=str(Path(where).parent),
                why="the parameters are divided among *_optim_states.pt, and none were found",
                hint=None
                if found.partitioned
                else f"pass {spell_option('--weights module')} {instead}",
            )
        return Save(complete_models(models, found.models), (), partitioned=found.partitioned)
    names = require_world(files.root, found.optims, optim.world, "optim", faults)
    all_models = complete_models(models, found.models)
    if found.partitioned:
        held = require_world(files.root, found.models, optim.world, "model", faults)
        all_models = complete_models(_padded(models, held), held)
    readable_optims = [optim for optim in optims if optim is not None]
    readable_models = [model for model in models if model is not None]
    differences = _differences(readable_models, readable_optims, found.partitioned)
    for first_file, second_file, subject in differences:
        raise UnsupportedError(
            "the ranks do not belong to one save",
            where=str(files.root / second_file),
            why=f"`{first_file}` and `{second_file}` have different {subject}",
            hint="check for a file of an earlier save under the same tag",
        )
    if model.groups is None:
        raise UnsupportedError(
            "the parameter names are missing",
            where=where,
            why="ZeRO optimizer states exist, but `param_shapes` does not",
        )
    with malformed_errors("the optimizer states do not match the model states", where):
        padded = complete_optims(_padded(optims, names), names, model.groups)
        return _located(all_models, padded, where)


def _states(
    files: SourceFiles,
    names: Sequence[str],
    reader: Callable[[SourceFiles, str], _State],
    faults: Faults,
) -> list[_State | None]:
    read = partial(reader, files)
    return [faults.read(name, read, (CkptError,)) for name in prefetch_zips(files, names)]


def _padded(found: list[_State | None], names: Sequence[str]) -> list[_State | None]:
    missing: list[_State | None] = [None] * (len(names) - len(found))
    return found + missing


def _differences(
    models: Sequence[ModelState], optims: Sequence[OptimState], partitioned: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield pairs of rank files that contradict each other, and the difference."""
    model, optim = models[0], optims[0]
    for other in optims[1:]:
        if (other.stage, other.world) != (optim.stage, optim.world):
            yield optim.file, other.file, "ZeRO stages or world sizes"
        if [s.tensor.dtype for s in other.partitions] != [s.tensor.dtype for s in optim.partitions]:
            yield optim.file, other.file, "parameter groups, or dtypes of the partitions"
        if other.paddings != optim.paddings:
            yield optim.file, other.file, "alignment paddings"
    for one in models[1:]:
        if (one.groups, one.frozen) != (model.groups, model.frozen):
            yield model.file, one.file, "parameters"
        if _progress(one) != _progress(model):
            yield model.file, one.file, "step counts"
    if (optim.stage == 3) != partitioned:
        yield model.file, optim.file, "stages"
    world = model.content.get("dp_world_size")
    if isinstance(world, int) and (world < 1 or optim.world % world):
        ranks = pluralize(optim.world, "rank")
        yield model.file, optim.file, f"world sizes ({world} and {ranks})"


def _progress(model: ModelState) -> tuple[object, ...]:
    keys = ("global_steps", "global_samples", "dp_world_size")
    return tuple(model.content.get(key) for key in keys)


def _located(models: tuple[ModelState, ...], optims: tuple[OptimState, ...], where: str) -> Save:
    groups, world = models[0].groups or (), optims[0].world
    by_rank = [optim.partitions for optim in optims]
    if optims[0].stage == 3:
        strips = strips_of(by_rank, ranked=True)
        found = sorted({segment.tensor.dtype for strip in strips for segment in strip.segments})
        if len(found) > 1:
            raise UnsupportedError(
                "the partitions have different dtypes",
                where=str(Path(where).parent),
                why=f"parameters may be stored in both {' and '.join(found)}",
            )
        parts = in_ranks(models[0].shapes, strips, where)
        return Save(models, optims, strips, parts, partitioned=True)
    strips = strips_of(by_rank, ranked=False)
    _require_order(strips, where)
    parts = in_groups(groups, optims[0].paddings, strips, world, where)
    _require_own(optims, parts, where)
    return Save(models, optims, strips, parts)


def strips_of(by_rank: Sequence[Sequence[Segment]], *, ranked: bool) -> tuple[Strip, ...]:
    """Return flat vectors, each of one rank's segments, or of one group's segments on all ranks."""
    return tuple(map(Strip, by_rank if ranked else zip(*by_rank, strict=True)))


def _require_order(strips: Sequence[Strip], where: str) -> None:
    """Raise if a short partition is not the last, as padding is only stripped at the end."""
    for strip in strips:
        full = max(segment.numel for segment in strip.segments)
        for one, after in pairwise(strip.segments):
            if after.numel and one.numel < full:
                raise UnsupportedError(
                    "the partitions are not in the order of their ranks",
                    where=str(Path(where).parent),
                    why=f"`{one.file}` has {pluralize(one.numel, 'element')}, `{after.file}` "
                    f"{after.numel:,}",
                    hint="copy the files again, keeping their names",
                )


def _require_own(optims: Sequence[OptimState], parts: FlatParts, where: str) -> None:
    """Raise if the recorded mappings of a partition are those of another rank.

    Since ``param_slice_mappings`` are wrong after round robin, only an exact match with another
    rank counts.
    """
    expected = [_held(optims, parts, rank) for rank in range(len(optims))]
    for rank, optim in enumerate(optims):
        held = optim.mappings
        if held is None or held == expected[rank] or held not in expected:
            continue
        raise UnsupportedError(
            f"`{optim.file}` belongs to another rank",
            where=str(Path(where).parent),
            why=f"it contains the partition of rank {expected.index(held)}",
            hint="copy the files again, keeping their names",
        )


def _held(
    optims: Sequence[OptimState], parts: FlatParts, rank: int
) -> tuple[Mapping[str, tuple[object, object]], ...]:
    """Return the ``param_slice_mappings`` of a rank without round robin."""
    groups: list[dict[str, tuple[int, int]]] = [{} for _ in optims[0].partitions]
    for name, part in parts.items():
        _, low, high = part.spans[0]
        size = max(optim.partitions[part.owner].numel for optim in optims)
        start, end = rank * size, (rank + 1) * size
        if low < end and high > start:
            first = max(low, start)
            groups[part.owner][name] = (first - start, min(high, end) - first)
    return tuple(groups)


def complete_models(
    found: Sequence[ModelState | None], names: Sequence[str]
) -> tuple[ModelState, ...]:
    """Add placeholders for ranks without model states."""
    like = next(model for model in found if model is not None)
    return tuple(
        model or replace(like, file=name, absent=True)
        for model, name in zip(found, names, strict=True)
    )


def complete_optims(
    found: Sequence[OptimState | None],
    names: Sequence[str],
    groups: Sequence[Mapping[str, Shape]],
) -> tuple[OptimState, ...]:
    """Add placeholders for ranks without optimizer states."""
    like = next(optim for optim in found if optim is not None)
    gaps: Sequence[Sequence[int]] = like.paddings or [()] * len(groups)
    if like.stage < 3 and not len(gaps) == len(groups) == len(like.partitions):
        raise MalformedError(
            f"{pluralize(len(groups), 'group')} of parameters, but "
            f"{pluralize(len(like.partitions), 'group')} of partitions"
            + (f" and {pluralize(len(gaps), 'list')} of paddings" if like.paddings else "")
        )
    numels = [[segment.numel for segment in like.partitions]] * len(names)
    if like.stage < 3 and None in found:
        columns = [
            _column(found, number, shapes, gaps[number]) for number, shapes in enumerate(groups)
        ]
        numels = [list(row) for row in zip(*columns, strict=True)]
    return tuple(
        optim or _absent(like, name, row)
        for optim, name, row in zip(found, names, numels, strict=True)
    )


def _column(
    found: Sequence[OptimState | None],
    number: int,
    shapes: Mapping[str, Shape],
    gaps: Sequence[int],
) -> list[int]:
    """Return the length of each rank's partition of a group, stripped if all known ones are."""
    limits = partition_numels(shapes, gaps, len(found))
    stripped = True
    for optim, (least, most) in zip(found, limits, strict=True):
        part = optim.partitions[number] if optim else None
        if part is not None and not least <= part.numel <= most:
            raise MalformedError(
                f"`{part.file}` has {pluralize(part.numel, 'element')}, expected {least:,} to "
                f"{most:,}"
            )
        stripped = stripped and (part is None or part.numel == least)
    return [least if stripped else most for least, most in limits]


def _absent(like: OptimState, name: str, numels: Sequence[int]) -> OptimState:
    parts = zip(like.partitions, numels, strict=True)
    blank = tuple(
        {key: _blank(value, numel) if is_flat(value) else value for key, value in state.items()}
        for state, numel in zip(like.states, numels, strict=True)
    )
    return replace(
        like,
        file=name,
        partitions=tuple(Segment(name, _blank(part.tensor, numel)) for part, numel in parts),
        mappings=None,
        states=blank,
        absent=True,
    )


def _blank(tensor: StoredTensor, numel: int) -> StoredTensor:
    nbytes = numel * dtypes.itemsize(tensor.dtype)
    return replace(
        tensor, shape=(numel,), strides=None, offset=0, nbytes=nbytes, crc32=None, within=None
    )
