"""``--dequantize``: plain tensors in the place of quantized ones, computed as they are read."""

from __future__ import annotations

from dataclasses import replace

from ckptctl.ops.conversion.assets import describe_plain, quantization_in
from ckptctl.ops.conversion.draft import Draft
from ckptctl.ops.recognition.quantized import dequantized, quantized


def dequantize(draft: Draft) -> Draft:
    """Dequantize the source, where it or else the base of ``--fill-from`` has to be."""
    options, catalog = draft.options, draft.catalog
    draft = replace(draft, assets=describe_plain(draft.assets))
    if options.dequantize is None or (options.fill_from and not quantized(catalog)):
        return draft
    stated = quantization_in(options.assets)
    return draft.with_catalog(dequantized(catalog, options.dequantize, stated))
