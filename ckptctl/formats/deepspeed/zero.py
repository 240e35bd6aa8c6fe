"""Combine the ranks of a ZeRO checkpoint, and locate parameters in partitions of all stages.

Source: ``deepspeed/utils/zero_to_fp32.py``. Unlike ``zero_to_fp32.py``, this module
reads ``BF16_Optimizer`` as stage 1, reads frozen parameters of stage 1 from the model states, and
rejects files that belong to another rank or another save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from ckptctl import dtypes
from ckptctl.errors import (
    CkptError,
    DamagedError,
    UnsupportedError,
    format_option,
    quote_names,
)
from ckptctl.formats.deepspeed.deepspeed_files import SaveFiles, require_files_of_all_ranks
from ckptctl.formats.deepspeed.partitions import (
    FlatLocation,
    FlatLocations,
    FlatVector,
    Segment,
    Shape,
    compute_partition_numels,
    is_flat,
    locate_in_groups,
    locate_in_ranks,
)
from ckptctl.formats.deepspeed.states import (
    ModelState,
    OptimState,
    read_model_state,
    read_optim_state,
)
from ckptctl.formats.shared.findings import FaultCollector
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.read_ahead import prefetch_zips
from ckptctl.storage.schema import MalformedError, wrap_malformed_errors
from ckptctl.storage.zips.zip_reader import StoredTensor
from ckptctl.units import pluralize

_State = TypeVar("_State", ModelState, OptimState)


@dataclass(frozen=True, slots=True)
class ZeroSave:
    """Model and optimizer states of all ranks of a save, and the locations of its parameters.

    Attributes:
        models: Model states. Stages 0 to 2 have one, stage 3 has one per rank.
        optims: Optimizer states, one per rank. Empty for stage 0.
        vectors: Flat fp32 vector of each parameter group, or of each rank for stage 3.
        locations: Location of each optimized parameter in *vectors*, by name.
        partitioned: Whether the model's parameters are divided among ranks (stage 3).
    """

    models: tuple[ModelState, ...]
    optims: tuple[OptimState, ...]
    vectors: tuple[FlatVector, ...] = ()
    locations: Mapping[str, FlatLocation] = field(default_factory=dict)
    partitioned: bool = False

    @property
    def files(self) -> list[str]:
        """Paths of the model-state and optimizer-state files that could be read."""
        models = [model.file for model in self.models if not model.is_placeholder]
        return [*models, *(optim.file for optim in self.optims if not optim.is_placeholder)]

    @property
    def stage(self) -> int:
        """ZeRO stage, or 0 without ZeRO."""
        return self.optims[0].stage if self.optims else 0

    @property
    def model(self) -> ModelState:
        """Model states of the first rank whose model-state file could be read."""
        return next(model for model in self.models if not model.is_placeholder)

    @property
    def optim(self) -> OptimState:
        """Optimizer states of the first rank whose optimizer-state file could be read."""
        return next(optim for optim in self.optims if not optim.is_placeholder)


def read_save(
    files: SourceFiles, save_files: SaveFiles, reads_partitions: bool, faults: FaultCollector
) -> ZeroSave:
    """Read the states of all ranks, with placeholders for files that cannot be read.

    If *reads_partitions*, the weights come from the fp32 partitions, so the function raises if all
    partitions are missing and the read is not partial.
    """
    models = _read_states(files, save_files.models, read_model_state, faults)
    optims = _read_states(files, save_files.optims, read_optim_state, faults)
    model = next((model for model in models if model is not None), None)
    optim = next((optim for optim in optims if optim is not None), None)
    if model is None:  # no other file has the parameter names
        missing = DamagedError(
            "all model states are missing", where=str(faults.root / save_files.models[0])
        )
        raise next(filter(None, map(faults.unusable_files.get, save_files.models)), missing)
    where = str(files.root / model.file)
    if optim is None:
        faults.require_supported_files(save_files.optims)
        needed = save_files.partitioned or (model.groups is not None and reads_partitions)
        if needed and not faults.partial:
            instead = "to read the weights that the model computed with"
            raise DamagedError(
                "the optimizer states of all ranks are missing",
                where=str(Path(where).parent),
                why="the parameters are divided among *_optim_states.pt, and none were found",
                hint=None
                if save_files.partitioned
                else f"pass {format_option('--weights module')} {instead}",
            )
        return ZeroSave(
            fill_missing_models(models, save_files.models), (), partitioned=save_files.partitioned
        )
    names = require_files_of_all_ranks(files.root, save_files.optims, optim.world, "optim", faults)
    all_models = fill_missing_models(models, save_files.models)
    if save_files.partitioned:
        model_names = require_files_of_all_ranks(
            files.root, save_files.models, optim.world, "model", faults
        )
        all_models = fill_missing_models(_pad_with_none(models, model_names), model_names)
    readable_optims = [optim for optim in optims if optim is not None]
    readable_models = [model for model in models if model is not None]
    differences = _find_differences(readable_models, readable_optims, save_files.partitioned)
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
    with wrap_malformed_errors("the optimizer states do not match the model states", where):
        padded = fill_missing_optims(_pad_with_none(optims, names), names, model.groups)
        return _build_zero_save(all_models, padded, where)


def _read_states(
    files: SourceFiles,
    names: Sequence[str],
    reader: Callable[[SourceFiles, str], _State],
    faults: FaultCollector,
) -> list[_State | None]:
    read_state = partial(reader, files)
    return [faults.try_read(name, read_state, (CkptError,)) for name in prefetch_zips(files, names)]


def _pad_with_none(states: list[_State | None], names: Sequence[str]) -> list[_State | None]:
    missing: list[_State | None] = [None] * (len(names) - len(states))
    return states + missing


def _find_differences(
    models: Sequence[ModelState], optims: Sequence[OptimState], partitioned: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield ``(first file, second file, difference)`` for files that belong to different saves."""
    model, optim = models[0], optims[0]
    for other_optim in optims[1:]:
        if (other_optim.stage, other_optim.world) != (optim.stage, optim.world):
            yield optim.file, other_optim.file, "ZeRO stages or world sizes"
        if [s.tensor.dtype for s in other_optim.partitions] != [
            s.tensor.dtype for s in optim.partitions
        ]:
            yield optim.file, other_optim.file, "parameter groups, or dtypes of the partitions"
        if other_optim.paddings != optim.paddings:
            yield optim.file, other_optim.file, "alignment paddings"
    for other_model in models[1:]:
        if (other_model.groups, other_model.frozen_shapes) != (model.groups, model.frozen_shapes):
            yield model.file, other_model.file, "parameters"
        if _get_step_counts(other_model) != _get_step_counts(model):
            yield model.file, other_model.file, "step counts"
    if (optim.stage == 3) != partitioned:
        yield model.file, optim.file, "stages"
    world = model.content.get("dp_world_size")
    if isinstance(world, int) and (world < 1 or optim.world % world):
        ranks = pluralize(optim.world, "rank")
        yield model.file, optim.file, f"world sizes ({world} and {ranks})"


