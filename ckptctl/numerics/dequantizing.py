"""Quantized tensors of a source: dequantize them (``--dequantize``), or keep their scales.

Dequantized tensors are computed as they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckptctl.catalog import Catalog
from ckptctl.conversion.assets import CONFIG, Assets, find_assets_folder
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.laying_out import Divide, build_division
from ckptctl.errors import (
    DamagedError,
    MappingError,
    RefusedError,
    UnsupportedError,
    UsageError,
    quote_names,
    spell_option,
)
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.sidecar_files import QUANTIZATION, beside, documents
from ckptctl.numerics.quantization.schemes.fp8 import FP8
from ckptctl.numerics.quantization.statement import QuantizationStatement, without
from ckptctl.numerics.quantization.survey import Survey
from ckptctl.numerics.quantized import (
    dequantized,
    glanced,
    is_plain,
    orphans,
    quantized,
    statement_of,
    statements_in,
    understood,
    weights,
)
from ckptctl.planner.model_parallel import RankShard
from ckptctl.tree import TreePath
from ckptctl.units import pluralize


def dequantize(draft: Draft) -> Draft:
    """Dequantize the source if requested, also before ``--fill-from`` if it is quantized."""
    options, catalog = draft.options, draft.catalog
    draft = replace(draft, assets=describe_plain(draft.assets))
    if options.dequantize is None or (options.fill_from and not quantized(catalog)):
        return draft
    stated = quantization_in(options.assets)
    return draft.with_catalog(dequantized(catalog, options.dequantize, stated))


def quantization_in(directory: str | TreePath | None) -> list[QuantizationStatement]:
    """Return the quantization statements of ``--assets``, or none without that option."""
    if directory is None:
        return []
    root = find_assets_folder(directory)
    names = beside(root, documented=False).assets
    return list(statements_in(root, documents(root).get(CONFIG, {}), names))


def describe_plain(assets: Assets) -> Assets:
    """Return *assets* without any statement of quantization."""
    described = tuple(replace(one, content=without(one.content)) for one in assets.described)
    config = assets.documents.get(CONFIG, {})
    sizes = {name: size for name, size in assets.sizes.items() if name not in QUANTIZATION}
    if without(config) == config:
        return replace(assets, sizes=sizes, described=described)
    documents = {**assets.documents, CONFIG: without(config)}
    changed = assets.changed | {CONFIG}
    return replace(assets, sizes=sizes, documents=documents, changed=changed, described=described)


# ------------------------------------------------------------------------- weights and scales


def keep_scales(draft: Draft) -> Draft:
    """Raise if the conversion would separate quantized weights from their scales."""
    names = {draft.model.root + name for name in draft.selection.tensors}
    renamed = not draft.change.keeps_names
    keep_together(draft.catalog, names, renamed=renamed, dtype=draft.options.dtype)
    return draft


def keep_together(
    catalog: Catalog, chosen: Collection[str], *, renamed: bool, dtype: str | None
) -> None:
    """Raise if a conversion would separate quantized weights from their scales.

    A complete copy under the same names is not checked, because it loses nothing.
    """
    if not renamed and dtype is None and catalog.tensors.keys() <= set(chosen):
        return
    if is_plain(catalog):
        return
    seen = glanced(catalog)
    for error in seen.unfit.values():
        if isinstance(error, DamagedError | UnsupportedError):
            raise error
    found = [weight for weight in seen.weights if weight.lead in chosen]
    alone = [weight.lead for weight in found if not set(weight.names) <= set(chosen)]
    if alone:
        raise MappingError(
            f"{pluralize(len(alone), 'quantized tensor')} would be written without scales",
            where=f"tensor `{alone[0]}`",
            why=f"their scales are not selected: {quote_names(alone)}",
            hint=f"select both ({spell_option('--include')}, {spell_option('--exclude')}), or pass "
            f"{spell_option('--dequantize bf16')} to dequantize them",
        )
    if dtype is not None:
        require_uncast(catalog, chosen, seen)
    if understood(seen, statement_of(catalog).method):
        kept = {name: entry for name, entry in catalog.tensors.items() if name in chosen}
        orphans(replace(catalog, tensors=kept))


def require_uncast(catalog: Catalog, chosen: Collection[str], seen: Survey | None = None) -> None:
    """Raise if quantized weights are among *chosen* tensors that are to be cast."""
    names = {name for name in chosen if catalog.tensors[name].dtype == FP8}
    found = (seen or glanced(catalog)).weights if names else []
    cast = [weight.lead for weight in found if not names.isdisjoint(weight.names)]
    if cast:
        raise UsageError(
            f"{spell_option('--dtype')} cannot cast quantized tensors ({len(cast):,} found): "
            "their scales would be ignored",
            where=f"tensor `{cast[0]}`",
            why=f"scales are stored in separate tensors; quantized tensors: {quote_names(cast)}",
            hint=f"pass {spell_option('--dequantize bf16')} to dequantize them",
        )


# ------------------------------------------------------------------------------------- blocks

Block = tuple[int, int]


def keep_blocks(draft: Draft) -> Draft:
    """Raise if ranks would get parts of a block of a float8 weight."""
    ranks = draft.ranks
    divide = build_division(draft.change, draft.target.layout) if ranks > 1 else None
    if divide is None:
        return draft
    documents = {**draft.located.documents, **draft.assets.documents}
    by_name = {tensor.name: tensor for tensor in draft.tensors}
    targets = {key: name for name, composed in draft.mapped.items() for key in composed.keys}
    blocks = {
        tensor: weight.scale_blocks
        for weight in weights(replace(draft.located, documents=documents))
        if weight.scale_blocks and (tensor := by_name.get(targets.get(weight.lead, "")))
    }
    cut = {
        tensor: block
        for tensor, block in blocks.items()
        if _cut(divide(tensor, ranks), tensor.shape, block)
    }
    if not cut:
        return draft
    first, block = next(iter(cut.items()))
    fits = next(count for count in range(ranks - 1, 0, -1) if _fit(cut, divide, count))
    raise RefusedError(
        f"{pluralize(ranks, 'rank')} would split float8 weights inside blocks of "
        f"{block[0]}x{block[1]}",
        where=f"tensor `{first.name}` {list(first.shape)}",
        why=f"{quote_names([tensor.name for tensor in cut])}: a block has one scale, so part of a "
        "block would be read with the scale of another rank",
        hint=f"pass {spell_option(f'--mp {fits}')} to keep blocks intact, or "
        f"{spell_option('--dequantize bf16')} to write unquantized weights",
    )


def _cut(shares: Sequence[RankShard | None], shape: tuple[int, ...], block: Block) -> bool:
    """Return whether a rank's shard begins or ends inside a block of a matrix of *shape*."""
    return any(
        offset % step or ((offset + size) % step and offset + size != whole)
        for share in shares
        if share is not None
        for piece in share.pieces
        for offset, size, whole, step in zip(
            piece.box.offsets[-2:], piece.box.sizes[-2:], shape[-2:], block, strict=True
        )
    )


def _fit(found: Mapping[OutputTensor, Block], divide: Divide, ranks: int) -> bool:
    try:
        return not any(
            _cut(divide(tensor, ranks), tensor.shape, block) for tensor, block in found.items()
        )
    except MappingError:
        return False
