"""``ckptctl extract PATH TENSOR``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from ckptctl.cli import tables
from ckptctl.cli.commands import Json, Quiet, command
from ckptctl.cli.convert import warn_out_of_range
from ckptctl.cli.output import Printer, Row
from ckptctl.option_checks import list_tensor_names
from ckptctl.options import Argument
from ckptctl.shared_options import Checkpoint
from ckptctl.units import format_bytes, pluralize
from ckptctl.verbs.extraction.extract_options import ExtractOptions

if TYPE_CHECKING:
    from ckptctl.verbs.extraction.extract import ExtractedTensor, Extraction


@command(
    "ckptctl extract llama-3-8b model.norm.weight",
    "ckptctl extract step-2000 'model.norm.weight[0:8]' -o norm.npy --dtype fp32",
    "ckptctl extract step-2000 lm_head.weight --slice '[:, 5]' -o column.pt",
    "ckptctl extract step-2000 'model.layers.0.*' -o layer.safetensors",
    "ckptctl extract out-hf layers.0.attention.wq.weight --layout meta -o wq.safetensors",
    prints="ckptctl.verbs.extraction.extract:Extraction",
)
def extract(
    path: Checkpoint,
    tensor: Annotated[
        str,
        Argument(
            "Name or glob of tensors. A slice such as [0:128] or [:, 5] may follow.",
            metavar="TENSOR",
            offers=list_tensor_names,
        ),
    ],
    options: ExtractOptions,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Extract tensors or slices of tensors from a checkpoint.

    Only the extracted bytes are read. Without --output, no file is written, and the shape, dtype
    and corner values are shown.
    """
    from ckptctl.verbs.extraction.extract import MAX_SHOWN
    from ckptctl.verbs.extraction.extract import extract_tensors as op

    output = Printer(json, quiet)
    found = op(path, tensor, options)
    for note in found.notes:
        output.note(note)
    warn_out_of_range(output, found.out_of_range)
    output.answer(
        "extract",
        found,
        names=[found.output] if found.output else [one.name for one in found.tensors],
        rows=_rows(found),
        human=lambda: _show(output, found),
    )
    if not found.output and any(one.preview is None for one in found.tensors):
        output.note(
            f"values are only shown for up to {MAX_SHOWN} tensors; {len(found.tensors):,} match"
        )


def _rows(found: Extraction) -> Iterator[Row]:
    for one in found.tensors:
        yield "tensor", *_facts(one), one.nbytes
        yield from ((line,) for line in (one.preview or "").splitlines())
    if found.output:
        yield "output", found.output
        yield "bytes", found.nbytes


def _show(output: Printer, found: Extraction) -> None:
    if found.output:
        size = format_bytes(found.nbytes)
        count = pluralize(len(found.tensors), "tensor")
        output.line(f"wrote {found.output}: {count}, {size}", "bold")
        output.first_rows(
            found.tensors,
            lambda one: (f"  {one.name}", *_facts(one)[1:]),
            (tables.name(), *tables.titled("", "")),
        )
        return
    for one in found.tensors:
        name, dtype, shape = _facts(one)
        output.line(f"{name}  {dtype}  {shape}", "bold")
        for line in (one.preview or "").splitlines():
            output.line(line)
    output.hint("use `-o FILE` to write them to a file")


def _facts(one: ExtractedTensor) -> tuple[str, str, str]:
    cut = "" if one.shape == one.whole else f" of {list(one.whole)}"
    return one.name, one.dtype, f"{list(one.shape)}{cut}"
