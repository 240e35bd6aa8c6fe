"""``ckptctl delta make``, ``delta apply``, ``delta verify`` and ``delta squash``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from ckptctl.cli.commands import Json, Quiet, RunOptions, command
from ckptctl.cli.convert import make_plan, run_or_show_plan, warn_out_of_range
from ckptctl.cli.output import Printer, Row, format_by_reason
from ckptctl.cli.progress import show_progress
from ckptctl.cli.ranks import join_ranks, make_rank_printer
from ckptctl.option_checks import check_location, check_locations, check_new_location
from ckptctl.options import Argument
from ckptctl.ranks.coordinator import run_on_all_ranks
from ckptctl.shared_options import Destination
from ckptctl.tree import TreePath
from ckptctl.units import format_bytes, format_seconds, pluralize
from ckptctl.verbs.deltas.delta_options import (
    NON_APPLY_OPTIONS,
    DeltaApplyOptions,
    DeltaOptions,
    DeltaSquashOptions,
    DeltaVerifyOptions,
)

if TYPE_CHECKING:
    from ckptctl.verbs.deltas.delta_result import DeltaResult, DeltaVerification

Base = Annotated[
    TreePath, Argument("Checkpoint to start from.", metavar="BASE", check=check_location)
]
Deltas = Annotated[
    Sequence[TreePath],
    Argument("Deltas, in order.", metavar="DELTA", check=check_locations),
]
NewDelta = Annotated[
    TreePath,
    Argument("Destination folder or URL of the delta.", metavar="OUT", check=check_new_location),
]


@command(
    "ckptctl delta make llama-3-8b tuned step-1.delta",
    "ckptctl delta make llama-3-8b step-2000 step-2000.delta --dtype bf16",
    "ckptctl delta make llama-3-8b tuned step-1.delta --compression deflate",
    prints="ckptctl.verbs.deltas.delta_result:DeltaResult",
    group="delta",
)
def make(
    base: Base,
    new: Annotated[
        TreePath,
        Argument("Checkpoint of the same model.", metavar="NEW", check=check_location),
    ],
    out: NewDelta,
    options: DeltaOptions,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Store the difference between two checkpoints of one model.

    OUT stores the changed elements, and digests of all tensors of BASE and NEW. BASE and NEW may
    have different formats and layouts, and neither is changed. Optimizer state is not included, and
    listed as skipped.
    """
    from ckptctl.verbs.deltas.make import DeltaMaker

    output = Printer(json, quiet)
    maker = DeltaMaker(base, new, out, options)
    output.print_statement(maker.statement)
    with show_progress(
        output, "comparing", maker.nbytes, "syncing", lambda: "loading torch"
    ) as advance:
        result = maker.run(advance or (lambda _: None))
    warn_out_of_range(output, result.out_of_range)
    _show_delta(output, "delta make", result, out)


@command(
    "ckptctl delta apply llama-3-8b step-1.delta step-1",
    "ckptctl delta apply llama-3-8b step-1.delta step-2.delta step-2-dcp --to dcp",
    "ckptctl delta apply llama-3-8b step-1.delta step-1 --verify",
    "ckptctl delta apply llama-3-8b step-1.delta step-1 --dry-run",
    prints="ckptctl.conversion.plan:ConversionPlan | "
    "ckptctl.conversion.plan:ConversionResult & "
    "ckptctl.verbs.deltas.apply:DeltaApplyPlan",
    omitted_fields=NON_APPLY_OPTIONS,
    group="delta",
)
def apply(
    base: Base,
    deltas: Deltas,
    dst: Destination,
    options: DeltaApplyOptions,
    run: RunOptions,
) -> None:
    """Apply one or more deltas to a checkpoint.

    First, all data of BASE and of the deltas is read and compared with the digests of base and
    result. All options apply to the result, as in convert.
    """
    from ckptctl.verbs.deltas.apply import plan_apply

    ranks = join_ranks(run.single_process, run.json)
    output = make_rank_printer(ranks, run.json, run.quiet)
    plan = make_plan(
        ranks, lambda: plan_apply(base, deltas, dst, options), None if run.dry_run else dst
    )
    output.print_statement(
        f"{pluralize(len(plan.deltas), 'delta')} · {pluralize(plan.changed, 'tensor')} changed · "
        f"{plan.base_sha256[:12]} → {plan.result_sha256[:12]}"
    )
    shown = {**plan.conversion.left_out, **plan.conversion.not_carried}
    others = {name: why for name, why in plan.delta_left_out.items() if name not in shown}
    for note in format_by_reason("not in the deltas", others):
        output.print_note(note)
    if not run.dry_run:
        with show_progress(
            output, "checking", plan.checked_bytes, "checked", lambda: "loading torch"
        ) as advance:
            run_on_all_ranks(ranks, lambda: plan.check(advance))
    run_or_show_plan("delta apply", output, plan.conversion, dst, run, ranks, plan)