def _get_step_counts(model: ModelState) -> tuple[object, ...]:
    keys = ("global_steps", "global_samples", "dp_world_size")
    return tuple(model.content.get(key) for key in keys)


def _build_zero_save(
    models: tuple[ModelState, ...], optims: tuple[OptimState, ...], where: str
) -> ZeroSave:
    groups, world = models[0].groups or (), optims[0].world
    by_rank = [optim.partitions for optim in optims]
    if optims[0].stage == 3:
        vectors = build_flat_vectors(by_rank, ranked=True)
        partition_dtypes = sorted(
            {segment.tensor.dtype for vector in vectors for segment in vector.segments}
        )
        if len(partition_dtypes) > 1:
            raise UnsupportedError(
                "the partitions have different dtypes",
                where=str(Path(where).parent),
                why=f"parameters may be stored in both {' and '.join(partition_dtypes)}",
            )
        locations = locate_in_ranks(models[0].shapes, vectors, where)
        return ZeroSave(models, optims, vectors, locations, partitioned=True)
    vectors = build_flat_vectors(by_rank, ranked=False)
    _require_rank_order(vectors, where)
    locations = locate_in_groups(groups, optims[0].paddings, vectors, world, where)
    _require_own_partitions(optims, locations, where)
    _require_recorded_parameters(optims, groups, where)
    return ZeroSave(models, optims, vectors, locations)


