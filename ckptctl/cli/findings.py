"""Findings grouped by cause, as ``inspect`` and ``verify`` print them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.units import pluralize

if TYPE_CHECKING:
    from ckptctl.catalog import Finding


class FindingGroup(NamedTuple):
    """Findings with the same cause, for example in one file."""

    findings: Sequence[Finding]

    @property
    def first(self) -> Finding:
        """The finding that represents the group."""
        return self.findings[0]

    @property
    def title(self) -> str:
        """The problem, and the number of findings if there are several."""
        count = len(self.findings)
        return self.first.what + (f" ({pluralize(count, 'time')})" if count > 1 else "")

    @property
    def where(self) -> str:
        """The first location, the number of others, and the file."""
        inside = replace(self.first, file=None).where
        if len(self.findings) < 2 or not inside:
            return self.first.where
        return f"{inside} and {len(self.findings) - 1:,} more, {self.first.file}"

    @property
    def line(self) -> str:
        """Title, location and reason as one line, without repeating the file."""
        file, why = self.first.file, f" ({self.first.why})" if self.first.why else ""
        named = file and (file in self.first.what or f"`{file}`" in why)
        where = self.where.removesuffix(f"{file}").removesuffix(", ") if named else self.where
        return ": ".join(filter(None, (self.title, where))) + why


def grouped(findings: Iterable[Finding]) -> list[FindingGroup]:
    """Group *findings* of one file that differ only in the tensor or value."""
    found: dict[object, list[Finding]] = {}
    for number, one in enumerate(findings):
        cause = (one.severity, one.what, one.why, one.file) if one.file else number
        found.setdefault(cause, []).append(one)
    return [FindingGroup(alike) for alike in found.values()]
