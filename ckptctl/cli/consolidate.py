"""``ckptctl consolidate SRC [DST]``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from ckptctl.cli import checks
from ckptctl.cli import options as opt
from ckptctl.cli.conversions import Published
from ckptctl.cli.convert import carry_out, planned
from ckptctl.cli.output import Output
from ckptctl.cli.ranks import coordinator, output_of
from ckptctl.cli.tables import counted
from ckptctl.errors import UsageError
from ckptctl.ops.ranks.coordinator import on_first
from ckptctl.units import format_bytes

if TYPE_CHECKING:
    from ckptctl.ops.consolidate_metadata import MetadataPlan

SCHEMA = "ckptctl.consolidate/1"
METADATA_OPTIONS = ("src", "dst", "metadata_only", "dry_run", "json", "quiet")
EPILOG = opt.examples(
    "ckptctl consolidate global_step1000 model",
    "ckptctl consolidate step-100 --metadata-only",
    "ckptctl consolidate global_step1000 model --weights module --max-shard-size 2GB",
    "ckptctl consolidate fsdp-ranks whole --to dcp --optimizer",
    "ckptctl consolidate step-100 model --dry-run",
)


def consolidate(
    context: typer.Context,
    src: opt.Source,
    dst: Annotated[
        Path | None,
        typer.Argument(
            parser=checks.place,
            metavar="DST",
            show_default=False,
            help="What to write; none with --metadata-only.",
        ),
    ] = None,
    to: Annotated[
        str | None,
        opt.target(f"Format to write: {opt.FORMATS}.  [default: hf; dcp with --optimizer]"),
    ] = None,
    metadata_only: Annotated[
        bool,
        typer.Option(
            "--metadata-only", help="Add the .metadata that ranks left out; move no tensor."
        ),
    ] = False,
    from_format: opt.From = None,
    weights: opt.Weights = None,
    tag: opt.Tag = None,
    rules: opt.Rules = None,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Keep the optimizer state: --to dcp or torch.")
    ] = False,
    tied: opt.Tied = None,
    allow_missing: opt.AllowMissing = False,
    verify_replicas: opt.VerifyReplicas = False,
    dtype: opt.DType = None,
    allow_overflow: opt.AllowOverflow = False,
    model_type: opt.ModelType = None,
    include: opt.Include = None,
    exclude: opt.Exclude = None,
    root: opt.Root = None,
    max_shard_size: opt.MaxShardSize = "5GB",
    assets: opt.Assets = None,
    trust_assets: opt.TrustAssets = False,
    carry: opt.Carry = None,
    dry_run: opt.DryRun = False,
    yes: opt.UploadYes = False,
    overwrite: opt.Overwrite = False,
    resume: opt.Resume = False,
    verify: opt.Verify = False,
    no_checksum: opt.NoChecksum = False,
    jobs: opt.Jobs = None,
    memory: opt.Memory = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Make one whole checkpoint of what ranks left in pieces.

    The form is recognised; no framework of the trainer is needed and none of its classes is
    loaded. Names stay as the trainer wrote them. Whatever is missing is named, and nothing is
    written, unless --allow-missing asks for what is whole.
    """
    from ckptctl import api

    ranks = coordinator()
    output = output_of(ranks, json, quiet)
    if metadata_only:
        _require_meaning(context)
        on_first(ranks, lambda: _metadata(output, src, dst, dry_run))
        return
    if dst is None:
        raise UsageError("DST is missing", hint="only --metadata-only needs none")
    plan = planned(
        ranks,
        lambda: api.plan_conversion(
            src,
            dst,
            to=to or ("dcp" if optimizer else "hf"),
            from_format=from_format,
            weights=cast(Literal["master", "module"] | None, weights),
            tag=tag,
            rules=rules,
            only="all" if optimizer else "model",
            tied=cast(Literal["drop", "copy"] | None, tied),
            allow_missing=allow_missing,
            verify_replicas=verify_replicas,
            dtype=dtype,
            allow_overflow=allow_overflow,
            model_type=model_type,
            include=include or (),
            exclude=exclude or (),
            root=root,
            max_shard_size=max_shard_size,
            assets=assets,
            trust_assets=trust_assets,
            carry=carry or (),
            overwrite=overwrite,
            resume=resume,
            verify=verify,
            checksum=not no_checksum,
            jobs=jobs,
            memory=memory,
        ),
        None if dry_run else dst,
    )
    carry_out(context, output, plan, dst, dry_run, yes, Published(SCHEMA), ranks)


def _require_meaning(context: typer.Context) -> None:
    """Raise UsageError if there is an option that says how tensors are to be written."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if given and option.name not in METADATA_OPTIONS:
            raise UsageError(
                f"{option.opts[0]} has no meaning with --metadata-only", why="no tensor is written"
            )


def _metadata(output: Output, src: Path, dst: Path | None, dry_run: bool) -> None:
    from ckptctl.ops.consolidate_metadata import plan_metadata, run_metadata

    if dst is not None:
        raise UsageError("--metadata-only adds a file to SRC and takes no DST", where=str(dst))
    plan = plan_metadata(src)
    _state(output, plan)
    if dry_run:
        _show(output, plan, {"dry_run": True, **plan.to_json()}, "would write")
        output.hint("run it without `--dry-run`")
        return
    done = run_metadata(plan)
    _show(output, plan, done.to_json(), "wrote")
    output.hint(f"any world size can load {src} now")


def _state(output: Output, plan: MetadataPlan) -> None:
    output.statement(
        f"dcp-rank-local · {counted(plan.ranks, 'rank')} · {counted(plan.tensors, 'tensor')} in "
        f"{counted(plan.chunks, 'chunk')}, {format_bytes(plan.data_bytes)}"
    )
    for note in plan.notes:
        output.note(note)


def _show(output: Output, plan: MetadataPlan, document: dict[str, object], verb: str) -> None:
    if output.mode == "json":
        output.document(SCHEMA, document)
    elif output.mode == "quiet":
        output.line(str(plan.target))
    elif output.mode == "plain":
        output.fields([("target", plan.target), ("ranks", plan.ranks), ("bytes", plan.nbytes)])
    else:
        output.line(f"{verb} {plan.target} ({format_bytes(plan.nbytes)})", "bold")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("consolidate", epilog=EPILOG, no_args_is_help=True)(consolidate)
