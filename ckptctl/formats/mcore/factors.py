"""Restore the row order of LoRA factors that Megatron-Bridge saves out of order.

Each tensor-parallel rank has rows ``[gate; up]`` of a gated layer's factor. Bridge saves the first
halves of all ranks, then the second halves. Bridge does the same with the separate factors of gate
and up that CanonicalLoRA has, so each rank's rows of such a factor are saved in two ranges. Such
factors are only loaded correctly with the same number of ranks; otherwise, ranks exchange rows.
Source: ``ParallelLinearAdapter.sharded_state_dict`` in ``megatron/bridge/peft/utils.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from ckptctl.catalog import Box, Catalog, TensorEntry
from ckptctl.errors import UnsupportedError
from ckptctl.facts.megatron import merge_records
from ckptctl.planner.config_facts import Json
from ckptctl.units import pluralize

_EXCHANGED = re.compile(r".*\.linear_fc1\.adapter\.adapter_(?:up|gate)\.linear_out\.weight")


def list_exchanged_factors(names: Collection[str]) -> list[str]:
    """Return the names of LoRA factors whose rows tensor-parallel ranks may exchange."""
    return [name for name in names if _EXCHANGED.fullmatch(name)]


def restore_row_order(catalog: Catalog, records: Mapping[str, Json]) -> Catalog:
    """Return a copy of *catalog* whose LoRA factors have their rows in the original order.

    Args:
        catalog: Catalog in which every layer is a separate tensor.
        records: Contents of the trainer's configuration files, by file name.
    """
    factors = list_exchanged_factors(catalog.tensors)
    ranks = merge_records(records.values()).get("tensor_model_parallel_size") if factors else None
    changed = {name: _restore_rows(catalog, catalog.tensors[name], ranks) for name in factors}
    return replace(catalog, tensors={**catalog.tensors, **changed}) if changed else catalog


def _restore_rows(catalog: Catalog, entry: TensorEntry, ranks: object) -> TensorEntry:
    pieces = {extent.box.sizes[0] for extent in entry.extents}
    count = entry.shape[0] // max(pieces, default=1)
    if count <= 2 or ranks in (1, count):
        return entry
    if len(pieces) > 1 or not isinstance(ranks, int) or count != 2 * ranks:
        reason = (
            f"the training run had {ranks} ranks" if ranks else "the world size is not recorded"
        )
        raise UnsupportedError(
            "the row order of an adapter is ambiguous",
            where=f"tensor `{entry.name}` of {catalog.path}",
            why=f"tensor-parallel ranks saved it in {pluralize(count, 'piece')}, and {reason}",
            hint="copy Megatron-Bridge's `run_config.yaml`, which records the world size, into "
            "the checkpoint",
        )
    (rows,) = pieces

    def move_box(box: Box) -> Box:
        half, rank = divmod(box.offsets[0] // rows, ranks)
        return replace(box, offsets=((2 * rank + half) * rows, *box.offsets[1:]))

    extents = (replace(extent, box=move_box(extent.box)) for extent in entry.extents)
    return replace(entry, extents=tuple(extents))
