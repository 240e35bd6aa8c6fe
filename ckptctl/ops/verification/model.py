"""Does a checkpoint hold all of its model: what its index covers against its family's table."""

from __future__ import annotations

from collections.abc import Iterator

from ckptctl.catalog import Catalog, Finding
from ckptctl.errors import MappingError
from ckptctl.ops.recognition.lacking import described
from ckptctl.ops.recognition.recognise import recognise
from ckptctl.ops.recognition.roots import unwrapped
from ckptctl.ops.recognition.selection import select


def lacking(catalog: Catalog, model_type: str | None = None) -> Iterator[Finding]:
    """Yield the tensors that the model lacks, and those that its configuration does not count.

    Args:
        catalog: A checkpoint whose index is whole.
        model_type: Its family, where the user named it.
    """
    catalog = unwrapped(catalog)
    try:
        known = recognise(catalog, model_type)
    except MappingError:  # several models: there is none to compare
        return
    found = described(known, select(catalog, known.root).tensors)
    for name, why in found.missing.items():
        yield Finding("the model lacks a tensor", why, "unknown", tensor=name)
    if found.surplus:
        yield Finding("the configuration and the tensors disagree", found.surplus, "unknown")
    for doubt in found.doubts:
        yield Finding("what the model lacks is not known", doubt, "warning")
