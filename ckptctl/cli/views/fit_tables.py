"""Display of ``inspect --fit``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptctl.cli import listing, tables
from ckptctl.cli.tables import Column, StyledText
from ckptctl.units import format_bytes, pluralize

if TYPE_CHECKING:
    from ckptctl.cli.output import Printer, Row
    from ckptctl.verbs.inspection.inspect_result import Fit

STAGE_COLUMNS = (
    Column("stage"),
    tables.number_column("layers"),
    tables.number_column("weights per GPU"),
    tables.number_column("cache per token"),
    tables.number_column("per request"),
    tables.number_column("free"),
)
CACHE_COLUMNS = (
    tables.prose_column("cache of one request"),
    tables.number_column("layers"),
    tables.number_column("window", drop=1),
    tables.number_column("per token"),
    tables.number_column("state", drop=2),
    tables.number_column("total"),
)
EXCLUDED = "activations, CUDA graphs and the program itself need further memory"


def show_fit(output: Printer, fit: Fit) -> None:
    """Print the memory of each GPU, the cache by kind of layer, and what fits."""
    if output.mode == "plain":
        output.print_table(list(_list_rows(fit)), ())
        return
    gpus = f"{fit.gpus} x " if fit.gpus > 1 else ""
    sizes = {"tp": fit.tp, "pp": fit.pp, "ep": fit.ep, "dp": fit.dp}
    parallel = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    output.print_headline(
        f"memory on {gpus}{format_bytes(fit.memory)}",
        *filter(
            None, (parallel, fit.kv_dtype and f"KV cache in {listing.shorten_dtype(fit.kv_dtype)}")
        ),
    )
    output.print_table(
        [
            (
                str(number),
                _format_number(stage.layers),
                _format_size(output, stage.weights),
                _format_size(output, stage.token_bytes),
                _format_size(output, stage.request_bytes),
                _format_size(output, _compute_free(fit, stage.weights)),
            )
            for number, stage in enumerate(fit.stages)
        ],
        STAGE_COLUMNS,
    )
    if fit.cache:
        output.print_line()
        output.print_table(
            [
                (
                    use.kind,
                    _format_number(use.layers),
                    _format_number(use.window),
                    _format_size(output, use.token_bytes),
                    _format_size(output, use.state_bytes),
                    _format_size(output, use.nbytes),
                )
                for use in fit.cache
            ],
            CACHE_COLUMNS,
        )
    output.print_line()
    output.print_sentence(_format_outcome(fit), "bold")
    for reason in fit.unknown:
        output.print_sentence(f"  unknown: {reason}", "dim")
    output.print_sentence(f"  {EXCLUDED}", "dim")


def _format_outcome(fit: Fit) -> str:
    if fit.fits is None:
        return "unknown whether it fits"
    tokens = f" of {pluralize(fit.context, 'token')}" if fit.context else ""
    if fit.fits:
        longest = f", or one of {fit.max_context:,}" if fit.max_context else ""
        return f"fits, with {pluralize(fit.requests or 0, 'request')}{tokens}{longest}"
    largest = max((stage.weights or 0) for stage in fit.stages)
    if largest > fit.memory:
        return f"does not fit: weights need {format_bytes(largest)} per GPU"
    longest = f", but for one of {fit.max_context:,}" if fit.max_context else ""
    return f"does not fit: no room for a request{tokens}{longest}"


def _compute_free(fit: Fit, weights: int | None) -> int | None:
    return None if weights is None else max(0, fit.memory - weights)


def _format_number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _format_size(output: Printer, value: int | None) -> str | StyledText:
    return "-" if value is None else listing.format_size(output, value)


def _list_rows(fit: Fit) -> Iterator[Row]:
    yield "fits", {True: "yes", False: "no", None: "unknown"}[fit.fits]
    for name in ("gpus", "memory", "tp", "pp", "ep", "dp", "context", "kv_dtype", "weights"):
        yield name, _format_value(getattr(fit, name))
    for number, stage in enumerate(fit.stages):
        yield f"stage.{number}.weights", _format_value(stage.weights)
        yield f"stage.{number}.token_bytes", _format_value(stage.token_bytes)
        yield f"stage.{number}.request_bytes", _format_value(stage.request_bytes)
    for name in ("token_bytes", "request_bytes", "requests"):
        yield name, _format_value(getattr(fit, name))
    yield "max_context", "unlimited" if _has_no_limit(fit) else _format_value(fit.max_context)
    yield from (("unknown", reason) for reason in fit.unknown)


def _has_no_limit(fit: Fit) -> bool:
    """Return whether a request may have any number of tokens, because every layer has a window."""
    sizes = (size for stage in fit.stages for size in (stage.weights, stage.token_bytes))
    return fit.max_context is None and None not in sizes


def _format_value(value: object) -> str:
    return "unknown" if value is None else str(value)
