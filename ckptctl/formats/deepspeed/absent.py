"""Ranks whose files cannot be used: what they held of what, as far as other ranks say.

All ranks' partitions have the same form (https://arxiv.org/abs/1910.02054), so that one that is
left tells where the parameters lie in all of them. What stands for the others names their files,
which the caller knows not to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl import dtypes
from ckptctl.errors import UnsupportedError
from ckptctl.formats.deepspeed.partitions import Segment, Shape, partition_numels
from ckptctl.formats.deepspeed.states import ModelState, OptimState
from ckptctl.storage.zips.reader import StoredTensor


def complete_models(
    found: Sequence[ModelState | None], names: Sequence[str]
) -> tuple[ModelState, ...]:
    """Return the model states of all ranks.

    Args:
        found: Those that could be read, at least one, and None for others.
        names: All files.
    """
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
    """Return the optimizer states of all ranks.

    Args:
        found: Those that could be read, at least one, and None for others.
        names: All files.
        groups: Names and shapes of the parameters in the flat vectors.
        where: The file that says so, for errors.

    Raises:
        UnsupportedError: The partitions that are left are not as long as the parameters want them.
    """
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
