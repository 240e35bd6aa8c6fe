"""``ckptctl prune ROOT``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ckptctl.cli import tables
from ckptctl.cli.commands import Json, NoHeader, command, only_quiet
from ckptctl.cli.ls import LACKS
from ckptctl.cli.output import VERDICTS, Printer, Row
from ckptctl.cli.tables import Column, Painted
from ckptctl.cli.typed_paths import typed_again
from ckptctl.errors import RefusedError, StorageError, quote_names
from ckptctl.options import Option
from ckptctl.runs.run_options import PruneOptions
from ckptctl.shared_options import Root
from ckptctl.tree import TreePath
from ckptctl.units import format_bytes, pluralize
from ckptctl.verdict import Verdict

if TYPE_CHECKING:
    from ckptctl.planner.retention import Policy
    from ckptctl.runs.removal import PruneDecision, PrunePlan


COLUMNS = (
    Column("action"),
    tables.name("name", keep=24),
    tables.number("size"),
    tables.prose("why"),
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
    quiet: Annotated[bool, only_quiet("Print only the paths of removed checkpoints.")] = False,
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
    failed = any(one.read_failed for one in plan.run.checkpoints)
    if dry_run:
        _print_plan(output, plan, root)
        _mention_damaged(output, plan)
        if not plan.is_idle:
            output.hint(f"run it with `{typed_again()}`")
        if failed:
            raise typer.Exit(StorageError.exit_code)
        return
    if yes or plan.is_idle:
        _show_table(output, plan, root)
    else:
        _ask(output, plan, root)
    result = op.run_prune(plan)
    thinned = [("thinned", result.thinned)] if plan.thin else []
    freed = f"freed {format_bytes(result.freed)}"
    output.answer(
        "prune",
        result,
        names=(plan.root / name for name in result.done),
        rows=(("",), ("removed", len(result.done)), *thinned, ("freed", result.freed)),
        human=lambda: output.line(_sum(plan) if plan.is_idle else freed),
    )
    _mention_damaged(output, plan)
    result.require_all()
    if failed:
        raise typer.Exit(StorageError.exit_code)


def _ask(output: Printer, plan: PrunePlan, root: TreePath) -> None:
    """Show the plan, and raise `RefusedError` unless the user confirms it."""
    if not output.asks:
        _print_plan(output, plan, root)
        raise RefusedError(
            "nothing was removed: confirmation is required", hint=f"run `{typed_again('--yes')}`"
        )
    _show_table(output, plan, root)
    question = f"{_verb(plan)} {_amount(plan)} ({format_bytes(plan.nbytes)})?"
    if not typer.confirm(question, err=True):
        raise RefusedError("nothing was removed")


def _print_plan(output: Printer, plan: PrunePlan, root: TreePath) -> None:
    _show_table(output, plan, root)
    removed = plan.list_decisions("remove")
    thinned = [("would_thin", plan.thinned)] if plan.thin else []
    output.answer(
        "prune",
        plan,
        names=(one.checkpoint.path for one in removed),
        rows=(("",), ("would_remove", len(removed)), *thinned, ("bytes", plan.nbytes)),
        human=lambda: output.line(_sum(plan)),
    )


def _show_table(output: Printer, plan: PrunePlan, root: TreePath) -> None:
    """Print the action for each checkpoint, unless in JSON or quiet mode."""
    if not output.chatty:
        return
    if output.mode == "human":
        output.headline(root, *_headline(plan))
    output.table((_row(output, one) for one in plan.decisions), COLUMNS)
    for one in plan.decisions:
        lacks = one.checkpoint.lacks
        if lacks and output.mode == "human":
            said = f"`{one.name}` {LACKS.format(lacks)}"
            output.note(
                f"{said}; checkpoints that would be kept without `{one.name}` are also kept"
            )
    if plan.leftovers:
        output.note(f"leftovers of an earlier prune will be removed: {quote_names(plan.leftovers)}")


def _mention_damaged(output: Printer, plan: PrunePlan) -> None:
    """Print a hint about ``--include-incomplete`` if it would remove skipped checkpoints."""
    from ckptctl.planner.retention import decide_retention

    if plan.policy.incomplete:
        return
    others = decide_retention(
        plan.run.checkpoints, replace(plan.policy, incomplete=True), time.time()
    )
    skipped = {one.checkpoint.name for one in plan.decisions if one.action == "skip"}
    count = sum(one.action == "remove" and one.checkpoint.name in skipped for one in others)
    if count:
        them = "it" if count == 1 else "them"
        damaged = pluralize(count, "damaged checkpoint")
        output.hint(f"skipped {damaged}; pass `--include-incomplete` to remove {them}")


def _row(output: Printer, one: PruneDecision) -> Row:
    size = one.checkpoint.entry.nbytes
    shown = format_bytes(size) if output.mode == "human" else str(size)
    action = "thin" if one.thinning else one.action
    reasons = Painted("; ".join(one.reasons), VERDICTS[one.checkpoint.verdict])
    whole = one.checkpoint.complete
    return (
        action.upper() if output.mode == "human" else action,
        one.name,
        shown,
        reasons.text if whole else reasons,
    )


def _headline(plan: PrunePlan) -> tuple[str, ...]:
    counts = Counter(one.verdict for one in plan.run.checkpoints if not one.skip_reason)
    complete = counts.pop(Verdict.COMPLETE, 0)
    others = [f"{count:,} {verdict}" for verdict, count in sorted(counts.items())]
    return (
        "; ".join(_rules(plan.policy)),
        f"series {', '.join(plan.run.series)}",
        ", ".join((f"{complete:,} complete", *others)),
    )


def _rules(policy: Policy) -> Iterator[str]:
    from ckptctl.planner.retention import format_exact_units

    if policy.last is not None:
        yield f"keep last {policy.last:,}"
    if policy.every is not None:
        yield f"every {pluralize(policy.every, 'step')}"
    if policy.closest is not None:
        yield f"closest to each multiple of {pluralize(policy.closest, 'step')}"
    if policy.within is not None:
        yield f"within {format_exact_units(policy.within)}"
    if policy.interval is not None:
        yield f"one every {format_exact_units(policy.interval)}"
    yield from (best.description for best in policy.best)
    for pattern in policy.patterns:
        yield f"`{pattern}`"


def _sum(plan: PrunePlan) -> str:
    if not plan.list_decisions("remove"):
        return "nothing to remove"
    return f"would {_verb(plan).lower()} {_amount(plan)}, {format_bytes(plan.nbytes)}"


def _verb(plan: PrunePlan) -> str:
    return "Thin" if plan.thin else "Remove"


def _amount(plan: PrunePlan) -> str:
    return (
        f"{len(plan.list_decisions('remove')):,} of {pluralize(len(plan.decisions), 'checkpoint')}"
    )
