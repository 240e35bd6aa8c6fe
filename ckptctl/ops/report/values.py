"""Statistics of the tensors of a report; what cannot be read becomes a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.catalog import Catalog, Finding
from ckptctl.ops.inspection.measuring import measured
from ckptctl.ops.verification.items import resolved
from ckptctl.ops.verification.result import of_error
from ckptctl.ops.verification.structure import root_of
from ckptctl.ops.watch import Watch
from ckptctl.storage.paths import path_at

if TYPE_CHECKING:
    from ckptctl.storage.statistics import Statistics

BINS = 40


def values(
    catalog: Catalog, names: Sequence[str], progress: Watch
) -> tuple[Mapping[str, Statistics], list[Finding]]:
    """Return the statistics of the tensors called *names*, and what is wrong with their bytes.

    Args:
        catalog: The checkpoint; it need not be whole.
        names: Tensors; those that share the memory of others are measured as these.
        progress: Called with the bytes that are going to be read.
    """
    from ckptctl.storage.computed import open_reader

    entries = catalog.tensors
    chosen = dict.fromkeys(entries[name].alias_of or name for name in names)
    readable = (name for name in chosen if name in entries and not entries[name].unsupported)
    wanted = {name: entries[name] for name in readable}
    known, wrong = resolved(replace(catalog, tensors=wanted, blobs={}, replicas={}))
    root = root_of(path_at(catalog.path))
    with open_reader(known) as reader:
        found = measured(
            reader,
            known.tensors.values(),
            progress,
            BINS,
            lambda error, entry: wrong.append(of_error(error, root, entry.name)),
        )
    return found, wrong
