"""Copies of the same elements in several ranks' files, and files that are copies of one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.errors import UnsupportedError
from ckptctl.formats.megatron.grid import Grid
from ckptctl.formats.megatron.places import Place
from ckptctl.storage.compare import WINDOW, equal
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.zips.reader import StoredTensor


@dataclass(slots=True)
class Copies:
    """Compares copies.

    Attributes:
        files: The checkpoint's files.
        where: The save, for errors.
        uncompared: Names of tensors of which copies are too large to be compared here.
        divided: The checksums of what tensor-parallel ranks divide, by rank; those of the first
            expert-parallel ranks, as the others have the same.
        experts: The checksums of each rank's experts.
    """

    files: SourceFiles
    where: str
    uncompared: dict[str, None] = field(default_factory=dict)
    divided: dict[Place, list[int | None]] = field(default_factory=dict)
    experts: dict[Place, list[int | None]] = field(default_factory=dict)

    def require_same(
        self, name: str, dtype: str, one: Extent, other: Extent, *, claimed: bool
    ) -> None:
        """Prove that two extents hold the same.

        Args:
            name: The tensor.
            dtype: Of its elements.
            one: Where its elements lie.
            other: Where else.
            claimed: Whether a rule alone says that they are copies; these are always compared,
                others where there are checksums or they are small.

        Raises:
            UnsupportedError: They differ.
        """
        if one.crc32 is not None and other.crc32 is not None:
            same = one.crc32 == other.crc32
        elif not claimed and max(one.nbytes, other.nbytes) > WINDOW:
            self.uncompared[name] = None
            return
        else:
            same = equal(self.files, _alone(name, dtype, one), _alone(name, dtype, other))
        if not same:
            raise UnsupportedError(
                f"copies of `{name}` hold different values",
                where=self.where,
                why=("which every rank has, as the rules say; " if claimed else "")
                + f"{one.box} is not the same in `{one.file}` and `{other.file}`",
                hint="the files are of different saves, one is damaged, or the rule is wrong",
            )

    def note(self, place: Place, tensor: StoredTensor, *, divided: bool, expert: bool) -> None:
        """Remember what a rank alone has."""
        if expert:
            self.experts.setdefault(place, []).append(tensor.crc32)
        elif divided and place.expert == 0:
            self.divided.setdefault(place, []).append(tensor.crc32)

    def refuse_copied_files(self, grid: Grid) -> None:
        """Refuse two files with the same parts of everything: one was copied over the other.

        Raises:
            UnsupportedError: There are such.
        """
        for held in (self.divided, self.experts):
            _refuse_equal(held, grid, self.where)


def _refuse_equal(held: Mapping[Place, Sequence[int | None]], grid: Grid, where: str) -> None:
    seen: dict[tuple[int | None, ...], Place] = {}
    for place, checksums in held.items():
        other = seen.setdefault(tuple(checksums), place)
        if other != place and None not in checksums:
            raise UnsupportedError(
                f"`{grid.files[place]}` holds the same as `{grid.files[other]}`",
                where=where,
                why="both have the same part of every tensor that ranks divide",
                hint="one was copied over the other",
            )


def _alone(name: str, dtype: str, extent: Extent) -> TensorEntry:
    """Return what an extent holds as a tensor of its own."""
    whole = Box.whole(extent.box.sizes)
    moved = Extent(whole, extent.file, extent.offset, extent.nbytes, strides=extent.strides)
    return TensorEntry(name, dtype, whole.sizes, (moved,), (name,))
