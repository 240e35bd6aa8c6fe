"""The model in a DeepSpeed checkpoint, from its fp32 partitions or from ``module``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptctl.catalog import Extent, TensorEntry
from ckptctl.errors import UnsupportedError, spell_option
from ckptctl.formats.deepspeed.partitions import FlatPart, Segment, Shape, Strip, extents
from ckptctl.formats.deepspeed.states import ModelState
from ckptctl.formats.deepspeed.zero import Save
from ckptctl.formats.shared.findings import Faults
from ckptctl.formats.shared.stored_leaves import Leaves, extent_of, leaves_in
from ckptctl.storage.zips.zip_reader import StoredTensor
from ckptctl.units import pluralize

ROOT = "module"


def as_saved(model: ModelState) -> Leaves:
    """Return the state dict in a file of model states, with the dtypes of training."""
    found = leaves_in(model.module, model.file, (ROOT,))
    return Leaves(found.tensors, found.blobs)


def optimized(save: Save) -> dict[str, TensorEntry]:
    """Return the parameters in the partitions, by their names in the module."""
    found: dict[str, TensorEntry] = {}
    for name, part in save.parts.items():
        dtype = save.strips[part.spans[0][0] if part.spans else 0].dtype
        found[name] = entry_of(name, dtype, part.shape, extents(part, save.strips))
    return found


def without_partitions(save: Save, faults: Faults) -> Leaves:
    """Return the remaining tensors of the model if all partitions are missing."""
    gone = save.model.shapes
    for name in gone:
        faults.nowhere(_key(name), "it is stored in the optimizer states, which cannot be read")
    models = [
        replace(model, module={k: v for k, v in model.module.items() if k not in gone})
        for model in save.models
    ]
    return MasterWeights(models, {}, save.partitioned, faults).leaves()


class _NowhereError(UnsupportedError):
    """The data of a tensor is missing."""


class MasterWeights:
    """The model with the optimizer's fp32 copies of its parameters.

    Frozen parameters and buffers are read from the model states, with their stored dtypes. Names
    and order are those of the module's state dict.
    """

    def __init__(
        self,
        models: Sequence[ModelState],
        found: Mapping[str, TensorEntry],
        partitioned: bool,
        faults: Faults,
    ) -> None:
        self.models, self.faults = models, faults
        self.model = next(model for model in models if not model.absent)
        self.found, self.partitioned = found, partitioned
        self.where = str(faults.root / self.model.file)
        self.saved = as_saved(self.model)

    def leaves(self) -> Leaves:
        """Return all tensors and non-tensor values."""
        frozen, shared = self.model.frozen, self.model.shared
        names = dict.fromkeys([*self.model.module, *frozen, *self.found, *shared])
        entries = filter(None, map(self.usable, names))
        return Leaves({entry.name: entry for entry in entries}, self.saved.blobs)

    def usable(self, name: str) -> TensorEntry | None:
        """Return the tensor *name*, or None, with a finding, if its data is missing."""
        try:
            return self.entry(name)
        except _NowhereError as error:
            if not self.faults.partial:
                raise
            self.faults.nowhere(_key(name), error.why or error.what)
            return None

    def entry(self, name: str) -> TensorEntry | None:
        """Return the tensor called *name*, or None for a non-tensor value."""
        entry = None
        if name in self.found:
            found, saved = self.found[name], self.saved.tensors.get(_key(name))
            self._require_same(name, found.shape, name)
            entry = replace(found, requires_grad=saved is not None and saved.requires_grad)
        elif name in self.model.shared and not self._is_empty(name):
            entry = self._shared(name, self.model.shared[name])
        elif self.partitioned and name in self.model.frozen:
            entry = self._frozen(name, self.model.frozen[name])
        elif _key(name) in self.saved.tensors:
            entry = self._kept(name)
        elif name in self.model.module:
            return None
        if entry is None:
            raise _NowhereError(
                f"the data of `{name}` is missing",
                where=self.where,
                why="it is neither in a partition nor among the frozen or shared parameters",
            )
        return entry

    def _is_empty(self, name: str) -> bool:
        """Return whether *name* is a parameter without elements.

        Such parameters are recorded as shared, because all of them have address 0.
        """
        saved = self.saved.tensors.get(_key(name))
        return not self.partitioned and saved is not None and not saved.nbytes

    def _shared(self, name: str, source: str) -> TensorEntry:
        known = source != name and source not in self.model.shared
        found = self.entry(source) if known else None
        if found is None:
            raise _NowhereError(
                f"`{name}` shares the data of `{source}`, which is missing", where=self.where
            )
        self._require_same(name, found.shape, source)
        return replace(found, name=_key(name), path=(ROOT, name), alias_of=_key(source))

    def _require_same(self, name: str, shape: Shape, other: str) -> None:
        saved = self.saved.tensors.get(_key(name))
        if not self.partitioned and saved is not None and saved.shape != shape:
            raise UnsupportedError(
                f"the shape of `{name}` differs from that of "
                + ("its partitions" if name == other else f"`{other}`, which it shares data with"),
                where=self.where,
                why=f"{list(saved.shape)} in `module`, but {list(shape)} elsewhere",
                hint=f"pass {spell_option('--weights module')} to read the weights that the model "
                "computed with",
            )

    def _frozen(self, name: str, shape: Shape) -> TensorEntry | None:
        """Join the ranks' shares, or take a full copy, of a frozen parameter."""
        found = [(model.file, model.fragments.get(name)) for model in self.models]
        shares = [(file, item) for file, item in found if isinstance(item, StoredTensor)]
        if len(shares) < len(found):
            return None
        absent = {model.file for model in self.models if model.absent}
        file, first = next(share for share in shares if share[0] not in absent)
        numel, share = math.prod(shape), -(-math.prod(shape) // len(shares))
        if first.shape == shape and math.prod(shape) != share:
            return entry_of(name, first.dtype, shape, (extent_of(first, file),))
        flat = ((share,), None, first.dtype)
        odd = [file for file, item in shares if (item.shape, item.strides, item.dtype) != flat]
        if odd:
            raise UnsupportedError(
                f"a rank's share of the frozen parameter `{name}` is malformed",
                where=str(Path(self.where).parent / Path(odd[0]).name),
                why=f"expected {pluralize(share, 'element')} of {first.dtype}",
            )
        strip = Strip([Segment(file, item) for file, item in shares])
        boxes = extents(FlatPart(shape, ((0, 0, numel),), 0), [strip])
        return entry_of(name, first.dtype, shape, boxes)

    def _kept(self, name: str) -> TensorEntry | None:
        """Return a buffer, or for stages 1 and 2 a frozen parameter, from the module."""
        found = self.saved.tensors[_key(name)]
        shape = self.model.frozen.get(name, found.shape)
        gathered = not self.partitioned or found.shape != (0,)
        if shape != found.shape or not gathered:
            return None
        found = replace(found, alias_of=None)
        first = self.models[0]
        if not first.absent:
            return found
        # Each rank has its own buffers, so those of another rank cannot replace the first's.
        extents = tuple(replace(extent, file=first.file) for extent in found.extents)
        return replace(found, extents=extents)


def _key(name: str) -> str:
    return f"{ROOT}.{name}"


def entry_of(name: str, dtype: str, shape: Shape, boxes: Sequence[Extent]) -> TensorEntry:
    """Return the catalog entry of the parameter called *name* in the module."""
    return TensorEntry(_key(name), dtype, shape, boxes, (ROOT, name))