@command(
    "ckptctl delta verify step-1.delta",
    "ckptctl delta verify step-1.delta step-2.delta --base llama-3-8b",
    prints="ckptctl.verbs.deltas.delta_result:DeltaVerification",
    group="delta",
)
def verify(
    deltas: Deltas,
    options: DeltaVerifyOptions,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Verify that deltas are undamaged and follow each other.

    Without --base, all files are compared with their digests. With --base, the deltas are also
    applied in memory, and the digests of base and result are compared.
    """
    from ckptctl.verbs.deltas.verify import DeltaCheck

    output = Printer(json, quiet)
    check = DeltaCheck(deltas, options)
    with show_progress(
        output, "checking", check.nbytes, "checked", lambda: "loading torch"
    ) as advance:
        result = check.run(advance or (lambda _: None))
    for note in format_by_reason("skipped", result.left_out):
        output.print_note(note)
    output.print_answer(
        "delta verify",
        result,
        names=deltas,
        rows=_list_verification_rows(result),
        human=lambda: _show_verification(output, result),
    )
    if result.base is None:
        output.print_hint("pass `--base` to compare the checkpoint that the delta applies to")


@command(
    "ckptctl delta squash step-1.delta step-2.delta step-3.delta steps-1-3.delta",
    prints="ckptctl.verbs.deltas.delta_result:DeltaResult",
    group="delta",
)
def squash(
    deltas: Deltas,
    out: NewDelta,
    options: DeltaSquashOptions,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Combine deltas that follow each other into one.

    The base is not needed. Applying OUT equals applying the deltas in turn, bit for bit.
    """
    from ckptctl.verbs.deltas.squash import DeltaSquash

    output = Printer(json, quiet)
    job = DeltaSquash(deltas, out, options)
    with show_progress(
        output, "combining", job.nbytes, "syncing", lambda: "loading torch"
    ) as advance:
        result = job.run(advance or (lambda _: None))
    _show_delta(output, "delta squash", result, out)


def _show_delta(output: Printer, name: str, result: DeltaResult, out: TreePath) -> None:
    for note in (*format_by_reason("skipped", result.left_out), *result.notes):
        output.print_note(note)
    output.print_answer(
        name,
        result,
        names=(out,),
        rows=_list_delta_rows(result),
        human=lambda: _show_summary(output, result, out),
    )


def _list_delta_rows(result: DeltaResult) -> Iterator[Row]:
    yield "output", result.output
    yield "bytes", result.nbytes
    yield "full_bytes", result.full_bytes
    yield "tensors", result.tensors
    yield "base_sha256", result.base_sha256
    yield "result_sha256", result.result_sha256
    yield from (("changed", name) for name in result.changed)
    yield from (("added", name) for name in result.added)
    yield from (("removed", name) for name in result.removed)
    yield from (("asset", name) for name in result.assets)
    yield from (("left_out", name, why) for name, why in result.left_out.items())


def _list_verification_rows(result: DeltaVerification) -> Iterator[Row]:
    yield from (("delta", path) for path in result.deltas)
    yield "base", result.base or "-"
    yield "bytes", result.nbytes
    yield "tensors", result.tensors
    yield "changed", result.changed
    yield "base_sha256", result.base_sha256
    yield "result_sha256", result.result_sha256
    yield from (("left_out", name, why) for name, why in result.left_out.items())


def _show_verification(output: Printer, result: DeltaVerification) -> None:
    applied = ", applied to the base" if result.base else ""
    output.print_line(f"{pluralize(len(result.deltas), 'delta')} verified{applied}", "bold")
    output.print_sentence(
        f"{format_bytes(result.nbytes)}, {result.changed:,} of "
        f"{pluralize(result.tensors, 'tensor')} changed"
    )
    output.print_sentence(f"{result.base_sha256[:12]} → {result.result_sha256[:12]}")


def _show_summary(output: Printer, result: DeltaResult, out: TreePath) -> None:
    share = 100 * result.nbytes / max(result.full_bytes, 1)
    output.print_line(
        f"wrote {out}: {format_bytes(result.nbytes)} ({share:.2g} % of "
        f"{format_bytes(result.full_bytes)}) in {format_seconds(result.seconds)}",
        "bold",
    )
    counts = [f"{len(result.changed):,} of {pluralize(result.tensors, 'tensor')} changed"]
    counts += [f"{len(result.added):,} added"] if result.added else []
    counts += [f"{len(result.removed):,} removed"] if result.removed else []
    counts += [f"{pluralize(len(result.assets), 'file')} changed"] if result.assets else []
    output.print_sentence(", ".join(counts))