def build_flat_vectors(
    by_rank: Sequence[Sequence[Segment]], *, ranked: bool
) -> tuple[FlatVector, ...]:
    """Concatenate the segments of each rank if *ranked*, or else of each group across ranks."""
    return tuple(map(FlatVector, by_rank if ranked else zip(*by_rank, strict=True)))


def _require_rank_order(vectors: Sequence[FlatVector], where: str) -> None:
    """Raise if elements follow a short partition, since only padding at the end is stripped."""
    for vector in vectors:
        full = max(segment.numel for segment in vector.segments)
        for part, following in pairwise(vector.segments):
            if following.numel and part.numel < full:
                raise UnsupportedError(
                    "the partitions are not in the order of their ranks",
                    where=str(Path(where).parent),
                    why=f"`{part.file}` has {pluralize(part.numel, 'element')}, `{following.file}` "
                    f"{following.numel:,}",
                    hint="copy the files again, keeping their names",
                )


def _require_own_partitions(
    optims: Sequence[OptimState], locations: FlatLocations, where: str
) -> None:
    """Raise if the recorded mappings of a rank equal the expected mappings of another rank.

    Since ``param_slice_mappings`` are wrong with ``round_robin_gradients``, only an exact match
    with another rank counts.
    """
    expected = [_compute_mappings(optims, locations, rank) for rank in range(len(optims))]
    for rank, optim in enumerate(optims):
        recorded = optim.mappings
        if recorded is None or recorded == expected[rank] or recorded not in expected:
            continue
        raise UnsupportedError(
            f"`{optim.file}` belongs to another rank",
            where=str(Path(where).parent),
            why=f"it contains the partition of rank {expected.index(recorded)}",
            hint="copy the files again, keeping their names",
        )


def _require_recorded_parameters(
    optims: Sequence[OptimState], groups: Sequence[Mapping[str, Shape]], where: str
) -> None:
    """Raise if ``param_slice_mappings`` record other parameters than ``param_shapes``.

    With ``round_robin_gradients``, only ``param_shapes`` has the order of the partitions. The
    mappings have the order before ``_round_robin_reorder`` in ``zero/stage_1_and_2.py``.
    """
    mappings = [optim.mappings for optim in optims if not optim.is_placeholder]
    world = len(optims)
    for number, shapes in enumerate(groups):
        recorded: dict[str, int] = {}
        for mapping in mappings:
            if mapping is None or number >= len(mapping) or len(mappings) < world:
                return
            for name, (_, numel) in mapping[number].items():
                if isinstance(numel, int) and numel:
                    recorded[name] = recorded.get(name, 0) + numel
        expected = {name: numel for name, s in shapes.items() if (numel := math.prod(s))}
        names = [*recorded]
        reordered = [name for first in range(world) for name in names[first::world]]
        if not names or (recorded == expected and [*expected] in (names, reordered)):
            continue
        differing = sorted(dict(recorded.items() ^ expected.items()))
        why = f"the numbers of elements of {quote_names(differing)} differ"
        raise UnsupportedError(
            "`param_shapes` contradicts `param_slice_mappings` of the optimizer states",
            where=where,
            why=why if differing else f"the order of the parameters in group {number} differs",
            hint="check for a file of an earlier save under the same tag",
        )


