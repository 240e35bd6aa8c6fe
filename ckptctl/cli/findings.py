"""Findings for people: those with one cause are one, as ``inspect`` and ``verify`` print them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.units import counted

if TYPE_CHECKING:
    from ckptctl.catalog import Finding


class FindingGroup(NamedTuple):
    """Findings that have one cause: those in one file, say."""

    findings: Sequence[Finding]

    @property
    def first(self) -> Finding:
        """Return the one that is shown for all."""
        return self.findings[0]

    @property
    def title(self) -> str:
        """Return what is wrong, and how often."""
        count = len(self.findings)
        return self.first.what + (f" ({counted(count, 'time')})" if count > 1 else "")

    @property
    def where(self) -> str:
        """Return the first place, how many others there are, and the file."""
        inside = replace(self.first, file=None).where
        if len(self.findings) < 2 or not inside:
            return self.first.where
        return f"{inside} and {len(self.findings) - 1:,} more, {self.first.file}"

    @property
    def line(self) -> str:
        """Return all of it as one line, in which no file is named twice."""
        file, why = self.first.file, f" ({self.first.why})" if self.first.why else ""
        named = file and (file in self.first.what or f"`{file}`" in why)
        where = self.where.removesuffix(f"{file}").removesuffix(", ") if named else self.where
        return ": ".join(filter(None, (self.title, where))) + why


def grouped(findings: Iterable[Finding]) -> list[FindingGroup]:
    """Return *findings*, those together that differ only in the tensor or value of one file."""
    found: dict[object, list[Finding]] = {}
    for number, one in enumerate(findings):
        cause = (one.severity, one.what, one.why, one.file) if one.file else number
        found.setdefault(cause, []).append(one)
    return [FindingGroup(alike) for alike in found.values()]
