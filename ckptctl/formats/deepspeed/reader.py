"""What a DeepSpeed checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ckptctl.catalog import Catalog, Finding, TensorEntry
from ckptctl.errors import UsageError
from ckptctl.formats.assets import beside
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.deepspeed.files import SCRIPTS, evidence, rank_files
from ckptctl.formats.deepspeed.model import as_saved, master, optimised, without_partitions
from ckptctl.formats.deepspeed.optimizer import surroundings
from ckptctl.formats.deepspeed.replicas import Replicas, of_counters, of_models
from ckptctl.formats.deepspeed.zero import Save, read_save
from ckptctl.formats.shared.findings import Faults, Lost
from ckptctl.formats.shared.tags import LATEST, tag_folder
from ckptctl.formats.shared.unknown_classes import unknown_notes
from ckptctl.formats.torch_file import NO_CHECKSUMS, Contents, Leaves
from ckptctl.storage.files import SourceFiles, source_files


def read(path: Path, asked: ReadOptions, name: str) -> Catalog:
    """Return the catalog of the folder *path*; see :meth:`Format.read`.

    Args:
        path: The folder of one save, or the one above it.
        asked: What to read, and how.
        name: The format's.
    """
    folder = tag_folder(path, asked.tag, LATEST, evidence)
    faults = Faults(asked.partial)
    found = rank_files(path, folder, faults)
    with source_files(path) as files:
        save = read_save(files, found, asked.weights != "module", faults)
        model = _weights(save, path, asked, faults)
        others = surroundings(save, files)
        usable = faults.usable({**model.tensors, **others.tensors})
        return catalog_of(
            path,
            name,
            folder=folder,
            files={file: files.size(file) for file in save.files},
            model=model,
            others=others,
            usable=usable,
            replicas=_replicas(save, files, usable[0], asked.replicas),
            notes=_notes(save),
            findings=faults.findings,
        )


def _notes(save: Save) -> Iterator[str]:
    if not save.model.checksums:
        yield NO_CHECKSUMS
    if save.model.groups is not None and not save.optims:
        yield "the optimizer states of all ranks are missing"


def _replicas(
    save: Save, files: SourceFiles, tensors: Mapping[str, TensorEntry], asked: bool
) -> Replicas:
    replicas = Replicas(files, asked)
    replicas.take(tensors, save.model.file, of_models(save.models, save.model))
    if save.optims and asked:
        replicas.take(tensors, save.optim.file, of_counters(save))
    return replicas


def _weights(save: Save, root: Path, asked: ReadOptions, faults: Faults) -> Contents:
    """The model as asked for; the fp32 copies where there are any and nothing is asked."""
    if save.partitioned and asked.weights == "module":
        raise UsageError(
            "stage 3 keeps no weights in `module`",
            where=str(root),
            why="its tensors are empty placeholders; the parameters are divided among ranks",
            hint="`--weights master`",
        )
    if save.optims and asked.weights != "module":
        return master(save.models, optimised(save), save.partitioned, root, faults)
    if save.model.groups is not None and asked.weights != "module":
        return without_partitions(save, root, faults)
    if asked.weights == "master":
        raise UsageError(
            "stage 0 has no fp32 partitions",
            where=str(root),
            why="it keeps fp32 copies without the names of the parameters, or none",
            hint="`--weights module`",
        )
    return as_saved(save.model)


def catalog_of(
    path: Path,
    name: str,
    *,
    folder: str,
    files: Mapping[str, int],
    model: Contents,
    others: Leaves,
    usable: tuple[Mapping[str, TensorEntry], Lost],
    replicas: Replicas,
    notes: Iterable[str],
    findings: Iterable[Finding],
) -> Catalog:
    """Return the catalog.

    Args:
        path: The checkpoint: the folder of one save, or the one above it.
        name: The format's.
        folder: What in *path* is read, and not left behind.
        files: The files that were read, with their sizes.
        model: The model.
        others: Everything outside it.
        usable: The tensors of both, and the boxes of them that are in no usable file.
        replicas: What other ranks have of them.
        notes: What a reader should know first.
        findings: What is wrong.
    """
    tensors, lost = usable
    around = beside(path, {folder, *files, *SCRIPTS})
    return Catalog(
        root=str(path),
        path=str(path),
        format=name,
        files=files,
        tensors={**tensors, **replicas.apart},
        blobs={**model.blobs, **others.blobs},
        assets=around.assets,
        others=around.others,
        documents=around.documents,
        notes=(
            *notes,
            *others.notes,
            *unknown_notes(others.blobs.values()),
            *replicas.notes(),
        ),
        replicas=replicas.listed(),
        findings=tuple(findings),
        lost=lost,
    )
