"""Lineage of the saves of a run, to find saves that the run abandoned by resuming before them.

Saves into one folder are numbered, independently of steps and clocks. If training resumes from
save 2 although save 3 exists, no later save is based on 3. Every save records all resumes before
it, so that the lineage is known even if checkpoints in between are deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Resume(NamedTuple):
    """A resume from a checkpoint.

    Attributes:
        step: Step of the checkpoint.
        save: Save number of the checkpoint, or 0 if it has none.
        newest: The highest save number at the time of the resume.
    """

    step: int
    save: int
    newest: int

    @property
    def abandons_saves(self) -> bool:
        """Whether there were later saves, which the resume abandoned."""
        return 0 < self.save < self.newest


class Lineage(NamedTuple):
    """The history that a checkpoint records.

    Attributes:
        save: Number of the save in its folder, from 1 on, or 0 if it is not recorded.
        resumed: The resumes before this save that abandoned saves, and the last resume.
        left: The newest save when a run resumed from this save and abandoned later ones, or 0.
    """

    save: int = 0
    resumed: tuple[Resume, ...] = ()
    left: int = 0

    def resume_at(self, step: int, newest: int) -> Lineage:
        """Return the lineage of a run that resumes from this checkpoint."""
        abandoning_resumes = tuple(resume for resume in self.resumed if resume.abandons_saves)
        return Lineage(newest, (*abandoning_resumes, Resume(step, self.save, newest)))

    def next_save(self) -> Lineage:
        """Return the lineage of the next save of the same run."""
        return Lineage(self.save + 1, self.resumed)


UNKNOWN_LINEAGE = Lineage()


def list_unsaved_resumes(lineages: Mapping[str, Lineage]) -> list[str]:
    """List the checkpoints from which a run resumed after the newest save, without a save since."""
    newest = max((lineage.save for lineage in lineages.values()), default=0)
    return [name for name, lineage in lineages.items() if 0 < newest <= lineage.left]


def find_abandoned_saves(lineages: Mapping[str, Lineage]) -> dict[str, int]:
    """Find the abandoned checkpoints, on which the newest save is not based.

    Returns:
        The step from which the run resumed instead, by checkpoint.
    """
    newest_lineage = max(lineages.values(), default=UNKNOWN_LINEAGE)
    return {
        name: resume.step
        for name, lineage in lineages.items()
        for resume in newest_lineage.resumed
        if resume.abandons_saves and resume.save < lineage.save <= resume.newest
    }
