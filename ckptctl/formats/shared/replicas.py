"""What several ranks have under one name: compared by recorded checksums, or else read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptctl.catalog import Extent, TensorEntry
from ckptctl.errors import listed
from ckptctl.storage.compare import has_same_checksum, same_elements
from ckptctl.storage.files import SourceFiles


@dataclass(slots=True)
class CopyComparison:
    """Compares copies, and remembers what a reader should know of those that were not read.

    Attributes:
        files: The checkpoint's files.
        deferred: Whether whoever asked for a list of the copies compares them.
        differing: Names of which ranks have different values, as often as one differs.
        recorded: Names of tensors of which only the recorded checksums were compared.
        uncompared: Names of tensors of which copies are too large to be compared here.
    """

    files: SourceFiles
    deferred: bool = False
    differing: list[str] = field(default_factory=list)
    recorded: list[str] = field(default_factory=list)
    uncompared: list[str] = field(default_factory=list)

    def is_same(
        self, first: TensorEntry, other: TensorEntry, name: str, *, of_any_size: bool = False
    ) -> bool:
        """Return whether a rank has what *first* has, for all that is known.

        Equal recorded checksums are enough, and what is too large to be read here counts as the
        same, unless it may be *of_any_size*.
        """
        one, two = first.extents[0], other.extents[0]
        alike = (first.dtype, first.shape) == (other.dtype, other.shape)
        if alike and has_same_checksum(one, two):
            self.leave(name, one, two)
            return True
        same = same_elements(self.files, first, other, of_any_size=of_any_size)
        if same is None:
            self.leave(name, one, two)
        elif not same:
            self.differing.append(name)
        return same is not False

    def leave(self, name: str, one: Extent, other: Extent) -> None:
        """Note a copy that is not read."""
        if not self.deferred and other.nbytes:
            (self.recorded if has_same_checksum(one, other) else self.uncompared).append(name)

    def notes(self) -> Iterator[str]:
        """Yield notes on what was not read."""
        if self.uncompared:
            names = listed([*dict.fromkeys(self.uncompared)])
            yield f"values are not compared between ranks; the lowest rank's is used: {names}"
        if self.recorded:
            names = listed([*dict.fromkeys(self.recorded)])
            yield (
                "copies on several ranks have equal recorded checksums (data not compared); the "
                f"lowest rank's is used: {names}"
            )
