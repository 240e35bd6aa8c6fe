"""``ckptctl verify PATH``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ckptctl.cli.commands import Json, SingleProcess, command, only_quiet
from ckptctl.cli.findings import grouped
from ckptctl.cli.output import VERDICTS, Printer, Row
from ckptctl.cli.progress import progress
from ckptctl.cli.ranks import coordinator, output_of
from ckptctl.cli.tables import SHOWN, Painted
from ckptctl.cli.typed_paths import as_typed
from ckptctl.errors import format_command as suggested
from ckptctl.errors import quote_names
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
    prints="ckptctl.verbs.verification.verify_result:Verification",
)
def verify(
    path: Checkpoint,
    options: VerifyOptions,
    single_process: SingleProcess = False,
    json: Json = False,
    quiet: Annotated[
        bool, only_quiet("Print only errors and unknown findings, one per line.")
    ] = False,
) -> None:
    """Check that a checkpoint is complete and list all problems.

    The exit code is 0 if the checkpoint is complete, 4 if there is evidence of damage, and 9 if
    neither could be determined. Warnings do not change the exit code. The comparison of data with
    checksums is reported separately. With --require-verified, data without checksums is a failure
    (exit code 9).
    """
    from ckptctl.verbs.verification import verify as op

    ranks = coordinator(single_process, json)
    output = output_of(ranks, json, quiet)
    found = op.verify_checkpoint(path, options, partial(progress, output, "verifying"), ranks)
    if ranks.rank == 0:
        output.answer(
            "verify",
            found,
            names=_problems(found),
            rows=_rows(found),
            human=lambda: _show(output, found),
        )
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def _show(output: Printer, found: Verification) -> None:
    output.headline(
        found.path,
        found.format,
        pluralize(found.tensors, "tensor"),
        f"{pluralize(len(found.files), 'file')}, {format_bytes(found.nbytes)}",
        f"level {found.level}",
        Painted(_verdict(found), VERDICTS[found.verdict]),
        f"data {_data_check(found)}",
    )
    groups = grouped(found.findings)
    for group in groups[:SHOWN]:
        one = group.first
        output.sentence(
            f"  {one.severity}: {group.title}", "damaged" if one.severity == "error" else "bold"
        )
        for label, text in (("where: ", group.where), ("why:   ", one.why)):
            if text:
                output.sentence(f"    {label}{text}")
    output.more(SHOWN + sum(len(group.findings) for group in groups[SHOWN:]))
    for line in _data(found):
        output.sentence(f"  {line}", "dim")
    if found.manifest:  # not wrapped, so that the path can be copied
        output.line(f"  wrote {as_typed(str(found.manifest))}", "dim")
    unverifiable = found.data == "not verifiable" and not found.manifest
    if found.verdict is Verdict.COMPLETE and unverifiable and "://" not in found.path:
        listing = suggested("verify", found.path, options=("--level", "full", "--manifest"))
        output.hint(f"run {listing} to record checksums of the current data")


def _data_check(found: Verification) -> str:
    """Format the share of the data that was compared with checksums."""
    tensors = f"{found.verified_tensors or 0:,} of {pluralize(found.tensors, 'tensor')}"
    return {
        "verified": f"verified: {tensors}",
        "partly verified": f"partly verified: {tensors}",
        "not verified": f"not verified: {tensors}",
        "not verifiable": "not verifiable: no checksums recorded",
        "not compared": "not compared",
        "not read": "not read",
    }[found.data]


def _verdict(found: Verification) -> str:
    if found.complete is None:
        return "structure complete"
    counts = [pluralize(len(found.errors), "error")] if found.errors else []
    counts += [f"{len(found.unknown):,} unknown"] if found.unknown else []
    return f"{found.verdict}: {', '.join(counts)}" if counts else found.verdict


def _data(found: Verification) -> Iterator[str]:
    if found.verified_bytes:
        shown = f"matched checksums: {format_bytes(found.verified_bytes)}"
        unchecked = found.structure_only_bytes
        yield shown + (f"; without checksums: {format_bytes(unchecked)}" if unchecked else "")
    elif found.data in ("not compared", "not read") and not found.exit_code:
        checked = "data" if found.level == "headers" else "headers and data"
        known = f" against {quote_names(found.checksum_lists)}" if found.checksum_lists else ""
        yield f"pass `--level full` to check the {checked}{known}"
    yield f"checked in {format_seconds(found.seconds)}"
    if found.nan and not found.exit_code:
        yield "all floating-point values are finite"
    if _lacks_checksums(found):
        yield "failed because of `--require-verified`: checksums do not cover all tensors"
    yield from found.notes


def _rows(found: Verification) -> Iterator[Row]:
    yield "path", found.path
    yield "format", found.format
    yield "level", found.level
    yield "verdict", found.verdict
    yield "scope", found.scope
    yield "data", found.data
    yield "tensors", found.tensors
    yield "files", len(found.files)
    yield "bytes", found.nbytes
    if found.verified_bytes is not None:
        yield "verified_bytes", found.verified_bytes
        yield "structure_only_bytes", found.structure_only_bytes
        yield "verified_tensors", found.verified_tensors
        yield "bytes_read", found.bytes_read
    yield from (("checksum_list", name) for name in found.checksum_lists)
    yield "errors", len(found.errors)
    yield "unknown", len(found.unknown)
    yield "warnings", len(found.warnings)
    yield "seconds", f"{found.seconds:.3f}"
    if found.manifest:
        yield "manifest", found.manifest
    yield from (("note", note) for note in found.notes)
    if found.findings:
        yield ("",)
    yield from ((f.severity, f.what, f.where, f.why or "") for f in found.findings)


def _problems(found: Verification) -> Iterator[str]:
    """Yield one line per reason for a nonzero exit code."""
    for one in (*found.errors, *found.unknown):
        yield ": ".join(filter(None, (one.where, one.what)))
    if _lacks_checksums(found):
        yield f"data {_data_check(found)}"


def _lacks_checksums(found: Verification) -> bool:
    """Return whether a complete checkpoint fails because of ``--require-verified``."""
    return found.verdict is Verdict.COMPLETE and found.exit_code != 0
