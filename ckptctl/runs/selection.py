"""Selection of the checkpoints of a run that a command processes one by one."""

from __future__ import annotations

import re
import time as clock
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, TypeAlias

from ckptctl.errors import RefusedError, find_nearest, format_option, quote_names
from ckptctl.planner.retention import decide_retention
from ckptctl.results import JsonField
from ckptctl.run_options import SelectionOptions, parse_step_range
from ckptctl.runs.entries import explain_other_entry
from ckptctl.runs.health import Checkpoint
from ckptctl.runs.listing import RunFolder, read_run
from ckptctl.runs.protections import POINTERS
from ckptctl.runs.tasks import Task, divide_evenly, find_task
from ckptctl.tree import TreePath

LOG_NAME = "ckptctl.run.jsonl"
"""File to which tasks append a line per checkpoint, in the folder of their outputs."""
OtherEntries: TypeAlias = Mapping[str, Annotated[str, JsonField("reason why it is not processed")]]


@dataclass(frozen=True, slots=True)
class RunSelection:
    """Checkpoints of a run that one task processes.

    Attributes:
        root: Run folder.
        checkpoints: Selected checkpoints of the task, by series and step, whatever their verdict.
        selected: Selected checkpoints of all tasks.
        others: Other entries of the folder, with the reason why they are not processed. If
            ``--steps`` selects checkpoints, there are none.
        task: The task, or None if there is only one.
    """

    root: TreePath
    checkpoints: tuple[Checkpoint, ...]
    selected: tuple[Checkpoint, ...]
    task: Task | None = None
    others: OtherEntries = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of selected checkpoints of all tasks."""
        return len(self.selected)

    @property
    def task_text(self) -> str | None:
        """Task as ``I/N``, or None if there is only one."""
        return str(self.task) if self.task else None


def select_checkpoints(
    root: TreePath,
    options: SelectionOptions,
    environment: Mapping[str, str],
    *,
    model: bool = True,
) -> RunSelection:
    """Select the checkpoints that *options* name and the task processes.

    Without rules, all checkpoints are selected. Rules select the complete ones that ``prune``
    would keep. Checkpoints that are not complete are always selected, because rules cannot decide
    on them, and a command must report what it skips.

    Args:
        root: Run folder.
        options: Rules, steps and globs.
        environment: Environment variables that select the task of a job array, if any.
        model: Whether to compare tensors with their model type.

    Raises:
        RefusedError: An option matches no checkpoint.
        UsageError: The environment does not determine the task.
    """
    task = find_task(options.task, environment)
    now = clock.time()
    run = read_run(root, now, model=model)
    selected = _select_steps(run.checkpoints, options)
    policy = options.build_policy()
    if not policy.is_empty:
        policy.require_rules()
        policy = policy.resolve_metrics_and_patterns(selected)
        policy.require_match(selected)
        selected = [
            decision.checkpoint
            for decision in decide_retention(selected, policy, now)
            if decision.action == "keep" or not decision.checkpoint.complete
        ]
    part = selected
    if task is not None:
        # The size of an incomplete checkpoint may change until the next task computes the parts.
        sizes = (
            (
                checkpoint,
                checkpoint.name,
                checkpoint.entry.saved_bytes if checkpoint.complete else 0,
            )
            for checkpoint in selected
        )
        # More tasks than checkpoints have nothing to do. Their number may be huge.
        parts = divide_evenly(sizes, min(task.count, len(selected)))
        part = parts[task.number - 1] if task.number <= len(parts) else []
    others = {} if options.steps else _explain_other_entries(run)
    return RunSelection(run.root, tuple(part), tuple(selected), task, others)


def _explain_other_entries(run: RunFolder) -> dict[str, str]:
    """Return the entries of the folder that are not processed, with reasons."""
    reasons = {}
    for name in run.others:
        if name not in POINTERS and name != LOG_NAME:
            reasons[name] = explain_other_entry(run.root / name)
    return reasons


def _suggest_steps(pattern: str, steps: range | None, checkpoints: Sequence[Checkpoint]) -> str:
    """Build the hint for a value of ``--steps`` that matches no checkpoint."""
    if steps is None:
        if nearest := find_nearest(pattern, [checkpoint.name for checkpoint in checkpoints]):
            return f"did you mean `{nearest}`?"
        if match := re.fullmatch(r"(\d+)(?:-|\.\.+|/|\+)(\d+)", pattern, re.ASCII):
            return f"did you mean `{match[1]}:{match[2]}`? A range has the form FIRST:LAST[:EVERY]"
    elif len(steps) == 1:
        closest = min(checkpoints, key=lambda item: (abs(item.step - steps[0]), item.step))
        return f"the closest step is {closest.step}"
    return "pass a step, a range FIRST:LAST[:EVERY], or a glob of names"


def _select_steps(
    checkpoints: tuple[Checkpoint, ...], options: SelectionOptions
) -> list[Checkpoint]:
    """Select the checkpoints that ``--steps`` names, or all if it is not given."""
    if not options.steps:
        return list(checkpoints)
    selected: set[str] = set()
    names = [checkpoint.name for checkpoint in checkpoints]
    for text in options.steps:
        steps = parse_step_range(text)
        pattern = text.rstrip("/").rpartition("/")[2] or text
        matching = {
            checkpoint.name
            for checkpoint in checkpoints
            if (
                checkpoint.name == pattern or fnmatchcase(checkpoint.name, pattern)
                if steps is None
                else checkpoint.step in steps
            )
        }
        if not matching:
            raise RefusedError(
                f"{format_option(f'--steps {text}')} matches no checkpoint",
                why=f"the checkpoints are {quote_names(names, 3)}",
                hint=_suggest_steps(pattern, steps, checkpoints),
            )
        selected |= matching
    return [checkpoint for checkpoint in checkpoints if checkpoint.name in selected]
