"""Which checkpoint of a run is the newest complete one, and why it is not another."""

from __future__ import annotations

import time as clock
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ckptctl.errors import (
    CkptError,
    DamagedError,
    SourceNotFoundError,
    StorageError,
    UnsupportedError,
    command,
    listed,
)
from ckptctl.formats.sidecar_files import SIDECAR
from ckptctl.ops.runs.entries import entries
from ckptctl.ops.runs.health import Checkpoint, examine, rfc3339
from ckptctl.ops.runs.listing import Company
from ckptctl.ops.runs.names import is_last
from ckptctl.ops.runs.notes import stated_step
from ckptctl.planner.lineage import went_on_unsaved
from ckptctl.planner.retention import earlier, left_in
from ckptctl.results import Inline, JsonField, Result
from ckptctl.storage.paths import source_path
from ckptctl.storage.tree import TreePath
from ckptctl.verdict import Verdict

LIGHTNING = ".ckpt"


@dataclass(frozen=True, slots=True)
class Newest(Result):
    """The newest complete checkpoint of a run, and what else might have been.

    Attributes:
        others: The newest complete ones of other series, among which it was chosen.
        doubts: Where the highest step is not the last save: both, and which of them was chosen.
    """

    chosen: Annotated[Checkpoint, Inline()]
    skipped: Annotated[
        tuple[Checkpoint, ...], JsonField("newer checkpoints that are not complete")
    ] = ()
    others: tuple[Checkpoint, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def path(self) -> TreePath:
        """Return where it is."""
        return self.chosen.path


def newest(
    root: TreePath,
    now: float | None = None,
    series: str | None = None,
    torn: Mapping[str, str] | None = None,
    *,
    model: bool = True,
) -> Newest:
    """Return the newest complete checkpoint of a run.

    Of a run that went on from an earlier checkpoint what it left behind does not count, as long as
    there is another. Of several series the one that was written last counts; what Lightning saves
    last is compared with its numbered ones by the step, and named where none of them has it. Older
    checkpoints are not looked at, but for what was saved later than a higher step. *torn* ones are
    known to be damaged, although all is there; why, by name. *model* is that of ``health``.
    """
    now, root = clock.time() if now is None else now, source_path(root)
    skipped: list[Checkpoint] = []
    found: list[Checkpoint] = []
    there = [Checkpoint.of(one) for one in entries(root) if series in (None, one.named.series)]
    waiting = sorted(there, key=lambda one: (one.order, one.time), reverse=True)
    company = Company([one.entry for one in waiting])
    left = left_in(one for one in waiting if not one.entry.link)
    for one in sorted(waiting, key=lambda one: one.name in left):
        if any(one.series == other.series for other in found):
            continue
        seen = company.compared(examine(one.entry, now, model=model))
        if torn and one.name in torn:
            seen = replace(seen, verdict=Verdict.DAMAGED, torn=True, problem=torn[one.name])
        (found if seen.complete else skipped).append(seen)
    if not found:
        _require_understood(skipped)
        raise _none_complete(root, skipped)
    furthest = _furthest(found)
    chosen = max(furthest, key=lambda one: one.entry.time)
    skipped = [one for one in skipped if one.series == chosen.series or _written_later(one, chosen)]
    _require_understood(skipped, chosen)
    others = (
        one
        for one in found
        if one is not chosen and (one in furthest or _written_later(one, chosen))
    )
    return Newest(
        chosen,
        tuple(skipped),
        # What Lightning saved last may be the chosen one under its other name.
        tuple(o for o in others if not is_last(o.name) or _saved_at(o) != _saved_at(chosen)),
        tuple(_doubts(chosen, waiting, left, now, model)),
    )


def _doubts(
    chosen: Checkpoint,
    known: Sequence[Checkpoint],
    left: Mapping[str, int],
    now: float,
    model: bool,
) -> Iterator[str]:
    """Yield the reasons to doubt that *chosen* is the newest."""
    own = [one for one in known if one.series == chosen.series and one.entry.counts]
    name = chosen.name
    for one in own:
        if one.record.error:
            yield (
                f"`{SIDECAR}` of `{one.name}` cannot be read ({one.record.error.what}), so it is "
                "unknown which metrics it has and whether the run resumed from it"
            )
    higher = [one.name for one in own if one.name in left and one.order > chosen.order]
    if higher and name not in left:
        yield (
            f"skipped {listed(higher)}, which has a higher step than `{name}`: the run resumed "
            f"from step {left[higher[0]]} and saved `{name}` later"
        )
    back = went_on_unsaved({one.name: one.lineage for one in own})
    if back and name not in back:
        yield (
            f"a run resumed from {listed(back)} and has not saved since; `{name}` is older, "
            "although its step is higher"
        )
    lower = (one for one in own if one.order < chosen.order and one.name not in left)
    seen = (examine(one.entry, now, model=model) for one in lower if _may_be_later(one, chosen))
    later = [one for one in seen if one.complete and earlier(chosen, one)]
    if later:
        last = max(later, key=lambda one: (one.lineage.save, one.entry.time))
        times = rfc3339(chosen.entry.time), rfc3339(last.entry.time)
        yield (
            f"`{name}` has the highest step, but `{last.name}` was saved later "
            f"({times[0]} and {times[1]}); the folder may contain two runs"
        )


def _may_be_later(one: Checkpoint, chosen: Checkpoint) -> bool:
    own, other = one.lineage.save, chosen.lineage.save
    return own > other if own and other else one.entry.time > chosen.entry.time


def _furthest(found: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
    """Leave out what Lightning saved last, or the numbered ones that are not as far as that."""
    last = next((one for one in found if is_last(one.name)), None)
    numbered = [one for one in found if one is not last and one.path.suffix == LIGHTNING]
    if last is None or not numbered:
        return found
    behind = [one for one in numbered if _saved_at(one) < last.step]
    return [one for one in found if one not in (behind if behind == numbered else [last])]


def _saved_at(one: Checkpoint) -> int:
    """Return the step at which it was saved, which a name with an epoch alone does not tell."""
    stated = stated_step(one.path)
    return one.step if stated is None else stated


def _written_later(one: Checkpoint, chosen: Checkpoint) -> bool:
    return one.entry.time > chosen.entry.time


def _require_understood(newer: Sequence[Checkpoint], chosen: Checkpoint | None = None) -> None:
    """Refuse to skip a checkpoint, newer than *chosen*, whose files show no torn write."""
    found = next((one for one in newer if not (one.torn or one.writing)), None)
    if found:
        what = "cannot determine whether the newest checkpoint is complete"
        error: type[CkptError] = UnsupportedError
        if found.read_failed:
            what, error = "the newest checkpoint cannot be read", StorageError
        elif found.verdict is Verdict.DAMAGED:
            what, error = (
                "the newest checkpoint is damaged, but no file shows an incomplete write",
                DamagedError,
            )
        name = f", or use `{chosen.path}`, the newest complete one" if chosen else ""
        raise error(
            what,
            where=str(found.path),
            why=found.problem,
            hint=f"move this checkpoint away if it does not belong to the run{name} "
            f"(see {command('ls', found.path.parent)})",
        )


def _none_complete(root: TreePath, skipped: Sequence[Checkpoint]) -> SourceNotFoundError:
    newest = max(skipped, key=lambda one: one.entry.time)
    more = f" (and {len(skipped) - 1:,} more)" if len(skipped) > 1 else ""
    return SourceNotFoundError(
        "no complete checkpoint found",
        where=str(root),
        why=f"{newest.name}: {newest.problem}{more}",
        hint=f"run {command('verify', newest.path)} for details",
    )
