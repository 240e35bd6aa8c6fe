"""Saving without collectives: every rank for itself, in the files of stock ``dcp.save``.

A rank writes its data, then metadata under an unfinished name, and renames that last. Nobody knows
when all are done: the directory is complete when every rank's metadata has its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ckptctl.catalog import Blob
from ckptctl.distributed.saving.rank_output import Held, SaveOptions, add_file, fill, held
from ckptctl.distributed.state import State
from ckptctl.errors import RefusedError, StorageError
from ckptctl.formats.dcp.metadata import METADATA, metadata_name
from ckptctl.ops.saving.decision import all_of
from ckptctl.ops.saving.files import RankItems, metadata, rank_files
from ckptctl.ops.saving.holdings import pack
from ckptctl.storage import rename
from ckptctl.storage.destinations import destination
from ckptctl.storage.sync import sync_directory

NOTHING = RankItems((), (), (), ())


def write_alone(
    state: State | Held, path: Path, rank: int, world: int, options: SaveOptions
) -> Path:
    """Write what this rank holds, and metadata of it, below *path*.

    Args:
        state: What it holds.
        path: The checkpoint's directory; other ranks write there, too.
        rank: This rank.
        world: How many there are.
        options: How.

    Returns:
        The absolute path.

    Raises:
        RefusedError: This rank has saved there already.
        StorageError: A file cannot be written.
    """
    if options.overwrite:
        raise RefusedError(
            "a save without collectives cannot replace a checkpoint",
            where=str(path),
            why="no rank knows when the others are done with theirs: two saves would be mixed",
            hint="save under a new name and prune the old one",
        )
    target = destination(path.expanduser().absolute())
    own = held(state)
    decision = all_of(rank, world, pack(own.holding))
    files = rank_files(
        rank, own.holding, decision.shares[rank], own.steps, own.values, options.files
    )
    make_room(target, rank)
    fill(files.plan, own.pieces, target, options)
    items = [files.tensors.items if other == rank else NOTHING for other in range(world)]
    values = [(Blob(name, own.holding.paths[name]), item) for name, item in files.items.items()]
    content = metadata(decision, items).complete(values)
    publish(target, rank, content, sync=options.sync)
    return target


def make_room(target: Path, rank: int) -> None:
    """Make the directory, and remove what this rank left there when it was killed.

    Raises:
        RefusedError: This rank has saved there already, or another checkpoint is there.
        StorageError: It cannot be made.
    """
    taken = [name for name in (METADATA, metadata_name(rank)) if (target / name).exists()]
    if taken or (target.exists() and not target.is_dir()):
        raise RefusedError(
            "the destination exists",
            where=str(target / taken[0] if taken else target),
            hint="save under a name of its own",
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        for leftover in _leftovers(target, rank):
            leftover.unlink()
    except OSError as error:
        raise StorageError.from_os_error(error, "make", str(target)) from error


def _leftovers(target: Path, rank: int) -> Iterator[Path]:
    mine = re.compile(rf"__{rank}(_\d+\.distcp|\.metadata\.tmp)")
    return (path for path in target.glob("__*") if mine.fullmatch(path.name))


def publish(target: Path, rank: int, content: tuple[bytes, ...], *, sync: bool) -> None:
    """Give the metadata of *rank* its name; then what it wrote is a part of the checkpoint.

    Raises:
        StorageError: It cannot be written.
    """
    final = target / metadata_name(rank)
    unfinished = final.with_name(f"{final.name}.tmp")
    add_file(unfinished, content, sync=sync)
    try:
        _rename(unfinished, final)
        if sync:
            sync_directory(target)
            sync_directory(target.parent)
    except OSError as error:
        raise StorageError.from_os_error(error, "publish", str(final)) from error


def _rename(unfinished: Path, final: Path) -> None:
    try:
        rename.rename(unfinished, final, rename.NOREPLACE)
    except rename.UnsupportedRenameError:
        os.rename(unfinished, final)  # noqa: PTH104
