"""The catalog of a DeepSpeed checkpoint, from what was read of its files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ckptctl.catalog import Catalog, Finding, TensorEntry
from ckptctl.formats.assets import beside
from ckptctl.formats.deepspeed.files import SCRIPTS
from ckptctl.formats.deepspeed.replicas import Replicas
from ckptctl.formats.shared.faults import Lost
from ckptctl.formats.shared.leaves import Leaves
from ckptctl.formats.shared.unknown_classes import unknown_notes
from ckptctl.formats.torch_file import Contents


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
