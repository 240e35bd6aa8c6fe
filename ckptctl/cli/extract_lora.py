"""``ckptctl extract-lora BASE TUNED OUT``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from ckptctl.cli import tables
from ckptctl.cli.commands import Json, Quiet, command
from ckptctl.cli.output import Printer, Row, format_by_reason
from ckptctl.cli.progress import show_progress
from ckptctl.errors import quote_names
from ckptctl.option_checks import check_location, check_new_location
from ckptctl.options import Argument
from ckptctl.tree import TreePath
from ckptctl.units import format_bytes, format_seconds, pluralize
from ckptctl.verbs.lora_extraction.lora_options import LoraExtractionOptions

if TYPE_CHECKING:
    from ckptctl.verbs.lora_extraction.lora_result import LoraExtraction


@command(
    "ckptctl extract-lora llama-3-8b tuned adapter --rank 16",
    "ckptctl extract-lora llama-3-8b tuned adapter --energy 0.95 --dtype bf16",
    "ckptctl extract-lora base-dcp tuned-hf adapter --rank 64 --others save",
    prints="ckptctl.verbs.lora_extraction.lora_result:LoraExtraction",
)
def extract_lora(
    base: Annotated[
        TreePath, Argument("Checkpoint of the base model.", metavar="BASE", check=check_location)
    ],
    tuned: Annotated[
        TreePath,
        Argument("Checkpoint of the fine-tuned model.", metavar="TUNED", check=check_location),
    ],
    out: Annotated[
        TreePath,
        Argument("Destination folder of the adapter.", metavar="OUT", check=check_new_location),
    ],
    options: LoraExtractionOptions,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Create a LoRA adapter from a base and a tuned model.

    The change of each linear layer is decomposed by SVD, one layer at a time. The approximation
    error of each layer is reported. BASE and TUNED may have different formats and layouts.
    """
    from ckptctl.verbs.lora_extraction.extract_lora import LoraExtractor

    output = Printer(json, quiet)
    extraction = LoraExtractor(base, tuned, out, options)
    output.print_statement(extraction.statement)
    nbytes = extraction.nbytes
    with show_progress(output, "comparing", nbytes, "syncing", lambda: "loading torch") as advance:
        result = extraction.run(advance or (lambda _: None))
    for note in result.notes:
        output.print_note(note)
    for line in format_by_reason("skipped", result.left_out):
        output.print_note(line)
    output.print_answer(
        "extract-lora",
        result,
        names=(out,),
        rows=_list_rows(result),
        human=lambda: _show_result(output, result, out),
    )


def _list_rows(result: LoraExtraction) -> Iterator[Row]:
    yield "output", result.output
    yield "bytes", result.nbytes
    yield "unchanged", result.unchanged
    for layer in result.layers:
        yield "layer", layer.name, layer.rank, f"{layer.error:.3g}", f"{layer.change:.3g}"
    yield from (("saved", name) for name in result.saved)
    yield from (("left_out", name, why) for name, why in result.left_out.items())


def _show_result(output: Printer, result: LoraExtraction, out: TreePath) -> None:
    layers = sorted(result.layers, key=lambda layer: -layer.error)
    output.print_line(
        f"wrote {out}: {pluralize(len(layers), 'layer')}, {format_bytes(result.nbytes)} in "
        f"{format_seconds(result.seconds)}"
        + (f"; {pluralize(result.unchanged, 'tensor')} unchanged" if result.unchanged else ""),
        "bold",
    )
    if result.saved:
        count = pluralize(len(result.saved), "tensor")
        output.print_sentence(
            f"{count} stored in full: {quote_names(result.saved, tables.MAX_SHOWN_ROWS)}"
        )
    titles = ("rank", "error", "change")
    output.print_first_rows(
        layers,
        lambda adapted_layer: (
            f"  {adapted_layer.name}",
            adapted_layer.rank,
            f"{adapted_layer.error:.2g}",
            f"{adapted_layer.change:.2g}",
        ),
        (tables.name_column("  largest errors first"), *map(tables.number_column, titles)),
    )
