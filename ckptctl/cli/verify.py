"""``ckptctl verify PATH``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ckptctl.cli.commands import Alone, Json, command, only_quiet
from ckptctl.cli.output import STATES, Output, Row
from ckptctl.cli.progress import progress
from ckptctl.cli.ranks import coordinator, output_of
from ckptctl.cli.tables import Painted
from ckptctl.errors import command as suggested
from ckptctl.errors import listed
from ckptctl.ops.options import Checkpoint
from ckptctl.ops.verification.options import VerifyOptions
from ckptctl.units import counted, format_bytes

if TYPE_CHECKING:
    from ckptctl.catalog import Finding
    from ckptctl.ops.verification.result import Verification

SHOWN = 10
SEEN = {"fast": "index whole; headers (`--level headers`) and", "headers": "structure whole;"}


@command(
    "ckptctl verify llama-3-8b",
    "ckptctl verify step-2000 --level full --nan",
    "ckptctl verify s3://models/step-2000",
    "ckptctl verify step-2000 --level fast --quiet || echo not whole",
    "ckptctl verify step-2000 --level full --manifest   (then: sha256sum -c SHA256SUMS)",
    "ckptctl verify step-2000 --json | jq .findings",
    prints="ckptctl.ops.verification.result:Verification",
)
def verify(
    path: Checkpoint,
    options: VerifyOptions,
    alone: Alone = False,
    json: Json = False,
    quiet: Annotated[
        bool, only_quiet("Print errors and unknown findings alone, one per line.")
    ] = False,
) -> None:
    """Prove that a checkpoint is whole, or say where it is not.

    Everything that is wrong is found, not only the first. The exit code is 0 when the checkpoint
    is whole, 4 when there is evidence that it is torn, and else 9 when something in it is not
    understood; warnings do not change it.
    """
    from ckptctl.ops.verification import verify as op

    ranks = coordinator(alone, json)
    output = output_of(ranks, json, quiet)
    found = op.verify(path, options, partial(progress, output, "verifying"), ranks)
    if ranks.rank == 0:
        output.answer(
            "verify",
            found,
            names=map(_one_line, (*found.errors, *found.unknown)),
            rows=_rows(found),
            human=lambda: _show(output, found),
        )
    if not found.whole:
        raise typer.Exit(found.exit_code)


def _show(output: Output, found: Verification) -> None:
    from ckptctl.formats.shared.findings import loss

    output.headline(found.path, *_headline(found))
    alike = _alike(found.findings)
    for one, *others in alike[:SHOWN]:
        times = f" ({1 + len(others):,} times)" if others else ""
        what = f"  {one.severity}: {one.what}{times}"
        output.sentence(what, loss([one], found.absent) if one.severity == "error" else "bold")
        for label, text in (("where: ", _where(one, len(others))), ("why:   ", one.why)):
            if text:
                output.sentence(f"    {label}{text}")
    rest = sum(map(len, alike[SHOWN:]))
    if rest:
        output.line(f"  and {rest:,} more; `--json` lists all")
    for line in _data(found):
        output.sentence(f"  {line}", "dim")
    if found.manifest:  # a path is there to be copied
        output.line(f"  wrote {found.manifest}", "dim")
    if found.whole and found.proven_bytes == 0 and not found.manifest and "://" not in found.path:
        listing = suggested("verify", found.path, options=("--level", "full", "--manifest"))
        output.hint(f"{listing} adds checksums of all files, as they are now")


def _alike(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Return the findings, those together that say the same of one file: the values in it, say."""
    found: dict[object, list[Finding]] = {}
    for number, one in enumerate(findings):
        said = (one.severity, one.what, one.why, one.file) if one.file else number
        found.setdefault(said, []).append(one)
    return list(found.values())


def _where(finding: Finding, others: int) -> str:
    """Return where a finding is, and how many others that say the same of its file there are."""
    inside = replace(finding, file=None).where
    if not others or not inside:
        return finding.where
    return f"{inside} and {others:,} more, {finding.file}"


def _headline(found: Verification) -> tuple[object, ...]:
    return (
        found.format,
        counted(found.tensors, "tensor"),
        f"{counted(len(found.files), 'file')}, {format_bytes(found.nbytes)}",
        f"level {found.level}",
        Painted(_verdict(found), STATES.get(found.condition, "bold")),
    )


def _verdict(found: Verification) -> str:
    counts = [counted(len(found.errors), "error")] if found.errors else []
    counts += [f"{len(found.unknown):,} unknown"] if found.unknown else []
    return f"{found.verdict}: {', '.join(counts)}" if counts else found.verdict


def _data(found: Verification) -> Iterator[str]:
    if found.proven_bytes is not None and found.structure_only_bytes is not None:
        part = f"{found.proven_tensors:,} of {counted(found.tensors, 'tensor')}"
        yield f"proven by checksums: {part}, {format_bytes(found.proven_bytes)}"
        yield f"structure only: {format_bytes(found.structure_only_bytes)}"
    elif found.whole:
        looked = "compared with checksums" if found.nan else "read"
        yield f"{SEEN[found.level]} contents not {looked} (`--level full`)"
        if found.checksum_lists:
            yield f"`--level full` compares them with {listed(found.checksum_lists)}"
    if found.nan and found.whole:
        yield "all floating values are finite"
    yield from found.notes


def _rows(found: Verification) -> Iterator[Row]:
    yield "path", found.path
    yield "format", found.format
    yield "level", found.level
    yield "verdict", found.verdict
    yield "tensors", found.tensors
    yield "files", len(found.files)
    yield "bytes", found.nbytes
    if found.proven_bytes is not None:
        yield "proven_bytes", found.proven_bytes
        yield "structure_only_bytes", found.structure_only_bytes
        yield "proven_tensors", found.proven_tensors
    for name in found.checksum_lists:
        yield "checksum_list", name
    yield "errors", len(found.errors)
    yield "unknown", len(found.unknown)
    yield "warnings", len(found.warnings)
    if found.manifest:
        yield "manifest", found.manifest
    for note in found.notes:
        yield "note", note
    if found.findings:
        yield ("",)
    yield from ((f.severity, f.what, f.where, f.why or "") for f in found.findings)


def _one_line(finding: Finding) -> str:
    return ": ".join(filter(None, (finding.where, finding.what)))
