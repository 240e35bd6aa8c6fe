"""A checkpoint under the names of another layout, of which nothing is copied for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptctl.catalog import Catalog, Computed, TensorEntry, computed_name, is_computed
from ckptctl.columns import files_of
from ckptctl.errors import MappingError, listed, spell_option
from ckptctl.ops.conversion.contents import in_checkpoint
from ckptctl.ops.conversion.leaves import container
from ckptctl.ops.recognition.layout_change import with_sums
from ckptctl.ops.sources import located
from ckptctl.planner.copying.blocks import rearranged
from ckptctl.planner.mapping.mapped import MappedTensor
from ckptctl.planner.mapping.strided_views import as_strided, by_target
from ckptctl.planner.mapping.tensors import Change


def renamed(catalog: Catalog, change: Change, root: str) -> tuple[Catalog, dict[str, str]]:
    """Return *catalog* with its model called as *change* calls it; nothing is copied for that.

    Returns:
        What tensors that are the same under another name were called, beside the catalog.

    Raises:
        MappingError: The change leaves out or makes tensors, which has to be proven.
    """
    if change.must_be_zero or change.must_equal or change.zeros or change.dropped:
        raise MappingError(
            f"cannot rename the source for {spell_option('--fill-from')} without dropping or "
            "adding tensors",
            where=catalog.path,
            why=f"converting {change.source_layout} to {change.target_layout} drops or adds "
            f"{listed([*change.dropped, *change.must_be_zero, *(z.key for z in change.zeros)], 2)}",
            hint=f"convert the source with {spell_option(f'--to-layout {change.target_layout}')} "
            "first",
        )
    mapped = list(in_checkpoint(change.tensors, root, root))
    parts, summed = by_target(mapped), with_sums(catalog, mapped)
    changed = {key: some for key, some in parts.items() if len(some) > 1 or not some[0].renames}
    files = in_layout(summed, changed)
    entries: dict[str, TensorEntry] = {}
    origins: dict[str, str] = {}
    computed = dict(summed.computed)
    for key, some in parts.items():
        entry = catalog.tensors[some[0].sources[0].key]
        head, prefix = container(entry.path, root)
        path = (*head, key.removeprefix(prefix))
        if key in files:
            name = computed_name(f"{change.target_layout}/{key}")
            computed[name] = files[key]
            entries[key] = files[key].entry(key, path, name)
        else:
            entries[key] = replace(entry, name=key, path=path, alias_of=None)
            origins[key] = entry.name
    gone = {view.key for one in mapped for view in one.sources}
    rest = {name: one for name, one in catalog.tensors.items() if name not in gone}
    return replace(catalog, tensors={**entries, **rest}, computed=computed), origins


def in_layout(catalog: Catalog, parts: Mapping[str, Sequence[MappedTensor]]) -> dict[str, Computed]:
    """Return virtual files with tensors of another layout, by key.

    Args:
        catalog: The source.
        parts: What each tensor consists of.
    """
    names = dict.fromkeys(
        view.key for some in parts.values() for one in some for view in one.sources
    )
    entries = located(catalog, names).tensors
    return {
        key: rearranged(catalog.root, as_strided(some, key, entries)) for key, some in parts.items()
    }


def with_label(catalog: Catalog, label: str) -> Catalog:
    """Return *catalog* with a label in the names of its virtual files, so that no others have them.

    Args:
        catalog: No virtual file of it is a rearranged tensor.
        label: What the names begin with.
    """
    if not catalog.computed:
        return catalog

    def labeled(entry: TensorEntry) -> TensorEntry:
        if not any(map(is_computed, files_of(entry.extents))):
            return entry
        extents = (
            replace(one, file=computed_name(label + one.file)) if is_computed(one.file) else one
            for one in entry.extents
        )
        return replace(entry, extents=tuple(extents))

    computed = {
        computed_name(label + name): replace(
            made,
            inputs={r: replace(one, entry=labeled(one.entry)) for r, one in made.inputs.items()},
        )
        for name, made in catalog.computed.items()
    }
    tensors = {name: labeled(entry) for name, entry in catalog.tensors.items()}
    return replace(catalog, tensors=tensors, computed=computed)
