"""Checks that the tensors of a checkpoint fit the state, and that no data is lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckptctl import dtypes
from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.conversion.proofs import find_lost_data, lost_part_error
from ckptctl.conversion.sources import locate_tensors
from ckptctl.errors import MappingError, quote_names
from ckptctl.numerics.quantized import find_quantized_tensors
from ckptctl.planner.boxes import check_coverage, intersect_boxes
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.save_load.loading.state_mapping import MemoryBox, RequestedTensor, StateMapping
from ckptctl.storage.computed import open_catalog_reader
from ckptctl.units import pluralize


def require_complete_tensors(tensors: Mapping[str, ComposedTensor]) -> None:
    """Raise unless the checkpoint has data for all elements of *tensors*."""
    incomplete = [name for name, composed in tensors.items() if not composed.is_covered]
    if incomplete:
        raise MappingError(
            f"{pluralize(len(incomplete), 'tensor')} would be filled only partly",
            where=quote_names(incomplete),
            why="the checkpoint does not contain the tensors for the rest",
        )


def require_boxes_covered(entry: TensorEntry, targets: Iterable[MemoryBox]) -> None:
    """Raise unless the extents of *entry* cover each element of the boxes in *targets* once."""
    for target in targets:
        clipped: list[Extent] = []
        for extent in entry.extents:
            part = (
                extent.box if extent.box == target.box else intersect_boxes(extent.box, target.box)
            )
            if part is not None:
                pairs = zip(part.offsets, target.box.offsets, strict=True)
                moved = Box(tuple(a - b for a, b in pairs), part.sizes)
                clipped.append(replace(extent, box=moved))
        check_coverage(replace(entry, shape=target.box.sizes, extents=tuple(clipped)))


def require_same_shapes(
    tensors: Mapping[str, ComposedTensor], requested: Mapping[str, RequestedTensor]
) -> None:
    """Raise unless the requested tensors have the same shapes as the mapped checkpoint tensors."""
    wrong = [
        n for n, tensor in requested.items() if n in tensors and tensors[n].shape != tensor.shape
    ]
    if wrong:
        name = wrong[0]
        raise MappingError(
            (
                f"{pluralize(len(wrong), 'tensor has', 'tensors have')} a different shape in the "
                "checkpoint"
            )
            if wrong[1:]
            else f"`{name}` has a different shape in the checkpoint",
            where=quote_names(wrong),
            why=f"`{name}` has shape {list(tensors[name].shape)} in the checkpoint, but "
            f"{list(requested[name].shape)} in the state",
        )


def find_casts(
    mapping: StateMapping, requested: Mapping[str, RequestedTensor], is_allowed: bool
) -> dict[str, tuple[str, str]]:
    """Map the name of each tensor to be cast to its dtypes in the checkpoint and in the state.

    Raises:
        MappingError: A cast is not allowed, or would ignore the scales of quantized weights.
    """
    entries = mapping.catalog.tensors
    changes: dict[str, tuple[str, str]] = {}
    read: dict[str, str] = {}
    for name, tensor in requested.items():
        composed = mapping.tensors.get(name)
        for sources in composed.logical.values() if composed else ():
            stored = list(dict.fromkeys(entries[source.key].dtype for source in sources))
            if len(stored) > 1:
                raise MappingError(
                    "tensors that are merged or split have different dtypes",
                    where=quote_names([*(source.key for source in sources), name]),
                    why=f"{' and '.join(stored)} in the checkpoint, {tensor.dtype} in the state",
                )
            if stored != [tensor.dtype]:
                changes[name] = stored[0], tensor.dtype
                read |= {source.key: name for source in sources}
    if changes:
        _require_castable(changes, is_allowed)
        _require_unquantized(mapping.catalog, read)
    return changes


def _require_castable(changes: Mapping[str, tuple[str, str]], allowed: bool) -> None:
    rejected = [
        name
        for name, kinds in changes.items()
        if not (allowed and all(dtypes.BY_NAME[kind].floating for kind in kinds))
    ]
    if rejected:
        name = rejected[0]
        before, after = changes[name]
        raise MappingError(
            (
                f"{pluralize(len(rejected), 'tensor has', 'tensors have')} a different dtype "
                "in the "
                "checkpoint"
            )
            if rejected[1:]
            else f"`{name}` has a different dtype in the checkpoint",
            where=quote_names(rejected),
            why=f"`{name}` is {before} in the checkpoint, but {after} in the state",
            hint=None if allowed else "pass `cast=True` to cast floating-point tensors",
        )


def _require_unquantized(catalog: Catalog, read: Mapping[str, str]) -> None:
    """Raise if a tensor to cast is quantized, because a cast would ignore its scales."""
    names = [name for name in find_quantized_tensors(catalog) if name in read]
    if names:
        raise MappingError(
            f"{pluralize(len(names), 'tensor is', 'tensors are')} quantized in the checkpoint",
            where=quote_names([read[name] for name in names]),
            why="a cast would ignore their scales",
            hint='pass `dequantize="bf16"` to dequantize them',
        )


def require_nothing_lost(mapping: StateMapping) -> None:
    """Raise if data that the mapping drops as redundant is not redundant.

    The dropped data is read and compared for this check.
    """
    names = dict.fromkeys(key for redundant in mapping.redundant for key in redundant.keys)
    catalog = locate_tensors(mapping.catalog, names)
    with open_catalog_reader(catalog) as files:
        for lost in find_lost_data(files, catalog, mapping.redundant):
            if lost.kind != "tensor":
                raise lost_part_error(catalog, lost)
            if lost.same_as is None:
                raise MappingError(
                    f"`{lost.part.key}` is not zero, but the state does not contain it",
                    where=catalog.path,
                    why="skipping it would change the model",
                )
            raise MappingError(
                f"`{lost.part.key}` and `{lost.same_as.key}` have different values",
                where=catalog.path,
                why="the state stores them as one tensor",
            )
