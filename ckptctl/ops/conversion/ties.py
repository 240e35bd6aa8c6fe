"""Tensors that share memory: whether they go on doing so, are written in full, or one is left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptctl.catalog import Catalog
from ckptctl.errors import listed
from ckptctl.formats.base import OutputTensor, WritableFormat
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.recognition.recognise import Recognition
from ckptctl.planner.configs.stated import tying
from ckptctl.planner.mapping.mapped import MappedTensor


def written_in_full(options: ConversionOptions, catalog: Catalog, known: Recognition) -> bool:
    """Return whether tied tensors are written in full; `copy` is content if none are tied."""
    shared = any(entry.alias_of for entry in catalog.tensors.values())
    family = known.exact and known.model_type is not None
    return options.untie or (options.tied == "copy" and (shared or family))


def kept(
    options: ConversionOptions,
    target: WritableFormat,
    known: Recognition,
    catalog: Catalog,
    mapped: Sequence[MappedTensor],
) -> tuple[bool, list[str]]:
    """Return whether tensors that share memory go on doing so, and notes on that.

    A reader of `hf` would miss one of them, unless the configuration says that they are tied.
    """
    if options.untie or options.tied == "copy":
        return False, []
    if options.tied == "drop" or target.nested or tying(known.config):
        return True, []
    names = [m.targets[0].key for m in mapped if catalog.tensors[m.sources[0].key].alias_of]
    note = f"shared tensors are written out in full: {listed(names)}"
    return False, [note] if names else []


def dropped(tensors: Iterable[OutputTensor]) -> dict[str, str]:
    """Return the names of all but one of the tensors that share memory, and why they go."""
    return {
        tensor.name: f"it shares its memory with `{tensor.alias_of}`, which is written"
        for tensor in tensors
        if tensor.alias_of
    }
