"""Leaves of a rank-local DCP save that are no tensors, compared between the ranks.

Every rank writes all of its own, one after the other, as ``torch.save`` writes them: equal bytes
are equal values. They need not be understood for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from ckptctl.catalog import Finding
from ckptctl.errors import CkptError, DamagedError, SourceNotFoundError
from ckptctl.formats.dcp.metadata import Item, Leaf
from ckptctl.formats.shared.faults import UNUSABLE
from ckptctl.formats.shared.findings import of_error
from ckptctl.formats.shared.own_values import below_rank
from ckptctl.formats.shared.structure import join
from ckptctl.storage.files import SourceFiles

RUN = 1 << 20
_Value = tuple[Leaf, Item]


@dataclass(slots=True)
class Values:
    """Takes the leaves of one rank after the other, the lowest rank first.

    Attributes:
        files: The directory's files.
        partial: Whether to note values that cannot be read, instead of refusing them.
        apart: What is unlike the lowest rank's, by the name under which it is kept.
        differing: The names of those in the checkpoint.
        findings: What cannot be read.
    """

    files: SourceFiles
    partial: bool = False
    apart: dict[str, Leaf] = field(default_factory=dict)
    differing: dict[str, None] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    _first: dict[str, bytes] = field(default_factory=dict)

    def add(self, rank: int, leaves: Mapping[str, Leaf]) -> None:
        """Take what *rank* has.

        Raises:
            DamagedError: A data file is missing or too short, and everything was asked for.
        """
        held = [(leaf, leaf.items[0][1]) for leaf in leaves.values() if not leaf.dtype]
        held.sort(key=lambda value: (value[1].file, value[1].offset))
        for run in _runs(held):
            try:
                for leaf, digest in _digests(self.files, run):
                    self._take(rank, leaf, digest)
            except UNUSABLE as error:
                self._unreadable(run[0][1].file, error)

    def _take(self, rank: int, leaf: Leaf, digest: bytes) -> None:
        if self._first.setdefault(leaf.name, digest) != digest:
            path = below_rank(rank, leaf.path)
            self.apart[join(path)] = replace(leaf, name=join(path), path=path)
            self.differing[leaf.name] = None

    def _unreadable(self, file: str, error: CkptError) -> None:
        if self.partial:
            self.findings.append(of_error(error, file=file))
            return
        if not isinstance(error, SourceNotFoundError):
            raise error
        raise DamagedError(
            "a data file is missing",
            where=str(self.files.root),
            why=f"`{file}`",
            hint="copy the missing files; every rank writes its own",
        ) from error


def _runs(held: Sequence[_Value]) -> Iterator[Sequence[_Value]]:
    """Yield values that lie one after the other in a file, about a megabyte at a time."""
    start = 0
    for at, (_, item) in enumerate(held):
        first, before = held[start][1], held[at - 1][1]
        touches = item.file == before.file and item.offset == before.offset + before.nbytes
        if at > start and not (touches and item.offset + item.nbytes - first.offset <= RUN):
            yield held[start:at]
            start = at
    if held:
        yield held[start:]


def _digests(files: SourceFiles, run: Sequence[_Value]) -> Iterator[tuple[Leaf, bytes]]:
    first, last = run[0][1], run[-1][1]
    if len(run) == 1:
        yield run[0][0], _digest(files, first)
        return
    data = memoryview(
        files.read(first.file, first.offset, last.offset + last.nbytes - first.offset)
    )
    for leaf, item in run:
        start = item.offset - first.offset
        yield leaf, blake2b(data[start : start + item.nbytes], digest_size=16).digest()


def _digest(files: SourceFiles, item: Item) -> bytes:
    found = blake2b(digest_size=16)
    end = item.offset + item.nbytes
    for start in range(item.offset, end, RUN):
        found.update(files.read(item.file, start, min(RUN, end - start)))
    return found.digest()
