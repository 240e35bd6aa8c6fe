"""veScale's checkpoints, which have ``model/`` and one ``optimizer/pp_N/`` per pipeline stage.

Source: ``vescale/checkpoint/api/vescale_checkpointer.py`` of vescale 0.0.1. Each folder is
a ``torch.distributed.checkpoint`` directory with veScale's own storage class in its metadata. A
single folder can be read as format ``dcp``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from ckptctl.catalog import Blob, Catalog, TensorEntry
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import CkptError, UnsupportedError
from ckptctl.formats import dcp
from ckptctl.formats.base import DEFAULT_READ_OPTIONS, Listing, ReadOptions
from ckptctl.formats.dcp import METADATA, ItemFormat
from ckptctl.formats.shared.findings import FaultCollector
from ckptctl.formats.shared.leaves import join_path
from ckptctl.formats.sidecar_files import scan_sidecar_files
from ckptctl.tree import TreePath

MODEL, OPTIMIZER = "model", "optimizer"
_STAGE = re.compile(r"pp_(\d{1,6})", re.ASCII)


class VeScaleFormat(ItemFormat):
    """A folder with a model and the optimizer states of all pipeline stages."""

    name = "vescale"
    title = "veScale: model/ and optimizer/pp_N/ of every pipeline stage"
    recognized = "`model/.metadata` next to `optimizer/pp_N`"
    marks = re.compile(rf"{MODEL}\Z")
    wholeness = (
        "the chunks in each `.metadata` tile every tensor; stage numbers start at 0 and have no "
        "gap (a missing last stage is not detected, because the number of stages is not recorded)"
    )
    tested = "vescale 0.0.1 (2 ranks, with torch's planner); the rest of veScale was not run"
    proof = (
        "reading: checkpoints of vescale 0.0.1's storage on 2 ranks, with torch's planner instead"
        " of its own, equal the live tensors (tests/unit/formats/test_vescale.py); the rest of "
        "veScale needs CUDA and was not run"
    )

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        if not (listing.path / MODEL / METADATA).is_file():
            return None
        stages = _list_stages(listing.path)
        return f"`{MODEL}/{METADATA}` and {len(stages)} of `pp_N`" if stages else None

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        stages = _list_stages(path)
        faults = FaultCollector(path, options.partial)
        required = range(max(stages, default=-1) + 1)
        faults.require_files(
            stages, required, lambda n: f"{OPTIMIZER}/pp_{n}", "pipeline stages' optimizers"
        )
        merger = _FolderMerger(options, faults)
        merger.add_folder(MODEL, (MODEL,))
        for _, name in sorted(stages.items()):
            merger.add_folder(f"{OPTIMIZER}/{name}", (OPTIMIZER, name))
        sidecars = scan_sidecar_files(path, (MODEL, OPTIMIZER))
        return replace(
            sidecars.start_catalog(path, self.name),
            files=merger.files,
            tensors=merger.tensors,
            blobs=merger.blobs,
            notes=tuple(dict.fromkeys(merger.notes)),
            findings=tuple(faults.findings),
            lost=faults.lost,
        )


def _list_stages(path: TreePath) -> dict[int, str]:
    """Map the numbers of the pipeline stages to their optimizer folders."""
    folder = path / OPTIMIZER
    names = [item.name for item in folder.iterdir() if item.is_dir()] if folder.is_dir() else []
    return {int(match[1]): match[0] for name in names if (match := _STAGE.fullmatch(name))}


@dataclass(slots=True)
class _FolderMerger:
    """Merger of the catalogs of the model folder and of all optimizer folders."""

    options: ReadOptions
    faults: FaultCollector
    files: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    blobs: dict[str, Blob] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_folder(self, folder: str, path: KeyPath) -> None:
        """Add the tensors and values in *folder*, with the keys *path* before their names."""
        try:
            catalog = dcp.FORMAT.read(self.faults.root / folder, self.options)
            if catalog.computed:
                from ckptctl.formats.dcp.dcp_reader import WRITTEN_WITH_EXTENSION

                raise UnsupportedError(WRITTEN_WITH_EXTENSION, where=catalog.path)
        except CkptError as error:
            self.faults.add_or_raise(error)
            return
        self.files |= {f"{folder}/{name}": size for name, size in catalog.files.items()}
        for entry in catalog.tensors.values():
            extents = tuple(replace(e, file=f"{folder}/{e.file}") for e in entry.extents)
            name = join_path((*path, *entry.path))
            self.tensors[name] = replace(
                entry, name=name, path=(*path, *entry.path), extents=extents
            )
            lost_boxes = catalog.lost.get(entry.name)
            if lost_boxes:
                self.faults.lost[name] = tuple(
                    (box, f"{folder}/{file}") for box, file in lost_boxes
                )
        for blob in catalog.blobs.values():
            key = (*path, *blob.path)
            file = f"{folder}/{blob.file}" if blob.file is not None else None
            self.blobs[join_path(key)] = replace(blob, name=join_path(key), path=key, file=file)
        self.notes += (f"`{folder}`: {note}" for note in catalog.notes)
        for finding in catalog.findings:
            where = f"{folder}/{finding.file}" if finding.file is not None else folder
            tensor = join_path((*path, finding.tensor)) if finding.tensor is not None else None
            self.faults.findings.append(replace(finding, file=where, tensor=tensor))


FORMAT = VeScaleFormat()
