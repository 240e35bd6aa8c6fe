"""``ckptctl diff A B``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ckptctl.cli.commands import Json, Quiet, command
from ckptctl.cli.differences import show
from ckptctl.cli.output import Output
from ckptctl.cli.progress import progress
from ckptctl.ops.comparison.options import DiffOptions
from ckptctl.ops.options import place
from ckptctl.options import Argument

SCHEMA = "ckptctl.diff/1"
DIFFERENT = 1


@command(
    "ckptctl diff step-1000 step-2000",
    "ckptctl diff out-dcp llama-3-8b --only model",
    "ckptctl diff bf16 fp32 --ignore-dtype --atol 1e-3",
    "ckptctl diff zero zero --weights-a master --weights-b module --ignore-dtype --atol 1e-2",
    "ckptctl diff a b --structure --json | jq .a.only",
)
def diff(
    a: Annotated[Path, Argument("Checkpoint.", metavar="A", check=place)],
    b: Annotated[Path, Argument("Checkpoint, mapped to A.", metavar="B", check=place)],
    options: DiffOptions,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two checkpoints, whatever their formats and layouts.

    Names, shapes, dtypes and values; B is mapped to the layout of A. Elements are equal when their
    bits are. The exit code is 0 when nothing differs and 1 when something does.
    """
    from ckptctl.ops.comparison import diff as op

    output = Output(json, quiet)
    found = op.diff(a, b, options, partial(progress, output, "comparing"))
    if output.mode == "json":
        output.document(SCHEMA, found.to_json())
    else:
        show(output, found)
    if not found.same:
        raise typer.Exit(DIFFERENT)