def _compute_mappings(
    optims: Sequence[OptimState], locations: FlatLocations, rank: int
) -> tuple[Mapping[str, tuple[object, object]], ...]:
    """Return the ``param_slice_mappings`` of a rank without ``round_robin_gradients``."""
    groups: list[dict[str, tuple[int, int]]] = [{} for _ in optims[0].partitions]
    for name, location in locations.items():
        _, low, high = location.spans[0]
        size = max(optim.partitions[location.group_number].numel for optim in optims)
        start, end = rank * size, (rank + 1) * size
        if low < end and high > start:
            first = max(low, start)
            groups[location.group_number][name] = (first - start, min(high, end) - first)
    return tuple(groups)


def fill_missing_models(
    models: Sequence[ModelState | None], names: Sequence[str]
) -> tuple[ModelState, ...]:
    """Replace each None in *models* with a placeholder for the file at its index in *names*."""
    template = next(model for model in models if model is not None)
    return tuple(
        model or replace(template, file=name, is_placeholder=True)
        for model, name in zip(models, names, strict=True)
    )


def fill_missing_optims(
    optims: Sequence[OptimState | None],
    names: Sequence[str],
    groups: Sequence[Mapping[str, Shape]],
) -> tuple[OptimState, ...]:
    """Replace each None in *optims* with a placeholder for the file at its index in *names*.

    *groups* contains the parameter shapes of each group.
    """
    template = next(optim for optim in optims if optim is not None)
    gaps: Sequence[Sequence[int]] = template.paddings or [()] * len(groups)
    if template.stage < 3 and not len(gaps) == len(groups) == len(template.partitions):
        raise MalformedError(
            f"{pluralize(len(groups), 'group')} of parameters, but "
            f"{pluralize(len(template.partitions), 'group')} of partitions"
            + (f" and {pluralize(len(gaps), 'list')} of paddings" if template.paddings else "")
        )
    numels = [[segment.numel for segment in template.partitions]] * len(names)
    if template.stage < 3 and None in optims:
        columns = [
            _infer_partition_lengths(optims, number, shapes, gaps[number])
            for number, shapes in enumerate(groups)
        ]
        numels = [list(row) for row in zip(*columns, strict=True)]
    return tuple(
        optim or _make_placeholder(template, name, row)
        for optim, name, row in zip(optims, names, numels, strict=True)
    )


def _infer_partition_lengths(
    optims: Sequence[OptimState | None],
    number: int,
    shapes: Mapping[str, Shape],
    gaps: Sequence[int],
) -> list[int]:
    """Return the number of elements in each rank's partition of group *number*.

    The padding at the end is excluded if no readable partition contains it.
    """
    limits = compute_partition_numels(shapes, gaps, len(optims))
    stripped = True
    for optim, (minimum, maximum) in zip(optims, limits, strict=True):
        part = optim.partitions[number] if optim else None
        if part is not None and not minimum <= part.numel <= maximum:
            raise MalformedError(
                f"`{part.file}` has {pluralize(part.numel, 'element')}, expected {minimum:,} to "
                f"{maximum:,}"
            )
        stripped = stripped and (part is None or part.numel == minimum)
    return [minimum if stripped else maximum for minimum, maximum in limits]


def _make_placeholder(template: OptimState, name: str, numels: Sequence[int]) -> OptimState:
    parts = zip(template.partitions, numels, strict=True)
    blank = tuple(
        {
            key: _make_blank_tensor(value, numel) if is_flat(value) else value
            for key, value in state.items()
        }
        for state, numel in zip(template.states, numels, strict=True)
    )
    return replace(
        template,
        file=name,
        partitions=tuple(
            Segment(name, _make_blank_tensor(part.tensor, numel)) for part, numel in parts
        ),
        mappings=None,
        states=blank,
        is_placeholder=True,
    )


def _make_blank_tensor(tensor: StoredTensor, numel: int) -> StoredTensor:
    nbytes = numel * dtypes.get_itemsize(tensor.dtype)
    return replace(
        tensor, shape=(numel,), strides=None, offset=0, nbytes=nbytes, crc32=None, within=None
    )
