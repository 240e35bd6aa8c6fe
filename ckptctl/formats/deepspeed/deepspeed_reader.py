"""Read a DeepSpeed checkpoint, and compare tensors that several ranks store.

Each rank of a data-parallel job updates its own buffers, so running statistics differ between ranks
and are not replicas. The catalog contains the buffers of the first rank, as in
``zero_to_fp32.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.catalog import Blob, Catalog, Extent, TensorEntry
from ckptctl.errors import UnsupportedError, UsageError, format_option, quote_names
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.deepspeed.deepspeed_files import ROOT_FILES, find_evidence, find_rank_files
from ckptctl.formats.deepspeed.deepspeed_model import (
    MODULE_KEY,
    MasterWeights,
    build_parameter_entries,
    extract_module_leaves,
    extract_unpartitioned_leaves,
)
from ckptctl.formats.deepspeed.optimizer import OPTIMIZER, extract_training_state
from ckptctl.formats.deepspeed.states import ModelState
from ckptctl.formats.deepspeed.zero import ZeroSave, read_save
from ckptctl.formats.shared.findings import FaultCollector
from ckptctl.formats.shared.leaves import (
    add_rank_prefix,
    list_differing_value_notes,
    list_unknown_class_notes,
)
from ckptctl.formats.shared.replicas import CopyComparison
from ckptctl.formats.shared.stored_leaves import NO_CHECKSUMS, Leaves, make_stored_entry
from ckptctl.formats.shared.tags import LATEST, find_tag_folder
from ckptctl.formats.sidecar_files import scan_sidecar_files
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.zips.zip_reader import StoredTensor
from ckptctl.tree import TreePath

RankValue = tuple[str, int, str, object]
"""Another rank's copy of a tensor, as ``(tensor name, rank, file, value)``."""


class ReplicaCollector:
    """Collector that compares tensors of other ranks, and separates replicas from differing ones.

    Attributes:
        tensors: Tensors of the catalog by name.
        comparison: Comparison of these tensors with their copies on other ranks.
        replicas: Extents of copies by tensor name, if *list_replicas* is true. A copy has the same
            checksum or bytes as the tensor, or is too large to compare here.
        differing: Differing tensors of other ranks, by names with the rank as a prefix.
    """

    def __init__(
        self, files: SourceFiles, tensors: Mapping[str, TensorEntry], *, list_replicas: bool
    ) -> None:
        self.tensors = tensors
        self.comparison = CopyComparison(files, deferred=list_replicas)
        self.replicas: dict[str, list[Extent]] = {}
        self.differing: dict[str, TensorEntry] = {}

    def add_copies(self, first_file: str, copies: Iterator[RankValue]) -> None:
        """Compare *copies* with the catalog tensors that are stored in the file *first_file*."""
        for name, rank, file, value in copies:
            entry = self.tensors.get(name)
            if entry is None or [extent.file for extent in entry.extents] != [first_file]:
                continue
            if not isinstance(value, StoredTensor):
                raise UnsupportedError(
                    f"`{name}` is missing from `{file}`",
                    where=str(self.comparison.files.root / file),
                    why=f"`{first_file}` has it",
                    hint="check for a file of an earlier save under the same tag",
                )
            rank_entry = make_stored_entry(add_rank_prefix(rank, entry.path), value, file)
            if not self.comparison.is_same(entry, rank_entry, name):
                self.differing[rank_entry.name] = rank_entry
            elif self.comparison.deferred:
                self.replicas.setdefault(name, []).append(rank_entry.extents[0])


def iterate_model_copies(models: Sequence[ModelState], model: ModelState) -> Iterator[RankValue]:
    """Yield the tensors of *model* as they are stored in the model states of other ranks."""
    for rank, other_model in enumerate(models):
        if other_model is not model and not other_model.is_placeholder:
            for name, value in model.module.items():
                if isinstance(value, StoredTensor) and name not in model.frozen_shapes:
                    yield (
                        f"{MODULE_KEY}.{name}",
                        rank,
                        other_model.file,
                        other_model.module.get(name),
                    )
            for name, shape in model.frozen_shapes.items():
                value = other_model.frozen_data.get(name)
                if isinstance(value, StoredTensor) and value.shape == shape:
                    yield (f"{MODULE_KEY}.{name}", rank, other_model.file, value)


def _iterate_counter_copies(save: ZeroSave) -> Iterator[RankValue]:
    """Yield the 0-d tensors, such as step counters, in the optimizer states of other ranks."""
    for rank, other_optim in enumerate(save.optims):
        if other_optim.is_placeholder or other_optim is save.optim:
            continue
        for name, location in save.locations.items():
            for key, value in other_optim.states[location.group_number].items():
                if isinstance(value, StoredTensor) and not value.shape:
                    yield (f"{OPTIMIZER}.state.{name}.{key}", rank, other_optim.file, value)


