"""What the files of several ranks hold the same: buffers, whole frozen parameters, counters.

Each rank of a data-parallel job updates its own buffers, so that running statistics differ between
ranks and are no replicas; the model has those of the first rank, as in ``zero_to_fp32.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckptctl.catalog import Extent, TensorEntry
from ckptctl.errors import UnsupportedError
from ckptctl.formats.deepspeed.model import ROOT
from ckptctl.formats.deepspeed.states import ModelState
from ckptctl.formats.deepspeed.trainer import OPTIMIZER
from ckptctl.formats.deepspeed.zero import Save
from ckptctl.formats.shared.structure import below_rank, kept_apart
from ckptctl.formats.torch_file import extent_of, stored_entry
from ckptctl.storage.compare import WINDOW, equal
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.zips.reader import StoredTensor


class Copy(NamedTuple):
    """What another rank has under a tensor's name.

    Attributes:
        name: The tensor.
        rank: The other rank.
        file: That rank's file.
        value: What is there.
    """

    name: str
    rank: int
    file: str
    value: object


@dataclass(slots=True)
class Replicas:
    """Sorts what other ranks have under a tensor's name into copies and others.

    Attributes:
        files: The checkpoint's files.
        asked: Whether copies are to be listed, or only what differs.
        found: Copies: those with the same recorded checksum; where none is recorded the same
            bytes, or too many to compare here.
        apart: Those that are not the same, under names of their own.
        differing: The tensors that they differ from.
    """

    files: SourceFiles
    asked: bool
    found: dict[str, list[Extent]] = field(default_factory=dict)
    apart: dict[str, TensorEntry] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)

    def take(self, tensors: Mapping[str, TensorEntry], home: str, copies: Iterator[Copy]) -> None:
        """Sort *copies* of those of *tensors* that are read from the file *home*."""
        for name, rank, file, value in copies:
            entry = tensors.get(name)
            if entry is None or [extent.file for extent in entry.extents] != [home]:
                continue
            if not isinstance(value, StoredTensor):
                raise UnsupportedError(
                    f"`{file}` lacks `{name}`",
                    where=str(self.files.root / file),
                    why=f"`{home}` has it",
                    hint="a file may be of an earlier save under the same tag",
                )
            if self._same(entry, value, file):
                if self.asked:
                    self.found.setdefault(name, []).append(extent_of(value, file))
            else:
                own = stored_entry(below_rank(rank, entry.path), value, file)
                self.apart[own.name] = own
                self.differing.append(name)

    def _same(self, entry: TensorEntry, value: StoredTensor, file: str) -> bool:
        if (value.dtype, value.shape) != (entry.dtype, entry.shape):
            return False
        one, other = entry.extents[0], extent_of(value, file)
        if one.crc32 is not None and other.crc32 is not None:
            return one.crc32 == other.crc32
        if max(one.nbytes, other.nbytes) > WINDOW:
            return True
        return equal(self.files, entry, replace(entry, extents=(other,)))

    def listed(self) -> dict[str, tuple[Extent, ...]]:
        """Return the copies by tensor."""
        return {name: tuple(copies) for name, copies in self.found.items()}

    def notes(self) -> tuple[str, ...]:
        """Return what differs."""
        return kept_apart(self.differing)


def of_models(models: Sequence[ModelState], model: ModelState) -> Iterator[Copy]:
    """Yield what other ranks' model states have under the names of *model*'s."""
    for rank, other in enumerate(models):
        if other is not model and not other.absent:
            for name, value in model.module.items():
                if isinstance(value, StoredTensor) and name not in model.frozen:
                    yield Copy(f"{ROOT}.{name}", rank, other.file, other.module.get(name))
            for name, shape in model.frozen.items():
                value = other.fragments.get(name)
                if isinstance(value, StoredTensor) and value.shape == shape:
                    yield Copy(f"{ROOT}.{name}", rank, other.file, value)


def of_counters(save: Save) -> Iterator[Copy]:
    """Yield the counters in other ranks' optimizer states."""
    for rank, other in enumerate(save.optims):
        if other.absent or other is save.optim:
            continue
        for name, part in save.parts.items():
            for key, value in other.states[part.owner].items():
                if isinstance(value, StoredTensor) and not value.shape:
                    yield Copy(f"{OPTIMIZER}.state.{name}.{key}", rank, other.file, value)
