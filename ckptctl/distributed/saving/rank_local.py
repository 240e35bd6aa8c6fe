"""Saving without collectives: every rank for itself, in the files of stock ``dcp.save``.

A rank writes its data, then metadata under an unfinished name, and renames that last. Nobody knows
when all are done: the directory is complete when every rank's metadata has its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ckptctl.catalog import Blob
from ckptctl.distributed.saving.options import SaveOptions
from ckptctl.distributed.saving.place import size_of
from ckptctl.distributed.saving.rank_output import Held, fill, held, require_local
from ckptctl.distributed.state import State
from ckptctl.errors import RefusedError, StorageError
from ckptctl.formats.dcp.metadata import METADATA, Origin, metadata_name
from ckptctl.ops.ranks.agreement import new_nonce
from ckptctl.ops.saving.decision import all_of
from ckptctl.ops.saving.files import RankItems, metadata, rank_files
from ckptctl.ops.saving.holdings import pack
from ckptctl.planner.plan import Plan
from ckptctl.storage import rename
from ckptctl.storage.destinations import destination
from ckptctl.storage.sync import add_file, sync_directory

NOTHING = RankItems((), (), (), ())


class RankFolder:
    """A directory to which each rank adds its own part of a checkpoint.

    It is a :class:`~ckptctl.distributed.saving.place.Place` of one rank.

    Args:
        path: The directory.
        rank: This rank.
        options: How.

    Raises:
        RefusedError: A checkpoint would have to be replaced, or it would go to a URL.
    """

    def __init__(self, path: Path, rank: int, options: SaveOptions) -> None:
        require_local(path)
        if options.overwrite:
            raise RefusedError(
                "a save without collectives cannot replace a checkpoint",
                where=str(path),
                why="no rank knows when the others are done with theirs: two saves would be mixed",
                hint="save under a new name and prune the old one",
            )
        self.target = destination(path.expanduser().absolute())
        self._rank = rank
        self._options = options

    def make_room(self, _: ExitStack) -> None:
        """Make the directory, and remove what this rank left there when it was killed.

        Raises:
            RefusedError: This rank has saved there already, or another checkpoint is there.
            StorageError: It cannot be made.
        """
        target, own = self.target, metadata_name(self._rank)
        taken = [name for name in (METADATA, own) if (target / name).exists()]
        if taken or (target.exists() and not target.is_dir()):
            raise RefusedError(
                "the destination exists",
                where=str(target / taken[0] if taken else target),
                hint="save under a name of its own",
            )
        try:
            target.mkdir(parents=True, exist_ok=True)
            for leftover in self._leftovers():
                leftover.unlink()
        except OSError as error:
            raise StorageError.from_os_error(error, "make", str(target)) from error

    def fill(self, plan: Plan, pieces: Sequence[torch.Tensor]) -> None:
        """Write this rank's files."""
        fill(plan, pieces, self.target, self._options)

    def size(self, name: str) -> int:
        """Return the size of a file; -1: it is not there."""
        return size_of(self.target / name)

    def publish(self, metadata: Sequence[bytes]) -> None:
        """Give this rank's metadata its name; then what it wrote is a part of the checkpoint.

        Raises:
            StorageError: It cannot be written.
        """
        final = self.target / metadata_name(self._rank)
        unfinished = final.with_name(f"{final.name}.tmp")
        add_file(unfinished, metadata, sync=self._options.sync)
        try:
            rename.move(unfinished, final)
            if self._options.sync:
                sync_directory(self.target)
                sync_directory(self.target.parent)
        except OSError as error:
            raise StorageError.from_os_error(error, "publish", str(final)) from error

    def _leftovers(self) -> Iterator[Path]:
        mine = re.compile(rf"__{self._rank}(_\d+\.distcp|\.metadata\.tmp)")
        return (path for path in self.target.glob("__*") if mine.fullmatch(path.name))


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
    place = RankFolder(path, rank, options)
    own = held(state, trusted=options.trusted)
    decision = all_of(rank, world, pack(own.holding))
    files = rank_files(
        rank, own.holding, decision.shares[rank], own.steps, own.values, options.files
    )
    with ExitStack() as stack:
        place.make_room(stack)
        place.fill(files.plan, own.pieces)
        items = [files.tensors.items if other == rank else NOTHING for other in range(world)]
        values = [(Blob(name, own.holding.paths[name]), item) for name, item in files.items.items()]
        origin = Origin(new_nonce().hex(), world)
        place.publish(metadata(decision, items).complete(values, origin))
    return place.target
