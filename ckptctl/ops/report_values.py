"""Statistics of the tensors of a report, read in pieces; what cannot be read becomes a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ckptctl.catalog import Catalog, Finding, TensorEntry
from ckptctl.errors import CkptError
from ckptctl.ops.verification import of_error
from ckptctl.ops.verify_items import resolved
from ckptctl.ops.verify_structure import root_of
from ckptctl.ops.watch import Watch
from ckptctl.storage.remote_path import path_at

if TYPE_CHECKING:
    from ckptctl.storage.files import SourceFiles
    from ckptctl.storage.statistics import Statistics

BINS = 40


def measured(
    catalog: Catalog, names: Sequence[str], progress: Watch
) -> tuple[Mapping[str, Statistics], list[Finding]]:
    """Return the statistics of the tensors called *names*, and what is wrong with their bytes.

    A tensor with holes is measured as far as it is there. torch is imported here.

    Args:
        catalog: The checkpoint; it need not be whole.
        names: Tensors; those that share the memory of others are measured as these.
        progress: Called with the bytes that are going to be read.
    """
    from ckptctl.storage.computed import open_reader
    from ckptctl.storage.statistics import measure

    entries = catalog.tensors
    chosen = dict.fromkeys(entries[name].alias_of or name for name in names)
    wanted = {name: entries[name] for name in chosen if name in entries}
    known, wrong = resolved(replace(catalog, tensors=wanted, blobs={}, replicas={}))
    found: dict[str, Statistics] = {}
    total = sum(map(_stored, known.tensors.values()))
    with open_reader(known) as reader, progress(total) as advance:
        files = cast("SourceFiles", reader)
        for entry in known.tensors.values():
            try:
                statistics = measure(files, entry, bins=BINS)
            except CkptError as error:
                wrong.append(of_error(error, root_of(path_at(catalog.path)), entry.name))
            else:
                found |= {entry.name: statistics} if statistics else {}
            if advance:
                advance(_stored(entry))
    return found, wrong


def _stored(entry: TensorEntry) -> int:
    return sum(extent.nbytes for extent in entry.extents)
