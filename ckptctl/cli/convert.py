"""``ckptctl convert SRC DST --to FORMAT``."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import typer

from ckptctl.cli import options as opt
from ckptctl.cli.output import Output
from ckptctl.cli.progress import progress
from ckptctl.cli.ranks import coordinator, output_of
from ckptctl.cli.tables import counted
from ckptctl.errors import SHOWN, PartialError, listed
from ckptctl.ops.coordinator import Coordinator, together
from ckptctl.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from ckptctl.ops.convert import ConversionPlan, ConversionResult

SCHEMA = "ckptctl.convert/1"
EPILOG = opt.examples(
    "ckptctl convert tests/data/tiny-llama3-hf out-dcp --to dcp",
    "ckptctl convert out-dcp out-meta --to meta --mp 2",
    "ckptctl convert out-meta out-hf --to hf --dtype bf16 --verify",
    "ckptctl convert out-dcp model.pt --to torch --dry-run",
    "ckptctl convert out-dcp out-titan --to dcp --to-layout torchtitan@0.3",
    "ckptctl convert deepseek-fp8 deepseek-bf16 --to hf --dequantize bf16",
    "ckptctl convert s3://models/step-2000 hf://org/model --to hf",
)


def convert(
    context: typer.Context,
    src: opt.Source,
    dst: opt.Destination,
    to: opt.To,
    from_format: opt.From = None,
    weights: opt.Weights = None,
    tag: opt.Tag = None,
    rules: opt.Rules = None,
    model_type: opt.ModelType = None,
    converter: opt.Converter = None,
    sizes: opt.Set = None,
    from_layout: opt.FromLayout = None,
    to_layout: opt.ToLayout = None,
    dtype: opt.DType = None,
    dequantize: opt.Dequantize = None,
    include: opt.Include = None,
    exclude: opt.Exclude = None,
    only: opt.Only = "model",
    root: opt.Root = None,
    max_shard_size: opt.MaxShardSize = "5GB",
    mp: opt.MP = 1,
    assets: opt.Assets = None,
    like: opt.Like = None,
    untie: opt.Untie = False,
    vocab_size: opt.VocabSize = None,
    lora_alpha: opt.LoraAlpha = None,
    dry_run: opt.DryRun = False,
    overwrite: opt.Overwrite = False,
    resume: opt.Resume = False,
    verify: opt.Verify = False,
    no_checksum: opt.NoChecksum = False,
    jobs: opt.Jobs = None,
    memory: opt.Memory = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Convert a checkpoint to another format, layout or dtype.

    SRC is never changed. DST appears whole, in one step, or not at all.
    """
    from ckptctl import api

    del converter  # known while the command runs
    ranks = coordinator()
    output = output_of(ranks, json, quiet)
    plan = together(
        ranks,
        lambda: api.plan_conversion(
            src,
            dst,
            to=to,
            from_format=from_format,
            weights=cast(Literal["master", "module"] | None, weights),
            tag=tag,
            rules=rules,
            model_type=model_type,
            sizes=opt.sizes_of(sizes),
            from_layout=from_layout,
            to_layout=to_layout,
            dtype=dtype,
            dequantize=dequantize,
            include=include or (),
            exclude=exclude or (),
            only=cast(Literal["model", "all"], only),
            root=root,
            max_shard_size=max_shard_size,
            mp=mp,
            assets=assets,
            like=like,
            overwrite=overwrite,
            resume=resume,
            verify=verify,
            checksum=not no_checksum,
            jobs=jobs,
            memory=memory,
            untie=untie,
            vocab_size=vocab_size,
            lora_alpha=lora_alpha,
        ),
    )
    carry_out(context, output, plan, dst, dry_run, Published(SCHEMA), ranks)


@dataclass(frozen=True, slots=True)
class Published:
    """What ``--json`` prints.

    Attributes:
        schema: Its schema.
        more: Fields beside those of the conversion.
    """

    schema: str
    more: Mapping[str, object] = field(default_factory=dict)


def carry_out(
    context: typer.Context,
    output: Output,
    plan: ConversionPlan,
    dst: Path,
    dry_run: bool,
    published: Published,
    ranks: Coordinator,
) -> None:
    """Show *plan*, or carry it out and show the result.

    Args:
        context: The command line.
        output: Where to print.
        plan: What to do.
        dst: The destination as it was typed.
        dry_run: Whether nothing is to be done.
        published: What ``--json`` prints.
        ranks: Those that carry it out.
    """
    from ckptctl.ops.convert import run_conversion

    output.statement(plan.statement)
    for note in plan.notes:
        output.note(note)
    if dry_run:
        _print_plan(output, plan, dst, published)
        together(ranks, lambda: _require_all(plan, dst))
        output.hint(f"run it with `{_without_dry_run(context)}`")
        return
    for reason, names in _by_reason(plan.left_out):
        output.note(f"left out, {reason}: {_in_short(names)}")
    with progress(output, "copying", plan.nbytes, "syncing") as advance:
        result = run_conversion(plan, advance, ranks)
    _print_result(output, result, dst, published)
    together(ranks, lambda: _require_all(plan, dst))
    output.hint(f"look at it with `{shlex.join(['ckptctl', 'inspect', str(dst)])}`")


