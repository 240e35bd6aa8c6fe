"""``ckptctl merge BASE ADAPTER DST``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptctl.cli import checks
from ckptctl.cli import options as opt
from ckptctl.cli.conversions import Published
from ckptctl.cli.convert import carry_out, planned
from ckptctl.cli.ranks import coordinator, output_of
from ckptctl.cli.tables import counted

SCHEMA = "ckptctl.merge/1"
EPILOG = opt.examples(
    "ckptctl merge llama-3-8b adapter merged",
    "ckptctl merge llama-3-8b adapter merged.pt --to torch --to-layout torchtune",
    "ckptctl merge base-dcp adapter_model.pt merged --to hf --lora-alpha 16 --dtype bf16",
    "ckptctl merge mistral-7b lora.safetensors merged --scaling 2.0 --dry-run",
)


def merge(
    context: typer.Context,
    base: Annotated[
        Path,
        typer.Argument(
            parser=checks.place, metavar="BASE", show_default=False, help="The model's checkpoint."
        ),
    ],
    adapter: Annotated[
        Path,
        typer.Argument(
            parser=checks.place,
            metavar="ADAPTER",
            show_default=False,
            help="LoRA or DoRA adapter: PEFT's directory, torchtune's or Mistral's file.",
        ),
    ],
    dst: opt.Destination,
    to: Annotated[
        str | None,
        opt.target(f"Format to write, if not that of BASE: {opt.FORMATS}."),
    ] = None,
    lora_alpha: opt.LoraAlpha = None,
    scaling: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR",
            callback=checks.factor,
            help="Factor of the change itself, instead of alpha / rank.",
        ),
    ] = None,
    from_format: opt.From = None,
    model_type: opt.ModelType = None,
    converter: opt.Converter = None,
    sizes: opt.Set = None,
    from_layout: opt.FromLayout = None,
    to_layout: opt.ToLayout = None,
    dtype: opt.DType = None,
    dequantize: opt.Dequantize = None,
    root: opt.Root = None,
    max_shard_size: opt.MaxShardSize = "5GB",
    mp: opt.MP = 1,
    assets: opt.Assets = None,
    trust_assets: opt.TrustAssets = False,
    carry: opt.Carry = None,
    like: opt.Like = None,
    untie: opt.Untie = False,
    allow_overflow: opt.AllowOverflow = False,
    allow_missing: opt.AllowMissing = False,
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
    """Merge a LoRA or DoRA adapter into its model.

    The sums are made in fp32 and rounded once. BASE and ADAPTER may have different formats and
    layouts; neither is changed. DST appears whole, in one step, or not at all. All options but
    --lora-alpha and --scaling are about the model, as in convert.
    """
    from ckptctl import api

    del converter  # known while the command runs
    ranks = coordinator()
    output = output_of(ranks, json, quiet)
    plan = planned(
        ranks,
        lambda: api.plan_merge(
            base,
            adapter,
            dst,
            to=to,
            scaling=scaling,
            lora_alpha=lora_alpha,
            from_format=from_format,
            model_type=model_type,
            sizes=checks.sizes_of(sizes),
            from_layout=from_layout,
            to_layout=to_layout,
            dtype=dtype,
            dequantize=dequantize,
            root=root,
            max_shard_size=max_shard_size,
            mp=mp,
            assets=assets,
            trust_assets=trust_assets,
            carry=carry or (),
            like=like,
            untie=untie,
            allow_overflow=allow_overflow,
            allow_missing=allow_missing,
            overwrite=overwrite,
            resume=resume,
            verify=verify,
            checksum=not no_checksum,
            jobs=jobs,
            memory=memory,
        ),
        None if dry_run else dst,
    )
    scales = ", ".join(f"{scale:g}" for scale in plan.scales)
    output.statement(
        f"adapter {plan.adapter_format}, layout {plan.adapter_layout} · "
        f"{counted(plan.merged, 'tensor')} changed (scale {scales or '-'}), "
        f"{plan.replaced:,} replaced"
    )
    published = Published(SCHEMA, plan.to_json())
    carry_out(context, output, plan.conversion, dst, dry_run, yes, published, ranks)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("merge", epilog=EPILOG, no_args_is_help=True)(merge)
