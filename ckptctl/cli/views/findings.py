"""Findings grouped by cause, as ``inspect`` and ``verify`` print them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.units import pluralize

if TYPE_CHECKING:
    from ckptctl.catalog import Finding


class FindingGroup(NamedTuple):
    """Group of findings with the same cause, for example one damaged file."""

    findings: Sequence[Finding]

    @property
    def first(self) -> Finding:
        """Finding that represents the group."""
        return self.findings[0]

    @property
    def title(self) -> str:
        """Problem, followed by the number of findings if the group has several."""
        count = len(self.findings)
        return self.first.what + (f" ({pluralize(count, 'time')})" if count > 1 else "")

    @property
    def where(self) -> str:
        """Location of the first finding, the number of other locations, and the file."""
        place = replace(self.first, file=None).where
        if len(self.findings) < 2 or not place:
            return self.first.where
        return f"{place} and {len(self.findings) - 1:,} more, {self.first.file}"

    @property
    def line(self) -> str:
        """Title, location and reason on one line, in which the file appears once."""
        file, why = self.first.file, f" ({self.first.why})" if self.first.why else ""
        names_file = file and (file in self.first.what or f"`{file}`" in why)
        where = self.where.removesuffix(f"{file}").removesuffix(", ") if names_file else self.where
        return ": ".join(filter(None, (self.title, where))) + why


def group_findings(findings: Iterable[Finding]) -> list[FindingGroup]:
    """Group *findings* of one file that differ only in the tensor or value."""
    findings_by_cause: dict[object, list[Finding]] = {}
    for number, finding in enumerate(findings):
        cause = (
            (finding.severity, finding.what, finding.why, finding.file) if finding.file else number
        )
        findings_by_cause.setdefault(cause, []).append(finding)
    return [FindingGroup(members) for members in findings_by_cause.values()]
