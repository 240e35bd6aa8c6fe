"""A checkpoint under the names of another layout, of which nothing is copied for that."""

from __future__ import annotations

from dataclasses import replace

from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.errors import MappingError, listed, spell_option
from ckptctl.ops.conversion.borrowing import Lender, by_target
from ckptctl.ops.conversion.contents import in_checkpoint
from ckptctl.ops.conversion.leaves import container
from ckptctl.ops.recognition.layout_change import with_sums
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
    lender = Lender(with_sums(catalog, mapped), "own")
    entries: dict[str, TensorEntry] = {}
    origins: dict[str, str] = {}
    for key, some in by_target(mapped).items():
        entry = catalog.tensors[some[0].sources[0].key]
        head, prefix = container(entry.path, root)
        path = (*head, key.removeprefix(prefix))
        if len(some) == 1 and some[0].renames and some[0].axes == entry.shape:
            entries[key] = replace(entry, name=key, path=path, alias_of=None)
            origins[key] = entry.name
        else:
            entries[key] = lender.entry(key, path, key, some)
    gone = {view.key for one in mapped for view in one.sources}
    rest = {name: one for name, one in catalog.tensors.items() if name not in gone}
    computed = {**catalog.computed, **lender.computed}
    return replace(catalog, tensors={**entries, **rest}, computed=computed), origins
