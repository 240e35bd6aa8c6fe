"""Does a checkpoint hold all of its model: what its index covers against its family's table."""

from __future__ import annotations

from collections.abc import Iterator

from ckptctl.catalog import Catalog, Finding
from ckptctl.errors import MappingError
from ckptctl.ops.recognition.lacking import lacks
from ckptctl.ops.recognition.recognise import recognise
from ckptctl.ops.recognition.roots import unwrapped
from ckptctl.ops.recognition.selection import select


def lacking(catalog: Catalog, model_type: str | None = None) -> Iterator[Finding]:
    """Yield the tensors that the model lacks.

    Args:
        catalog: A checkpoint whose index is whole.
        model_type: Its family, where the user named it.
    """
    catalog = unwrapped(catalog)
    try:
        known = recognise(catalog, model_type)
        found = lacks(known, select(catalog, known.root).tensors)
    except MappingError:  # several models, or a configuration of another one: not one to compare
        return
    for name, why in found.missing.items():
        yield Finding("the model lacks a tensor", why, "unknown", tensor=name)
    for doubt in found.doubts:
        yield Finding("it may be a part of a model", doubt, "warning")
