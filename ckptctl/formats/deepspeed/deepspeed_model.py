"""Read the model in a DeepSpeed checkpoint from its fp32 partitions or from ``module``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptctl.catalog import Extent, TensorEntry
from ckptctl.errors import UnsupportedError, format_option
from ckptctl.formats.deepspeed.partitions import (
    FlatLocation,
    FlatVector,
    Segment,
    Shape,
    locate_extents,
)
from ckptctl.formats.deepspeed.states import ModelState
from ckptctl.formats.deepspeed.zero import ZeroSave
from ckptctl.formats.shared.findings import FaultCollector
from ckptctl.formats.shared.stored_leaves import Leaves, extract_leaves, make_extent
from ckptctl.storage.zips.zip_reader import StoredTensor
from ckptctl.units import pluralize

MODULE_KEY = "module"


def extract_module_leaves(model: ModelState) -> Leaves:
    """Return the leaves of ``module`` in a model-state file, with the dtypes used in training."""
    leaves = extract_leaves(model.module, model.file, (MODULE_KEY,))
    return Leaves(leaves.tensors, leaves.blobs)


def build_parameter_entries(save: ZeroSave) -> dict[str, TensorEntry]:
    """Return the fp32 parameters in the partitions, by their names in ``module``."""
    entries: dict[str, TensorEntry] = {}
    for name, location in save.locations.items():
        dtype = save.vectors[location.spans[0][0] if location.spans else 0].dtype
        entries[name] = make_parameter_entry(
            name, dtype, location.shape, locate_extents(location, save.vectors)
        )
    return entries


def extract_unpartitioned_leaves(save: ZeroSave, faults: FaultCollector) -> Leaves:
    """Return the buffers and frozen parameters when all fp32 partitions are missing.

    Adds a finding for each optimized parameter.
    """
    missing_shapes = save.model.shapes
    for name in missing_shapes:
        faults.add_missing_tensor(
            _format_module_key(name), "it is stored in the optimizer states, which cannot be read"
        )
    models = [
        replace(model, module={k: v for k, v in model.module.items() if k not in missing_shapes})
        for model in save.models
    ]
    return MasterWeights(models, {}, save.partitioned, faults).build_leaves()


class _MissingDataError(UnsupportedError):
    """A model tensor is recorded, but its data is missing from the checkpoint."""


class MasterWeights:
    """Model whose parameters are the optimizer's fp32 copies.

    Frozen parameters and buffers come from the model states and keep their stored dtypes. The
    tensors have the names and the order of the module's state dict.
    """

    def __init__(
        self,
        models: Sequence[ModelState],
        parameters: Mapping[str, TensorEntry],
        partitioned: bool,
        faults: FaultCollector,
    ) -> None:
        self.models, self.faults = models, faults
        self.model = next(model for model in models if not model.is_placeholder)
        self.parameters, self.partitioned = parameters, partitioned
        self.where = str(faults.root / self.model.file)
        self.module_leaves = extract_module_leaves(self.model)

    def build_leaves(self) -> Leaves:
        """Return all tensors and non-tensor values of the model."""
        frozen, shared = self.model.frozen_shapes, self.model.tied_names
        names = dict.fromkeys([*self.model.module, *frozen, *self.parameters, *shared])
        entries = filter(None, map(self.build_usable_entry, names))
        return Leaves({entry.name: entry for entry in entries}, self.module_leaves.blobs)

    def build_usable_entry(self, name: str) -> TensorEntry | None:
        """Return the tensor *name*, or add a finding and return None if its data is missing.

        Raises instead of adding a finding if the read is not partial.
        """
        try:
            return self.build_entry(name)
        except _MissingDataError as error:
            if not self.faults.partial:
                raise
            self.faults.add_missing_tensor(_format_module_key(name), error.why or error.what)
            return None

    def build_entry(self, name: str) -> TensorEntry | None:
        """Return the tensor *name*, or None if *name* is a non-tensor value in ``module``."""
        entry = None
        if name in self.parameters:
            parameter, saved = (
                self.parameters[name],
                self.module_leaves.tensors.get(_format_module_key(name)),
            )
            self._require_same_shape(name, parameter.shape, name)
            entry = replace(parameter, requires_grad=saved is not None and saved.requires_grad)
        elif name in self.model.tied_names and not self._is_empty_parameter(name):
            entry = self._build_tied_entry(name, self.model.tied_names[name])
        elif self.partitioned and name in self.model.frozen_shapes:
            entry = self._join_frozen_parameter(name, self.model.frozen_shapes[name])
        elif _format_module_key(name) in self.module_leaves.tensors:
            entry = self._build_module_entry(name)
        elif name in self.model.module:
            return None
        if entry is None:
            raise _MissingDataError(
                f"the data of `{name}` is missing",
                where=self.where,
                why="it is neither in a partition nor among the frozen or shared parameters",
            )
        return entry

    def _is_empty_parameter(self, name: str) -> bool:
        """Return whether *name* is a parameter without elements.

        DeepSpeed records such parameters as shared, because they all have the data pointer 0.
        """
        saved = self.module_leaves.tensors.get(_format_module_key(name))
        return not self.partitioned and saved is not None and not saved.nbytes

    def _build_tied_entry(self, name: str, source: str) -> TensorEntry:
        is_stored = source != name and source not in self.model.tied_names
        source_entry = self.build_entry(source) if is_stored else None
        if source_entry is None:
            raise _MissingDataError(
                f"`{name}` shares the data of `{source}`, which is missing", where=self.where
            )
        self._require_same_shape(name, source_entry.shape, source)
        return replace(
            source_entry,
            name=_format_module_key(name),
            path=(MODULE_KEY, name),
            alias_of=_format_module_key(source),
        )

    def _require_same_shape(self, name: str, shape: Shape, source: str) -> None:
        saved = self.module_leaves.tensors.get(_format_module_key(name))
        if not self.partitioned and saved is not None and saved.shape != shape:
            raise UnsupportedError(
                f"the shape of `{name}` differs from that of "
                + (
                    "its partitions" if name == source else f"`{source}`, which it shares data with"
                ),
                where=self.where,
                why=f"{list(saved.shape)} in `module`, but {list(shape)} elsewhere",
                hint=f"pass {format_option('--weights module')} to read the weights that the model "
                "computed with",
            )

    def _join_frozen_parameter(self, name: str, shape: Shape) -> TensorEntry | None:
        """Join the shards of a frozen parameter, or return None if a rank's shard is missing.

        If every rank stores the full parameter, the copy of the first rank is used.
        """
        fragments = [(model.file, model.frozen_data.get(name)) for model in self.models]
        shares = [(file, item) for file, item in fragments if isinstance(item, StoredTensor)]
        if len(shares) < len(fragments):
            return None
        absent_files = {model.file for model in self.models if model.is_placeholder}
        file, first = next(share for share in shares if share[0] not in absent_files)
        numel, share = math.prod(shape), -(-math.prod(shape) // len(shares))
        if first.shape == shape and math.prod(shape) != share:
            return make_parameter_entry(name, first.dtype, shape, (make_extent(first, file),))
        flat = ((share,), None, first.dtype)
        malformed_files = [
            file for file, item in shares if (item.shape, item.strides, item.dtype) != flat
        ]
        if malformed_files:
            raise UnsupportedError(
                f"a rank's share of the frozen parameter `{name}` is malformed",
                where=str(Path(self.where).parent / Path(malformed_files[0]).name),
                why=f"expected {pluralize(share, 'element')} of {first.dtype}",
            )
        vector = FlatVector([Segment(file, item) for file, item in shares])
        boxes = locate_extents(FlatLocation(shape, ((0, 0, numel),), 0), [vector])
        return make_parameter_entry(name, first.dtype, shape, boxes)

    def _build_module_entry(self, name: str) -> TensorEntry | None:
        """Return a buffer, or for stages 1 and 2 a frozen parameter, from ``module``.

        Returns None if ``module`` contains only a placeholder.
        """
        saved = self.module_leaves.tensors[_format_module_key(name)]
        shape = self.model.frozen_shapes.get(name, saved.shape)
        gathered = not self.partitioned or saved.shape != (0,)
        if shape != saved.shape or not gathered:
            return None
        saved = replace(saved, alias_of=None)
        first = self.models[0]
        if not first.is_placeholder:
            return saved
        # Each rank has its own buffers, so those of another rank cannot replace the first's.
        extents = tuple(replace(extent, file=first.file) for extent in saved.extents)
        return replace(saved, extents=extents)


def _format_module_key(name: str) -> str:
    return f"{MODULE_KEY}.{name}"


def make_parameter_entry(
    name: str, dtype: str, shape: Shape, boxes: Sequence[Extent]
) -> TensorEntry:
    """Build the catalog entry of the parameter that is called *name* in ``module``."""
    return TensorEntry(_format_module_key(name), dtype, shape, boxes, (MODULE_KEY, name))
