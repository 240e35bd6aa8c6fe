"""Lineage of the saves of a run, which shows the saves that a run abandoned by resuming earlier.

Saves into one folder are numbered independently of steps and clocks. If training resumes from
save 2 although save 3 exists, later saves are not based on save 3. Every save records all previous
resumes, so that the lineage is known even if intermediate checkpoints are deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Resume(NamedTuple):
    """A resume from a checkpoint.

    Attributes:
        step: Step of the checkpoint.
        save: Save number of the checkpoint, or 0 if it has none.
        newest: The highest save number in the folder at the time of the resume.
    """

    step: int
    save: int
    newest: int

    @property
    def abandons_saves(self) -> bool:
        """Whether the resume abandoned saves that are newer than the checkpoint."""
        return 0 < self.save < self.newest


class Lineage(NamedTuple):
    """Save number and resume history that a checkpoint records.

    Attributes:
        save: Number of the save in its folder, from 1 on, or 0 if it is not recorded.
        resumed: All previous resumes that abandoned saves, and the last previous resume.
        left: Number of the newest save at the time when a run resumed from this checkpoint and
            abandoned later saves, or 0 if that never happened.
    """

    save: int = 0
    resumed: tuple[Resume, ...] = ()
    left: int = 0

    def resume_at(self, step: int, newest: int) -> Lineage:
        """Return the lineage of a run that resumes from this checkpoint, at *step*.

        *newest* is the highest save number in the folder.
        """
        abandoning_resumes = tuple(resume for resume in self.resumed if resume.abandons_saves)
        return Lineage(newest, (*abandoning_resumes, Resume(step, self.save, newest)))

    def next_save(self) -> Lineage:
        """Return the lineage of the next save of the same run."""
        return Lineage(self.save + 1, self.resumed)


UNKNOWN_LINEAGE = Lineage()


def list_unsaved_resumes(lineages: Mapping[str, Lineage]) -> list[str]:
    """List the checkpoints from which a run resumed since the newest save was written."""
    newest = max((lineage.save for lineage in lineages.values()), default=0)
    return [name for name, lineage in lineages.items() if 0 < newest <= lineage.left]


def find_abandoned_saves(lineages: Mapping[str, Lineage]) -> dict[str, int]:
    """Find the abandoned checkpoints, from which the newest save does not descend.

    Returns:
        Name of each abandoned checkpoint, and the step from which the run resumed instead.
    """
    newest_lineage = max(lineages.values(), default=UNKNOWN_LINEAGE)
    return {
        name: resume.step
        for name, lineage in lineages.items()
        for resume in newest_lineage.resumed
        if resume.abandons_saves and resume.save < lineage.save <= resume.newest
    }