def read_catalog(path: TreePath, options: ReadOptions, name: str) -> Catalog:
    """Read the catalog of the folder *path* (see :meth:`Format.read`)."""
    folder = find_tag_folder(path, options.tag, LATEST, find_evidence)
    faults = FaultCollector(path, options.partial)
    save_files = find_rank_files(path, folder, faults)
    with source_files(path) as files:
        save = read_save(files, save_files, options.weights != "module", faults)
        model = _extract_weights(save, options, faults)
        state = extract_training_state(save, files)
        tensors = faults.drop_unusable_boxes({**model.tensors, **state.tensors})
        replicas = ReplicaCollector(files, tensors, list_replicas=options.replicas)
        replicas.add_copies(save.model.file, iterate_model_copies(save.models, save.model))
        if save.optims and options.replicas:
            replicas.add_copies(save.optim.file, _iterate_counter_copies(save))
        notes = [] if save.model.has_checksums else [NO_CHECKSUMS]
        notes += _check_buffers(save.model, faults)
        if save.model.groups is not None and not save.optims:
            notes.append("the optimizer states of all ranks are missing")
        return build_catalog(
            name,
            faults,
            folder=folder,
            files={file: files.size(file) for file in save.files},
            blobs=model.blobs,
            state=state,
            replicas=replicas,
            notes=notes,
        )


def _check_buffers(model: ModelState, faults: FaultCollector) -> list[str]:
    """Add or raise an error if ``module`` lacks recorded buffers, or return a note.

    DeepSpeed records the persistent buffers of the model. If no buffer is saved, or parameters have
    other names, the training script replaced ``state_dict``, which may skip buffers.
    """
    absent = [name for name in model.buffer_names if name not in model.module]
    if not absent:
        return []
    if len(absent) == len(model.buffer_names) or not model.shapes.keys() <= model.module.keys():
        return [f"buffers that were not saved: {quote_names(absent)}"]
    why = f"`buffer_names` in `{model.file}` lists it"
    if not faults.partial:
        raise UnsupportedError(
            f"the buffer `{absent[0]}` is missing",
            where=str(faults.root / model.file),
            why=f"`buffer_names` lists {quote_names(absent)}, but `module` does not",
        )
    for name in absent:
        faults.add_missing_tensor(f"{MODULE_KEY}.{name}", why)
    return []


def _extract_weights(save: ZeroSave, options: ReadOptions, faults: FaultCollector) -> Leaves:
    """Return the weights that *options* select, by default the fp32 copies if they exist."""
    if save.partitioned and options.weights == "module":
        raise UsageError(
            "ZeRO stage 3 does not store weights in `module`",
            where=str(faults.root),
            why="the tensors in `module` are empty placeholders; the parameters are divided "
            "among the ranks",
            hint=f"pass {format_option('--weights master')}",
        )
    if save.optims and options.weights != "module":
        return MasterWeights(
            save.models, build_parameter_entries(save), save.partitioned, faults
        ).build_leaves()
    if save.model.groups is not None and options.weights != "module":
        return extract_unpartitioned_leaves(save, faults)
    if options.weights == "master":
        raise UsageError(
            "ZeRO stage 0 does not have fp32 partitions",
            where=str(faults.root),
            why="there are no fp32 copies, or they have no parameter names",
            hint=f"pass {format_option('--weights module')}",
        )
    return extract_module_leaves(save.model)


def build_catalog(
    name: str,
    faults: FaultCollector,
    *,
    folder: str,
    files: Mapping[str, int],
    blobs: Mapping[str, Blob],
    state: Leaves,
    replicas: ReplicaCollector,
    notes: Iterable[str],
) -> Catalog:
    """Build a catalog from the tensors in *replicas*, the *blobs* of the model and *state*.

    *folder* is the tag folder, and *files* maps the files that were read to their sizes in bytes.
    """
    sidecars = scan_sidecar_files(faults.root, {folder, *files, *ROOT_FILES})
    return replace(
        sidecars.start_catalog(faults.root, name),
        files=files,
        tensors={**replicas.tensors, **replicas.differing},
        blobs={**blobs, **state.blobs},
        notes=(
            *notes,
            *state.notes,
            *list_unknown_class_notes(state.blobs.values()),
            *list_differing_value_notes(replicas.comparison.differing),
            *replicas.comparison.list_notes(),
        ),
        replicas={name: tuple(copies) for name, copies in replicas.replicas.items()},
        findings=tuple(faults.findings) if faults.partial else (),
        lost=faults.lost,
    )
