"""``--dequantize``: plain tensors in the place of quantized ones, computed as they are read."""

from __future__ import annotations

from dataclasses import replace

from ckptctl.formats.sidecar_files import QUANTIZATION
from ckptctl.ops.conversion.assets import CONFIG, Assets, quantization_in
from ckptctl.ops.conversion.draft import Draft
from ckptctl.ops.recognition.quantized import dequantized, quantized
from ckptctl.planner.quantization.statement import without


def dequantize(draft: Draft) -> Draft:
    """Dequantize the source, where it or else the base of ``--fill-from`` has to be."""
    options, catalog = draft.options, draft.catalog
    draft = replace(draft, assets=describe_plain(draft.assets))
    if options.dequantize is None or (options.fill_from and not quantized(catalog)):
        return draft
    stated = quantization_in(options.assets)
    return draft.with_catalog(dequantized(catalog, options.dequantize, stated))


def describe_plain(assets: Assets) -> Assets:
    """Return *assets* as they hold once nothing is quantized any more."""
    described = tuple(replace(one, content=without(one.content)) for one in assets.described)
    config = assets.documents.get(CONFIG, {})
    sizes = {name: size for name, size in assets.sizes.items() if name not in QUANTIZATION}
    if without(config) == config:
        return replace(assets, sizes=sizes, described=described)
    documents = {**assets.documents, CONFIG: without(config)}
    changed = assets.changed | {CONFIG}
    return replace(assets, sizes=sizes, documents=documents, changed=changed, described=described)