def _require_all(plan: ConversionPlan, dst: Path) -> None:
    """Raise PartialError if something is missing, after all that is whole has been dealt with."""
    if plan.missing:
        found = [reason for reason, _ in _by_reason(plan.missing)]
        raise PartialError(
            f"the source is not whole: {counted(len(plan.missing), 'item')} not in {dst}",
            where=plan.source.path,
            why=f"{listed(list(plan.missing))}: {found[0]}"
            + (f"; and {len(found) - 1:,} other reasons" if found[1:] else ""),
            hint="`--json` lists all of them; `ckptctl verify` says what is wrong with the source",
        )


def _print_plan(output: Output, plan: ConversionPlan, dst: Path, published: Published) -> None:
    if output.mode == "json":
        output.document(published.schema, {"dry_run": True, **plan.to_json(), **published.more})
    elif output.mode == "quiet":
        output.line(str(dst))
    elif output.mode == "plain":
        output.fields(_plan_fields(plan, dst))
        output.table([("file", path, str(nbytes)) for path, nbytes in plan.files])
        output.table([("dropped", key, why) for key, why in plan.dropped.items()])
        output.table([("left_out", key, why) for key, why in plan.left_out.items()])
        output.table([("missing", key, why) for key, why in plan.missing.items()])
    else:
        _show_plan(output, plan, dst)


def _plan_fields(plan: ConversionPlan, dst: Path) -> Iterator[tuple[str, object]]:
    yield "target", dst
    yield "tensors", plan.tensors
    yield "mapped", plan.mapped
    yield "bytes", plan.nbytes
    yield "free_bytes", plan.free_bytes
    yield "memory_bytes", plan.memory_bytes
    yield "arithmetic", "yes" if plan.arithmetic else "no"


def _show_plan(output: Output, plan: ConversionPlan, dst: Path) -> None:
    total = format_bytes(plan.nbytes)
    output.line(f"would write {counted(len(plan.files), 'file')} ({total}) to {dst}", "bold")
    output.table([(f"  {path}", format_bytes(nbytes)) for path, nbytes in plan.files], right=[1])
    output.line(
        f"{plan.tensors:,} tensors · {plan.mapped:,} renamed or reordered"
        f" · {len(plan.dropped):,} dropped · {len(plan.left_out):,} left out"
        + (f" · {len(plan.missing):,} missing" if plan.missing else "")
    )
    reasons = {"dropped": plan.dropped, "left out": plan.left_out, "missing": plan.missing}
    for title, keys in reasons.items():
        _show_reasons(output, title, keys)
    memory = format_bytes(plan.memory_bytes)
    output.line(
        f"needs {total} of disk ({format_bytes(plan.free_bytes)} free), peak memory about {memory}"
        + (", arithmetic with torch" if plan.arithmetic else "")
    )


def _by_reason(keys: Mapping[str, str]) -> Iterable[tuple[str, list[str]]]:
    by_reason: dict[str, list[str]] = {}
    for key, reason in keys.items():
        by_reason.setdefault(reason, []).append(key)
    return by_reason.items()


def _in_short(names: Sequence[str]) -> str:
    """Return the names, or where there are many what they begin with."""
    if len(names) <= SHOWN:
        return listed(names)
    heads = list(dict.fromkeys(name.partition(".")[0] for name in names))
    return f"{listed(heads)} ({len(names):,} in all)"


def _show_reasons(output: Output, title: str, keys: Mapping[str, str]) -> None:
    for reason, names in _by_reason(keys):
        output.line(f"{title}: {reason}")
        for name in names[:SHOWN]:
            output.line(f"  {name}")
        if len(names) > SHOWN:
            output.line(f"  and {len(names) - SHOWN:,} more")


def _print_result(
    output: Output, result: ConversionResult, dst: Path, published: Published
) -> None:
    if output.mode == "json":
        output.document(published.schema, {"dry_run": False, **result.to_json(), **published.more})
        return
    for note in result.notes:
        output.note(note)
    if output.mode == "quiet":
        output.line(str(dst))
    elif output.mode == "plain":
        output.fields(
            (
                ("target", dst),
                ("files", len(result.plan.files)),
                ("bytes", result.nbytes),
                ("resumed_bytes", result.resumed_bytes),
                ("seconds", f"{result.seconds:.3f}"),
                ("verified", "yes" if result.verified else "no"),
            )
        )
        output.table([("missing", key, why) for key, why in result.plan.missing.items()])
    else:
        output.line(_summary(result, dst), "bold")
        _show_reasons(output, "missing", result.plan.missing)


def _summary(result: ConversionResult, dst: Path) -> str:
    moved = result.nbytes - result.resumed_bytes
    parts = [
        f"wrote {dst}: {counted(len(result.plan.files), 'file')}",
        f"{format_bytes(result.nbytes)} in {format_seconds(result.seconds)}",
    ]
    if result.seconds > 0.5:
        parts.append(f"{format_bytes(int(moved / result.seconds))}/s")
    if result.resumed_bytes:
        parts.append(f"{format_bytes(result.resumed_bytes)} were there already")
    if result.verified:
        parts.append("verified")
    return ", ".join(parts)


def _without_dry_run(context: typer.Context) -> str:
    from ckptctl.cli.app import RAW_ARGUMENTS

    typed: list[str] = context.meta.get(RAW_ARGUMENTS, [])
    kept = (word for word in typed if word not in ("-n", "--dry-run"))
    merged = {"-nq": "-q", "-qn": "-q"}
    return shlex.join(["ckptctl", *(merged.get(word, word) for word in kept)])


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("convert", epilog=EPILOG, no_args_is_help=True)(convert)
