"""Ranks' files that are missing or cannot be read: refused, or noted where a part was asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ckptctl.catalog import Finding
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import (
    SHOWN,
    CkptError,
    DamagedError,
    StorageError,
    UnsafePickleError,
    listed,
)
from ckptctl.formats.shared.findings import UNUSABLE, of_error
from ckptctl.storage.files import SourceFiles

MAX_MISSING = 1024
_NEXT = "values that this rank has for itself are taken from the lowest rank that can be read"
FileLeaves = Iterable[tuple[KeyPath, object]]


class Gap(NamedTuple):
    """A file of a rank that cannot be used.

    Attributes:
        rank: The rank.
        head: Where in the checkpoint what it holds lies.
        file: Its name.
    """

    rank: int
    head: KeyPath
    file: str


@dataclass(slots=True)
class Gaps:
    """What cannot be used.

    Attributes:
        root: The directory.
        partial: Whether to note what cannot be used, instead of refusing it.
        found: The files.
        findings: What is wrong, once for each of them.
    """

    root: Path
    partial: bool
    found: list[Gap] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def require(
        self,
        head: KeyPath,
        present: Collection[int],
        wanted: Collection[int],
        named: Callable[[int], str],
        of: str = "",
    ) -> None:
        """Refuse, or note, that ranks' files are missing."""
        missing = list(islice((rank for rank in wanted if rank not in present), MAX_MISSING + 1))
        if not missing:
            return
        if not self.partial or len(missing) > MAX_MISSING:
            count = len(wanted) - sum(rank in wanted for rank in present)
            few = listed([named(rank) for rank in missing[:SHOWN]])
            raise DamagedError(
                f"{count:,} of {len(wanted):,} ranks' files{of} are missing",
                where=str(self.root),
                why=few + (f" and {count - SHOWN:,} more" if count > SHOWN else ""),
                hint="every rank writes its own file; copy them from the nodes they are on",
            )
        for rank in missing:
            gap = Gap(rank, head, named(rank))
            self._add(gap, Finding("a rank's file is missing", file=gap.file))

    def usable(self, gap: Gap, leaves: Iterator[tuple[KeyPath, object]]) -> FileLeaves:
        """Return the *leaves* of a file, or nothing where it cannot be read and that is noted."""
        if not self.partial:
            return leaves
        try:
            return list(leaves)
        except UnsafePickleError:
            raise
        except UNUSABLE as error:
            self._unusable(gap, error)
        return ()

    def sizes(self, files: SourceFiles, names: Iterable[str]) -> dict[str, int]:
        """Return the sizes of files in bytes, but for those of gaps that cannot be opened."""
        found, gone = {}, {gap.file for gap in self.found}
        for name in names:
            try:
                found[name] = files.size(name)
            except StorageError:
                if name not in gone:
                    raise
        return found

    def _unusable(self, gap: Gap, error: CkptError) -> None:
        self._add(gap, of_error(error, file=gap.file))

    def _add(self, gap: Gap, finding: Finding) -> None:
        if gap in self.found:
            return
        self.found.append(gap)
        why = "; ".join(filter(None, (finding.why, None if gap.rank else _NEXT)))
        self.findings.append(replace(finding, why=why or None))
