"""Quantised elements are nothing without their scales: what would part the two is refused."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ckptctl.catalog import Catalog
from ckptctl.errors import MappingError, UsageError, listed
from ckptctl.ops.recognition.quantised import FP8, QUANTIZATION, Pair, orphans, pairs

HINT = "--dequantize bf16 writes the plain tensors that they stand for"


def keep_together(
    catalog: Catalog, chosen: Collection[str], *, renamed: bool, dtype: str | None
) -> None:
    """Refuse a conversion after which quantised elements have lost their scales.

    A copy of everything under the same names is not looked at: it loses nothing.

    Args:
        catalog: The source.
        chosen: The tensors that are converted.
        renamed: Whether they get another layout.
        dtype: What floats are cast to; None: nothing is cast.

    Raises:
        UsageError: A cast would turn quantised elements into numbers that they are not.
        MappingError: Scales are left out.
        DamagedError: Tensors that are said to be quantised have no scales, or others do not fit.
    """
    if not renamed and dtype is None and catalog.tensors.keys() <= set(chosen):
        return
    found = [pair for pair in pairs(catalog) if pair.weight in chosen]
    alone = [pair.weight for pair in found if pair.scale not in chosen]
    if alone:
        raise MappingError(
            f"{len(alone):,} quantised tensors would be written without their scales",
            where=f"tensor `{alone[0]}`",
            why=f"their scales are not chosen: {listed(alone)}",
            hint=f"choose both (--include, --exclude); {HINT}",
        )
    if dtype is not None:
        _require_uncast(catalog, found)
    if found or _said(catalog):
        kept = {name: entry for name, entry in catalog.tensors.items() if name in chosen}
        orphans(replace(catalog, tensors=kept))


def _require_uncast(catalog: Catalog, found: Collection[Pair]) -> None:
    cast = [pair.weight for pair in found if catalog.tensors[pair.weight].dtype == FP8]
    if cast:
        raise UsageError(
            f"`--dtype` would cast {len(cast):,} quantised tensors without regard to their scales",
            where=f"tensor `{cast[0]}`",
            why=f"its scales are another tensor; among them {listed(cast)}",
            hint=HINT,
        )


def _said(catalog: Catalog) -> bool:
    """Whether config.json says that the checkpoint holds float8 with scales."""
    stated = catalog.documents.get("config.json", {}).get(QUANTIZATION)
    return isinstance(stated, dict) and stated.get("quant_method") == "fp8"
