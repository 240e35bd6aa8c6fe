"""Which saves of a run build on which: what it left behind when it went on from an earlier one.

Saves into one folder are counted, whatever their steps and whatever clocks say. Where training goes
on from save 2 although 3 is there, no later one builds on 3. Every save repeats what was left on
its way, so that this is known when the checkpoints between are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Resume(NamedTuple):
    """A run went on from a checkpoint.

    Attributes:
        save: Its number; 0: it has none.
        newest: The highest number that there was then.
    """

    step: int
    save: int
    newest: int

    @property
    def leaves(self) -> bool:
        """Return whether there were later saves, on which what followed does not build."""
        return 0 < self.save < self.newest


class Lineage(NamedTuple):
    """What a checkpoint says of those before it.

    Attributes:
        save: It is this one of the saves into its folder, from 1 on; 0: it does not say.
        resumed: What its run went on from on the way, where something was left, and the last time.
        left: The newest save there was when a run went on from this one and left others; 0: none.
    """

    save: int = 0
    resumed: tuple[Resume, ...] = ()
    left: int = 0

    def going_on(self, step: int, newest: int) -> Lineage:
        """Return the lineage of a run that goes on from this checkpoint."""
        before = tuple(one for one in self.resumed if one.leaves)
        return Lineage(newest, (*before, Resume(step, self.save, newest)))

    def next(self) -> Lineage:
        """Return the lineage of the next save of the same run."""
        return Lineage(self.save + 1, self.resumed)


UNKNOWN = Lineage()


def went_on_unsaved(lineages: Mapping[str, Lineage]) -> list[str]:
    """Return the checkpoints from which a run went on after the last save and saved nothing."""
    newest = max((one.save for one in lineages.values()), default=0)
    return [name for name, one in lineages.items() if 0 < newest <= one.left]


def left_behind(lineages: Mapping[str, Lineage]) -> dict[str, int]:
    """Return the checkpoints on which the newest save does not build.

    Returns:
        For each the step from which the run went on instead.
    """
    tip = max(lineages.values(), default=UNKNOWN)
    return {
        name: one.step
        for name, lineage in lineages.items()
        for one in tip.resumed
        if one.leaves and one.save < lineage.save <= one.newest
    }
