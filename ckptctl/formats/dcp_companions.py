"""Files that trainers put beside a DCP directory's own: what is not in the sharded state dict.

Lightning's FSDP strategies write ``meta.pt`` (``lightning/fabric/strategies/fsdp.py``), whose keys
lie at the top of the checkpoint that ``consolidate_checkpoint`` makes. Megatron writes
``common.pt`` and, after everything else, ``metadata.json``
(``megatron/core/dist_checkpointing/serialization.py``).
"""

from __future__ import annotations

from dataclasses import replace

from ckptctl.catalog import Catalog
from ckptctl.errors import DamagedError, UnsafePickleError
from ckptctl.formats.torch_file import read_contents
from ckptctl.storage.files import SourceFiles

COMPANIONS = ("meta.pt", "common.pt")
MEGATRON, FINISHED = "common.pt", "metadata.json"


def with_companions(files: SourceFiles, catalog: Catalog) -> Catalog:
    """Return *catalog* with the leaves of its companions.

    One that holds objects of a trainer's own classes is left out, with a note.

    Raises:
        DamagedError: A companion is damaged or has a name twice, or Megatron's save was cut off.
    """
    if (files.root / MEGATRON).is_file() and not (files.root / FINISHED).is_file():
        raise DamagedError(
            "the save was interrupted",
            where=str(files.root),
            why=f"Megatron writes {FINISHED} last, and it is missing",
            hint="use the save before it",
        )
    if (files.root / MEGATRON).is_file():
        own = {name: size for name, size in catalog.assets.items() if name != FINISHED}
        catalog = replace(catalog, assets=own)
    for name in COMPANIONS:
        if (files.root / name).is_file():
            catalog = _with(files, catalog, name)
    return catalog


def _with(files: SourceFiles, catalog: Catalog, name: str) -> Catalog:
    try:
        found = read_contents(files, name)
    except UnsafePickleError as error:
        return replace(catalog, notes=(*catalog.notes, f"`{name}` is left out: {error.what}"))
    known = catalog.tensors.keys() | catalog.blobs.keys()
    twice = next((key for key in (*found.tensors, *found.blobs) if key in known), None)
    if twice is not None:
        raise DamagedError(
            f"`{twice}` is in `{name}` and in the checkpoint itself",
            where=str(files.root / name),
            hint="the file belongs to another save",
        )
    return replace(
        catalog,
        files={**catalog.files, name: files.size(name)},
        tensors={**catalog.tensors, **found.tensors},
        blobs={**catalog.blobs, **found.blobs},
    )
