"""Read a DeepSpeed checkpoint, and compare the values that several ranks have.

Each rank of a data-parallel job updates its own buffers, so running statistics differ between ranks
and are not replicas. The model has those of the first rank, as in ``zero_to_fp32.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.catalog import Blob, Catalog, Extent, TensorEntry
from ckptctl.errors import UnsupportedError, UsageError, spell_option
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.deepspeed.deepspeed_files import SCRIPTS, evidence, rank_files
from ckptctl.formats.deepspeed.deepspeed_model import (
    ROOT,
    MasterWeights,
    as_saved,
    optimized,
    without_partitions,
)
from ckptctl.formats.deepspeed.optimizer import OPTIMIZER, surroundings
from ckptctl.formats.deepspeed.states import ModelState
from ckptctl.formats.deepspeed.zero import Save, read_save
from ckptctl.formats.shared.findings import Faults
from ckptctl.formats.shared.leaves import below_rank, kept_apart, unknown_notes
from ckptctl.formats.shared.replicas import CopyComparison
from ckptctl.formats.shared.stored_leaves import NO_CHECKSUMS, Leaves, stored_entry
from ckptctl.formats.shared.tags import LATEST, tag_folder
from ckptctl.formats.sidecar_files import beside
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.zips.zip_reader import StoredTensor
from ckptctl.tree import TreePath

Copy = tuple[str, int, str, object]
"""Name of a tensor, another rank, its file, and its value of that name."""


class Replicas:
    """Values of other ranks, separated into replicas and differing values.

    Attributes:
        tensors: Tensors of the catalog by name.
        compared: Comparison of their copies.
        found: Copies, if *asked*, with an equal recorded checksum, with equal bytes, or
            too large to compare here.
        apart: Differing values under new names.
    """

    def __init__(
        self, files: SourceFiles, tensors: Mapping[str, TensorEntry], *, asked: bool
    ) -> None:
        self.tensors = tensors
        self.compared = CopyComparison(files, deferred=asked)
        self.found: dict[str, list[Extent]] = {}
        self.apart: dict[str, TensorEntry] = {}

    def take(self, home: str, copies: Iterator[Copy]) -> None:
        """Compare *copies* with the tensors that are read from the file *home*."""
        for name, rank, file, value in copies:
            entry = self.tensors.get(name)
            if entry is None or [extent.file for extent in entry.extents] != [home]:
                continue
            if not isinstance(value, StoredTensor):
                raise UnsupportedError(
                    f"`{name}` is missing from `{file}`",
                    where=str(self.compared.files.root / file),
                    why=f"`{home}` has it",
                    hint="check for a file of an earlier save under the same tag",
                )
            own = stored_entry(below_rank(rank, entry.path), value, file)
            if not self.compared.is_same(entry, own, name):
                self.apart[own.name] = own
            elif self.compared.deferred:
                self.found.setdefault(name, []).append(own.extents[0])


def of_models(models: Sequence[ModelState], model: ModelState) -> Iterator[Copy]:
    """Yield the values in other ranks' model states for the names in *model*."""
    for rank, other in enumerate(models):
        if other is not model and not other.absent:
            for name, value in model.module.items():
                if isinstance(value, StoredTensor) and name not in model.frozen:
                    yield (f"{ROOT}.{name}", rank, other.file, other.module.get(name))
            for name, shape in model.frozen.items():
                value = other.fragments.get(name)
                if isinstance(value, StoredTensor) and value.shape == shape:
                    yield (f"{ROOT}.{name}", rank, other.file, value)


def _of_counters(save: Save) -> Iterator[Copy]:
    """Yield the step counters in other ranks' optimizer states."""
    for rank, other in enumerate(save.optims):
        if other.absent or other is save.optim:
            continue
        for name, part in save.parts.items():
            for key, value in other.states[part.owner].items():
                if isinstance(value, StoredTensor) and not value.shape:
                    yield (f"{OPTIMIZER}.state.{name}.{key}", rank, other.file, value)


def read(path: TreePath, asked: ReadOptions, name: str) -> Catalog:
    """Read the catalog of the folder *path* (see :meth:`Format.read`)."""
    folder = tag_folder(path, asked.tag, LATEST, evidence)
    faults = Faults(path, asked.partial)
    found = rank_files(path, folder, faults)
    with source_files(path) as files:
        save = read_save(files, found, asked.weights != "module", faults)
        model = _weights(save, asked, faults)
        others = surroundings(save, files)
        tensors = faults.usable({**model.tensors, **others.tensors})
        replicas = Replicas(files, tensors, asked=asked.replicas)
        replicas.take(save.model.file, of_models(save.models, save.model))
        if save.optims and asked.replicas:
            replicas.take(save.optim.file, _of_counters(save))
        notes = [] if save.model.checksums else [NO_CHECKSUMS]
        if save.model.groups is not None and not save.optims:
            notes.append("the optimizer states of all ranks are missing")
        return catalog_of(
            name,
            faults,
            folder=folder,
            files={file: files.size(file) for file in save.files},
            blobs=model.blobs,
            others=others,
            replicas=replicas,
            notes=notes,
        )


def _weights(save: Save, asked: ReadOptions, faults: Faults) -> Leaves:
    """Read the requested weights, by default the fp32 copies if there are any."""
    if save.partitioned and asked.weights == "module":
        raise UsageError(
            "ZeRO stage 3 does not store weights in `module`",
            where=str(faults.root),
            why="the tensors in `module` are empty placeholders; the parameters are divided "
            "among the ranks",
            hint=f"pass {spell_option('--weights master')}",
        )
    if save.optims and asked.weights != "module":
        return MasterWeights(save.models, optimized(save), save.partitioned, faults).leaves()
    if save.model.groups is not None and asked.weights != "module":
        return without_partitions(save, faults)
    if asked.weights == "master":
        raise UsageError(
            "ZeRO stage 0 does not have fp32 partitions",
            where=str(faults.root),
            why="there are no fp32 copies, or they have no parameter names",
            hint=f"pass {spell_option('--weights module')}",
        )
    return as_saved(save.model)


def catalog_of(
    name: str,
    faults: Faults,
    *,
    folder: str,
    files: Mapping[str, int],
    blobs: Mapping[str, Blob],
    others: Leaves,
    replicas: Replicas,
    notes: Iterable[str],
) -> Catalog:
    """Combine the tensors, the *blobs* of the model and all *others* into a catalog."""
    around = beside(faults.root, {folder, *files, *SCRIPTS})
    return replace(
        around.catalog(faults.root, name),
        files=files,
        tensors={**replicas.tensors, **replicas.apart},
        blobs={**blobs, **others.blobs},
        notes=(
            *notes,
            *others.notes,
            *unknown_notes(others.blobs.values()),
            *kept_apart(replicas.compared.differing),
            *replicas.compared.notes(),
        ),
        replicas={name: tuple(copies) for name, copies in replicas.found.items()},
        findings=tuple(faults.findings) if faults.partial else (),
        lost=faults.lost,
    )
