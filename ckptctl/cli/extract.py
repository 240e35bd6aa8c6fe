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
    from ckptctl.verbs.extraction.extract import MAX_PREVIEWS
    from ckptctl.verbs.extraction.extract import extract_tensors as op

    output = Printer(json, quiet)
    result = op(path, tensor, options)
    for note in result.notes:
        output.print_note(note)
    warn_out_of_range(output, result.out_of_range)
    output.print_answer(
        "extract",
        result,
        names=[result.output]
        if result.output
        else [extracted.name for extracted in result.tensors],
        rows=_list_rows(result),
        human=lambda: _show_result(output, result),
    )
    if not result.output and any(extracted.preview is None for extracted in result.tensors):
        output.print_note(
            f"values are only shown for up to {MAX_PREVIEWS} tensors; {len(result.tensors):,} match"
        )


def _list_rows(result: Extraction) -> Iterator[Row]:
    for extracted in result.tensors:
        yield "tensor", *_format_facts(extracted), extracted.nbytes
        yield from ((line,) for line in (extracted.preview or "").splitlines())
    if result.output:
        yield "output", result.output
        yield "bytes", result.nbytes


def _show_result(output: Printer, result: Extraction) -> None:
    if result.output:
        size = format_bytes(result.nbytes)
        count = pluralize(len(result.tensors), "tensor")
        output.print_line(f"wrote {result.output}: {count}, {size}", "bold")
        output.print_first_rows(
            result.tensors,
            lambda extracted: (f"  {extracted.name}", *_format_facts(extracted)[1:]),
            (tables.name_column(), *tables.titled_columns("", "")),
        )
        return
    for extracted in result.tensors:
        name, dtype, shape = _format_facts(extracted)
        output.print_line(f"{name}  {dtype}  {shape}", "bold")
        for line in (extracted.preview or "").splitlines():
            output.print_line(line)
    output.print_hint("use `-o FILE` to write them to a file")


def _format_facts(extracted: ExtractedTensor) -> tuple[str, str, str]:
    full_shape = "" if extracted.shape == extracted.whole else f" of {list(extracted.whole)}"
    return extracted.name, extracted.dtype, f"{list(extracted.shape)}{full_shape}"
