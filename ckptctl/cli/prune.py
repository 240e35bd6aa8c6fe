"""``ckptctl prune ROOT``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ckptctl.cli import tables
from ckptctl.cli.commands import Json, NoHeader, command, make_quiet_option
from ckptctl.cli.ls import MISSING_PART_NOTE
from ckptctl.cli.output import VERDICT_STYLES, Printer, Row
from ckptctl.cli.tables import Column, StyledText
from ckptctl.cli.typed_paths import format_command_line
from ckptctl.errors import RefusedError, StorageError, quote_names
from ckptctl.options import Option
from ckptctl.run_options import PruneOptions
from ckptctl.shared_options import Root
from ckptctl.tree import TreePath
from ckptctl.units import format_bytes, pluralize
from ckptctl.verdict import Verdict

if TYPE_CHECKING:
    from ckptctl.planner.retention import Policy
    from ckptctl.runs.removal import PruneDecision, PrunePlan


COLUMNS = (
    Column("action"),
    tables.name_column("name", keep=24),
    tables.number_column("size"),
    tables.prose_column("why"),
)


@command(
    "ckptctl prune runs/llama --keep-last 3 --dry-run",
    "ckptctl prune runs/llama --keep-last 3 --keep-every 10000 --yes",
    "ckptctl prune runs/llama --keep-last 1 --keep-best eval_loss:min --yes",
    "ckptctl prune runs/llama --keep-within 7d --keep 'step-*000'",
    "ckptctl prune runs/llama --keep-last 2 --thin optimizer --yes",
    prints="ckptctl.runs.removal:PrunePlan | ckptctl.runs.removal:PruneResult",
)
def prune(
    root: Root,
    options: PruneOptions,
    dry_run: Annotated[
        bool, Option("Show the plan without removing anything.", flags="-n --dry-run")
    ] = False,
    yes: Annotated[
        bool, Option("Skip the confirmation.", flags="-y --yes", panel="Safety", brief=True)
    ] = False,
    no_header: NoHeader = False,
    json: Json = False,
    quiet: Annotated[
        bool, make_quiet_option("Print only the paths of removed checkpoints.")
    ] = False,
) -> None:
    """Remove checkpoints of a run that no --keep option matches.

    A checkpoint is kept if any --keep option matches it. Only complete checkpoints are counted and
    removed. The newest complete checkpoint and targets of pointers such as latest are always kept.
    """
    from ckptctl.runs import removal as op

    output = Printer(json, quiet, header=not no_header)
    plan = op.plan_prune(
        root, options.build_policy(), force=options.force, thin=options.thin is not None
    )
    failed = any(checkpoint.read_failed for checkpoint in plan.run.checkpoints)
    if dry_run:
        _print_plan(output, plan, root)
        _print_damaged_hint(output, plan)
        if not plan.is_idle:
            output.print_hint(f"run it with `{format_command_line()}`")
        if failed:
            raise typer.Exit(StorageError.exit_code)
        return
    if yes or plan.is_idle:
        _show_table(output, plan, root)
    else:
        _confirm_removal(output, plan, root)
    result = op.run_prune(plan)
    thinned = [("thinned", result.thinned)] if plan.thin else []
    freed = f"freed {format_bytes(result.freed)}"
    output.print_answer(
        "prune",
        result,
        names=(plan.root / name for name in result.done),
        rows=(("",), ("removed", len(result.done)), *thinned, ("freed", result.freed)),
        human=lambda: output.print_line(_format_summary(plan) if plan.is_idle else freed),
    )
    _print_damaged_hint(output, plan)
    result.require_no_failures()
    if failed:
        raise typer.Exit(StorageError.exit_code)


def _confirm_removal(output: Printer, plan: PrunePlan, root: TreePath) -> None:
    """Show the plan, and raise `RefusedError` unless the user confirms it."""
    if not output.can_prompt:
        _print_plan(output, plan, root)
        raise RefusedError(
            "nothing was removed: confirmation is required",
            hint=f"run `{format_command_line('--yes')}`",
        )
    _show_table(output, plan, root)
    question = f"{_choose_verb(plan)} {_format_amount(plan)} ({format_bytes(plan.nbytes)})?"
    if not typer.confirm(question, err=True):
        raise RefusedError("nothing was removed")


def _print_plan(output: Printer, plan: PrunePlan, root: TreePath) -> None:
    _show_table(output, plan, root)
    removed = plan.list_decisions("remove")
    thinned = [("would_thin", plan.thinned)] if plan.thin else []
    output.print_answer(
        "prune",
        plan,
        names=(decision.checkpoint.path for decision in removed),
        rows=(("",), ("would_remove", len(removed)), *thinned, ("bytes", plan.nbytes)),
        human=lambda: output.print_line(_format_summary(plan)),
    )


def _show_table(output: Printer, plan: PrunePlan, root: TreePath) -> None:
    """Print a table with the action for each checkpoint, except in JSON and quiet mode."""
    if not output.is_chatty:
        return
    if output.mode == "human":
        output.print_headline(root, *_format_headline(plan))
    output.print_table((_make_row(output, decision) for decision in plan.decisions), COLUMNS)
    for decision in plan.decisions:
        missing_part = decision.checkpoint.lacks
        if missing_part and output.mode == "human":
            note = f"`{decision.name}` {MISSING_PART_NOTE.format(missing_part)}"
            output.print_note(
                f"{note}; checkpoints that would be kept without `{decision.name}` are also kept"
            )
    if plan.leftovers:
        output.print_note(
            f"leftovers of an earlier prune will be removed: {quote_names(plan.leftovers)}"
        )


def _print_damaged_hint(output: Printer, plan: PrunePlan) -> None:
    """Print a hint about ``--include-incomplete`` if it would remove skipped checkpoints."""
    from ckptctl.planner.retention import decide_retention

    if plan.policy.incomplete:
        return
    hypothetical = decide_retention(
        plan.run.checkpoints, replace(plan.policy, incomplete=True), time.time()
    )
    skipped = {decision.checkpoint.name for decision in plan.decisions if decision.action == "skip"}
    count = sum(
        decision.action == "remove" and decision.checkpoint.name in skipped
        for decision in hypothetical
    )
    if count:
        pronoun = "it" if count == 1 else "them"
        damaged = pluralize(count, "damaged checkpoint")
        output.print_hint(f"skipped {damaged}; pass `--include-incomplete` to remove {pronoun}")


def _make_row(output: Printer, decision: PruneDecision) -> Row:
    size = decision.checkpoint.entry.nbytes
    size_text = format_bytes(size) if output.mode == "human" else str(size)
    action = "thin" if decision.thinning else decision.action
    reasons = StyledText("; ".join(decision.reasons), VERDICT_STYLES[decision.checkpoint.verdict])
    is_complete = decision.checkpoint.complete
    return (
        action.upper() if output.mode == "human" else action,
        decision.name,
        size_text,
        reasons.text if is_complete else reasons,
    )


def _format_headline(plan: PrunePlan) -> tuple[str, ...]:
    counts = Counter(
        checkpoint.verdict for checkpoint in plan.run.checkpoints if not checkpoint.skip_reason
    )
    complete = counts.pop(Verdict.COMPLETE, 0)
    other_counts = [f"{count:,} {verdict}" for verdict, count in sorted(counts.items())]
    return (
        "; ".join(_list_rules(plan.policy)),
        f"series {', '.join(plan.run.series)}",
        ", ".join((f"{complete:,} complete", *other_counts)),
    )


def _list_rules(policy: Policy) -> Iterator[str]:
    from ckptctl.planner.retention import format_exact_duration

    if policy.last is not None:
        yield f"keep last {policy.last:,}"
    if policy.every is not None:
        yield f"every {pluralize(policy.every, 'step')}"
    if policy.closest is not None:
        yield f"closest to each multiple of {pluralize(policy.closest, 'step')}"
    if policy.within is not None:
        yield f"within {format_exact_duration(policy.within)}"
    if policy.interval is not None:
        yield f"one every {format_exact_duration(policy.interval)}"
    yield from (best.description for best in policy.best)
    for pattern in policy.patterns:
        yield f"`{pattern}`"


def _format_summary(plan: PrunePlan) -> str:
    if not plan.list_decisions("remove"):
        return "nothing to remove"
    return f"would {_choose_verb(plan).lower()} {_format_amount(plan)}, {format_bytes(plan.nbytes)}"


def _choose_verb(plan: PrunePlan) -> str:
    return "Thin" if plan.thin else "Remove"


def _format_amount(plan: PrunePlan) -> str:
    return (
        f"{len(plan.list_decisions('remove')):,} of {pluralize(len(plan.decisions), 'checkpoint')}"
    )
