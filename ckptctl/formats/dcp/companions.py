"""Files that trainers put beside a DCP directory's own: what is not in the sharded state dict.

Lightning's FSDP strategies write ``meta.pt`` (``lightning/fabric/strategies/fsdp.py``), whose keys
lie at the top of the checkpoint that ``consolidate_checkpoint`` makes. Megatron writes
``common.pt`` and, after everything else, ``metadata.json``
(``megatron/core/dist_checkpointing/serialization.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ckptctl.catalog import Catalog
from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.formats.shared.findings import UNUSABLE, of_error
from ckptctl.formats.shared.leaves import unknown_notes
from ckptctl.formats.torch_file import read_contents
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.paths import is_there

COMPANIONS = ("meta.pt", "common.pt")
MEGATRON, FINISHED = "common.pt", "metadata.json"
MAX_FINISHED = 1 << 16


def with_companions(files: SourceFiles, catalog: Catalog, *, partial: bool = False) -> Catalog:
    """Return *catalog* with the leaves of its companions.

    Objects of a trainer's own classes become inert records, which can be read and not written.
    """
    catalog = _of_megatron(files, catalog, partial)
    for name in COMPANIONS:
        if is_there(files.root / name):
            catalog = _with(files, catalog, name, partial)
    return catalog


def _of_megatron(files: SourceFiles, catalog: Catalog, partial: bool) -> Catalog:
    """Return *catalog* after a look at the two files that Megatron writes beside the shards."""
    catalog = replace(catalog, others=_without(catalog, COMPANIONS))
    common, finished = (is_there(files.root / name) for name in (MEGATRON, FINISHED))
    if common and not finished:
        raise DamagedError(
            f"the save was interrupted: `{FINISHED}` is missing",
            where=str(files.root),
            why="Megatron writes it last",
            hint="use the save before it",
        )
    if common:
        return replace(catalog, others=_without(catalog, (FINISHED,)))
    if not finished or not _names_common(files):
        return catalog
    why = f"{FINISHED} says that Megatron wrote one"
    error = DamagedError(f"`{MEGATRON}` is missing", where=str(files.root), why=why)
    if not partial:
        raise error
    finding = of_error(error, files.root, file=MEGATRON)
    return replace(catalog, findings=(*catalog.findings, finding))


def _without(catalog: Catalog, names: Collection[str]) -> dict[str, str]:
    return {name: why for name, why in catalog.others.items() if name not in names}


def _names_common(files: SourceFiles) -> bool:
    try:
        said = read_json(files, FINISHED, MAX_FINISHED)
    except DamagedError:
        return False
    return isinstance(said, dict) and said.get("common_backend") == "torch"


def _with(files: SourceFiles, catalog: Catalog, name: str, partial: bool) -> Catalog:
    try:
        found = read_contents(files, name, unknown="inert")
    except UNUSABLE as error:
        if not partial:
            raise
        finding = of_error(error, files.root, file=name)
        return replace(catalog, findings=(*catalog.findings, finding))
    known = catalog.tensors.keys() | catalog.blobs.keys()
    twice = next((key for key in (*found.tensors, *found.blobs) if key in known), None)
    if twice is not None:
        raise UnsupportedError(
            f"`{twice}` is in `{name}` and in the checkpoint itself",
            where=str(files.root / name),
            hint="the file belongs to another save",
        )
    return replace(
        catalog,
        files={**catalog.files, name: files.size(name)},
        tensors={**catalog.tensors, **found.tensors},
        blobs={**catalog.blobs, **found.blobs},
        notes=(*catalog.notes, *unknown_notes(found.blobs.values())),
    )
