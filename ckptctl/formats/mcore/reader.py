"""What a checkpoint of Megatron-Core holds: the DCP directory, spelled in one way, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckptctl.catalog import Blob, Catalog
from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.dcp.catalog import catalog_of, read_metadata, with_leaves
from ckptctl.formats.dcp.metadata import decode
from ckptctl.formats.mcore.factors import in_order
from ckptctl.formats.mcore.files import (
    COMMON,
    COMMON_STATE,
    MARK,
    METADATA,
    RUN_CONFIG,
    names_common,
    passed_over,
    require_finished,
    save_folder,
)
from ckptctl.formats.mcore.joining import canonical
from ckptctl.formats.mcore.objects import canonical_objects, object_name
from ckptctl.formats.mcore.records import records
from ckptctl.formats.peft import adapter_config
from ckptctl.formats.shared.findings import UNUSABLE, Faults
from ckptctl.formats.shared.leaves import require_harmless
from ckptctl.formats.sidecar_files import ADAPTER, documents
from ckptctl.formats.torch_file import Leaves, leaves_in, read_leaves
from ckptctl.planner.configs.facts import Json
from ckptctl.planner.configs.megatron_adapter import peft_words
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.paths import is_there
from ckptctl.storage.pickles.inert import Inert
from ckptctl.storage.zips.reader import KEEPING_TABLE, read_archive

ARGUMENTS = "args"
CONFIGURATION = "huggingface"
OWN = (COMMON, MARK, RUN_CONFIG, ADAPTER)


def read(path: Path, asked: ReadOptions, name: str) -> Catalog:
    """Return the catalog of the folder *path*; see :meth:`Format.read`."""
    folder = save_folder(path, asked.tag)
    with source_files(folder) as files:
        require_finished(files)
        faults = Faults(folder, asked.partial)
        leaves, origin = decode(read_metadata(files, METADATA), str(folder / METADATA))
        catalog = catalog_of(files, leaves, name, faults)
        inside = catalog.blobs.get(object_name(COMMON_STATE, (), ()))
        common = _common(files, faults) if inside is None else _common_state(files, inside, faults)
        place = COMMON if inside is None else COMMON_STATE
        require_harmless(common.blobs.values(), str(folder / place))
        arguments = told(common.blobs)
        catalog = canonical(catalog, faults, arguments)
        catalog = replace(catalog, documents={**_described(folder), **catalog.documents})
        others = {file: why for file, why in catalog.others.items() if file not in OWN}
        blobs = {n: blob for n, blob in catalog.blobs.items() if blob is not inside}
        catalog = replace(catalog, blobs=canonical_objects(blobs), others=others)
        catalog = replace(catalog, save_id=origin.save_id, world=origin.world)
        if inside is not None or is_there(folder / COMMON):
            file = COMMON if inside is None else inside.file or ""
            catalog = with_leaves(files, catalog, file, common)
        told_of = records(folder, {place: arguments}, faults)
        catalog = in_order(catalog, told_of)
    other = passed_over(path, folder)
    note = f"there are two models: this is the actor; name its folder `{other}` for the other one"
    return replace(
        catalog,
        records=told_of,
        documents={**catalog.documents, **_adapter(folder, told_of.get(RUN_CONFIG, {}))},
        findings=tuple(faults.findings),
        notes=(*catalog.notes, *((note,) * bool(other))),
    )


def _common(files: SourceFiles, faults: Faults) -> Leaves:
    """Return what is not sharded; of objects of Megatron's own classes inert records."""
    if not is_there(files.root / COMMON):
        if names_common(files):
            why = f"{MARK} says that Megatron wrote one"
            error = DamagedError(f"`{COMMON}` is missing", where=str(files.root), why=why)
            faults.unreadable(error, COMMON)
        return Leaves()
    found = faults.read(COMMON, lambda name: read_leaves(files, name, unknown="inert"))
    return found or Leaves()


def _common_state(files: SourceFiles, blob: Blob, faults: Faults) -> Leaves:
    """Return what is not sharded of a save that has it among its objects, as a list of one."""
    where = str(files.root / (file := blob.file or ""))
    try:
        at = (file, blob.offset, blob.nbytes)
        root = read_archive(files, *at, unknown="inert", table=KEEPING_TABLE).root
        if isinstance(root, list) and len(root) == 1:
            return leaves_in(root[0], file)
        what = f"`{blob.name}` is not what Megatron-Core writes"
        raise UnsupportedError(what, where=where, why="it is no list of one")
    except UNUSABLE as error:
        faults.unreadable(error, tensor=blob.name)
        return Leaves()


def _described(folder: Path) -> dict[str, Mapping[str, object]]:
    """Return the config.json that verl keeps in a folder beside the checkpoint."""
    beside = folder.parent / CONFIGURATION
    return documents(beside) if beside.is_dir() else {}


def _adapter(folder: Path, record: Json) -> dict[str, Json]:
    """Return PEFT's configuration of an adapter, beside it or of what Bridge records."""
    stated = peft_words(record)
    return {ADAPTER: {**adapter_config(folder).get(ADAPTER, {}), **stated}} if stated else {}


def told(blobs: Mapping[str, Blob]) -> dict[str, object]:
    """Return the trainer's arguments among the leaves of ``common.pt``, by their own names."""
    record = blobs[ARGUMENTS].value if ARGUMENTS in blobs else None
    state = record.state if isinstance(record, Inert) else record
    if isinstance(state, dict):
        return {key: value for key, value in state.items() if isinstance(key, str)}
    below = ((blob.path, blob.value) for blob in blobs.values())
    named = (pair for pair in below if pair[0][:1] == (ARGUMENTS,) and len(pair[0]) == 2)
    return {str(path[1]): value for path, value in named}
