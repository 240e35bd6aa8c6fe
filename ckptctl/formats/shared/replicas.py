"""Compare copies of a tensor on several ranks, by recorded checksums or by elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptctl.catalog import Extent, TensorEntry
from ckptctl.errors import quote_names
from ckptctl.storage.compare import has_same_checksum, have_same_elements
from ckptctl.storage.files import SourceFiles


@dataclass(slots=True)
class CopyComparison:
    """Comparison of copies of tensors, which records copies that differ or were not read.

    Attributes:
        files: Files of the checkpoint.
        deferred: Whether the copies are compared later, so that unread copies are not recorded.
        differing: Names of values that differ between ranks, repeated for each differing rank.
        compared_by_checksum: Names of tensors of which only the recorded checksums were compared.
        uncompared: Names of tensors whose copies are too large to be read here.
    """

    files: SourceFiles
    deferred: bool = False
    differing: list[str] = field(default_factory=list)
    compared_by_checksum: list[str] = field(default_factory=list)
    uncompared: list[str] = field(default_factory=list)

    def is_same(
        self, first: TensorEntry, second: TensorEntry, name: str, *, of_any_size: bool = False
    ) -> bool:
        """Return whether *second* equals *first*, and record *name* as differing if not.

        Copies with equal recorded checksums are not read. Copies that are too large to be read here
        count as equal, unless *of_any_size* is set.
        """
        first_extent, second_extent = first.extents[0], second.extents[0]
        is_alike = (first.dtype, first.shape) == (second.dtype, second.shape)
        if is_alike and has_same_checksum(first_extent, second_extent):
            self.record_unread_copy(name, first_extent, second_extent)
            return True
        same = have_same_elements(self.files, first, second, of_any_size=of_any_size)
        if same is None:
            self.record_unread_copy(name, first_extent, second_extent)
        elif not same:
            self.differing.append(name)
        return same is not False

    def record_unread_copy(self, name: str, first: Extent, second: Extent) -> None:
        """Record that a copy of the tensor *name* was compared only by checksum, or not at all."""
        if not self.deferred and second.nbytes:
            (
                self.compared_by_checksum if has_same_checksum(first, second) else self.uncompared
            ).append(name)

    def list_notes(self) -> Iterator[str]:
        """Yield notes for the user on tensors whose copies were not read."""
        if self.uncompared:
            names = quote_names([*dict.fromkeys(self.uncompared)])
            yield f"values are not compared between ranks; the lowest rank's is used: {names}"
        if self.compared_by_checksum:
            names = quote_names([*dict.fromkeys(self.compared_by_checksum)])
            yield (
                "copies on several ranks have equal recorded checksums (data not compared); the "
                f"lowest rank's is used: {names}"
            )
