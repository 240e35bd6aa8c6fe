"""``ckptctl verify PATH``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ckptctl.cli.commands import InPanel, Json, SingleProcess, command, make_quiet_option
from ckptctl.cli.output import VERDICT_STYLES, Printer, Row
from ckptctl.cli.progress import show_progress
from ckptctl.cli.ranks import join_ranks, make_rank_printer
from ckptctl.cli.tables import MAX_SHOWN_ROWS, StyledText
from ckptctl.cli.typed_paths import restore_typed_paths
from ckptctl.errors import format_command as suggested
from ckptctl.errors import quote_names
from ckptctl.run_options import RunBatchOptions
from ckptctl.shared_options import Checkpoint
from ckptctl.units import format_bytes, format_seconds, pluralize
from ckptctl.verbs.verification.verify_options import VerifyOptions
from ckptctl.verdict import Verdict

if TYPE_CHECKING:
    from ckptctl.verbs.verification.verify_result import Verification


@command(
    "ckptctl verify llama-3-8b",
    "ckptctl verify step-2000 --level full --nan",
    "ckptctl verify s3://models/step-2000",
    "ckptctl verify step-2000 --level full --require-verified",
    "ckptctl verify step-2000 --level fast --quiet || echo not complete",
    "ckptctl verify step-2000 --level full --manifest   (then: sha256sum -c SHA256SUMS)",
    "ckptctl verify step-2000 --json | jq .findings",
    "ckptctl verify runs/llama --each --level full",
    prints="ckptctl.verbs.verification.verify_result:Verification, "
    "--each: ckptctl.verbs.run_verification:RunVerification",
)
def verify(
    path: Checkpoint,
    options: VerifyOptions,
    batch: Annotated[RunBatchOptions, InPanel("Run")],
    single_process: SingleProcess = False,
    json: Json = False,
    quiet: Annotated[
        bool, make_quiet_option("Print only errors and unknown findings, one per line.")
    ] = False,
) -> None:
    """Check that a checkpoint is complete and list all problems.

    The exit code is 0 if the checkpoint is complete, 4 if there is evidence of damage, and 9 if
    neither could be determined. Warnings do not change the exit code. The comparison of data with
    checksums is reported separately. With --require-verified, data without checksums is a failure
    (exit code 9). With --each, PATH is the folder of a run, and the exit code is 7 if a checkpoint
    does not pass.
    """
    if batch.each:
        from ckptctl.cli.run_batches import verify_run  # only needed for runs

        verify_run(path, options, batch, Printer(json, quiet), single_process=single_process)
        return
    from ckptctl.verbs.verification import verify as op

    ranks = join_ranks(single_process, json)
    output = make_rank_printer(ranks, json, quiet)
    result = op.verify_checkpoint(path, options, partial(show_progress, output, "verifying"), ranks)
    if ranks.rank == 0:
        output.print_answer(
            "verify",
            result,
            names=_list_problems(result),
            rows=_list_rows(result),
            human=lambda: _show_result(output, result),
        )
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _show_result(output: Printer, result: Verification) -> None:
    output.print_headline(
        result.path,
        result.format,
        pluralize(result.tensors, "tensor"),
        f"{pluralize(len(result.files), 'file')}, {format_bytes(result.nbytes)}",
        f"level {result.level}",
        StyledText(_format_verdict(result), VERDICT_STYLES[result.verdict]),
        f"data {_format_data_check(result)}",
    )
    from ckptctl.cli.views.findings import group_findings  # not for --help or --json

    groups = group_findings(result.findings)
    for group in groups[:MAX_SHOWN_ROWS]:
        finding = group.first
        output.print_sentence(
            f"  {finding.severity}: {group.title}",
            "damaged" if finding.severity == "error" else "bold",
        )
        for label, text in (("where: ", group.where), ("why:   ", finding.why)):
            if text:
                output.print_sentence(f"    {label}{text}")
    output.print_remaining(
        MAX_SHOWN_ROWS + sum(len(group.findings) for group in groups[MAX_SHOWN_ROWS:])
    )
    for line in _list_data_notes(result):
        output.print_sentence(f"  {line}", "dim")
    if result.manifest:  # not wrapped, so that the path can be copied
        output.print_line(f"  wrote {restore_typed_paths(str(result.manifest))}", "dim")
    unverifiable = result.data == "not verifiable" and not result.manifest
    if result.verdict is Verdict.COMPLETE and unverifiable and "://" not in result.path:
        manifest_command = suggested(
            "verify", result.path, options=("--level", "full", "--manifest")
        )
        output.print_hint(f"run {manifest_command} to record checksums of the current data")


def _format_data_check(result: Verification) -> str:
    """Format the share of the data that was compared with checksums."""
    tensors = f"{result.verified_tensors or 0:,} of {pluralize(result.tensors, 'tensor')}"
    return {
        "verified": f"verified: {tensors}",
        "partly verified": f"partly verified: {tensors}",
        "not verified": f"not verified: {tensors}",
        "not verifiable": "not verifiable: no checksums recorded",
        "not compared": "not compared",
        "not read": "not read",
    }[result.data]


def _format_verdict(result: Verification) -> str:
    if result.complete is None:
        return "structure complete"
    counts = [pluralize(len(result.errors), "error")] if result.errors else []
    counts += [f"{len(result.unknown):,} unknown"] if result.unknown else []
    return f"{result.verdict}: {', '.join(counts)}" if counts else result.verdict


def _list_data_notes(result: Verification) -> Iterator[str]:
    if result.verified_bytes:
        matched = f"matched checksums: {format_bytes(result.verified_bytes)}"
        unchecked = result.structure_only_bytes
        yield matched + (f"; without checksums: {format_bytes(unchecked)}" if unchecked else "")
    elif result.data in ("not compared", "not read") and not result.exit_code:
        checked = "data" if result.level == "headers" else "headers and data"
        against = f" against {quote_names(result.checksum_lists)}" if result.checksum_lists else ""
        yield f"pass `--level full` to check the {checked}{against}"
    yield f"checked in {format_seconds(result.seconds)}"
    if result.nan and not result.exit_code:
        yield "all floating-point values are finite"
    if _is_missing_required_checksums(result):
        yield "failed because of `--require-verified`: checksums do not cover all tensors"
    yield from result.notes


def _list_rows(result: Verification) -> Iterator[Row]:
    yield "path", result.path
    yield "format", result.format
    yield "level", result.level
    yield "verdict", result.verdict
    yield "scope", result.scope
    yield "data", result.data
    yield "tensors", result.tensors
    yield "files", len(result.files)
    yield "bytes", result.nbytes
    if result.verified_bytes is not None:
        yield "verified_bytes", result.verified_bytes
        yield "structure_only_bytes", result.structure_only_bytes
        yield "verified_tensors", result.verified_tensors
        yield "bytes_read", result.bytes_read
    yield from (("checksum_list", name) for name in result.checksum_lists)
    yield "errors", len(result.errors)
    yield "unknown", len(result.unknown)
    yield "warnings", len(result.warnings)
    yield "seconds", f"{result.seconds:.3f}"
    if result.manifest:
        yield "manifest", result.manifest
    yield from (("note", note) for note in result.notes)
    if result.findings:
        yield ("",)
    yield from (
        (finding.severity, finding.what, finding.where, finding.why or "")
        for finding in result.findings
    )


def _list_problems(result: Verification) -> Iterator[str]:
    """Yield one line for each error, unknown finding or other reason for a nonzero exit code."""
    for finding in (*result.errors, *result.unknown):
        yield ": ".join(filter(None, (finding.where, finding.what)))
    if _is_missing_required_checksums(result):
        yield f"data {_format_data_check(result)}"


def _is_missing_required_checksums(result: Verification) -> bool:
    """Return whether a complete checkpoint fails because of ``--require-verified``."""
    return result.verdict is Verdict.COMPLETE and result.exit_code != 0
