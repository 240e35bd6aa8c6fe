"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was found.

    Attributes:
        group: What it belongs to, as in ``file system``.
        name: What was looked at.
        found: What there is.
        status: Whether that is good.
        hint: What to do about it; None: nothing.
    """

    group: str
    name: str
    found: str
    status: Status = "ok"
    hint: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            "group": self.group,
            "name": self.name,
            "status": self.status,
            "found": self.found,
            "hint": self.hint,
        }
