"""The model in a DeepSpeed checkpoint: from the fp32 partitions, or as the module saved it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ckptctl import dtypes
from ckptctl.catalog import TensorEntry
from ckptctl.errors import DamagedError, FormatError
from ckptctl.formats.deepspeed_partitions import Part, Segment, Shape, Strip, extents
from ckptctl.formats.deepspeed_states import ModelState
from ckptctl.formats.deepspeed_zero import Save
from ckptctl.formats.torch_file import Contents, contents_of
from ckptctl.storage.torch_zip import StoredTensor

ROOT = "module"


def as_saved(model: ModelState, root: Path) -> Contents:
    """Return the state dict in one file of model states, with the dtypes of training."""
    found = contents_of(model.module, model.file, str(root / model.file), (ROOT,))
    return replace(found, notes=())


def master(save: Save, root: Path) -> Contents:
    """Return the model with the fp32 copies of the optimizer.

    Optimised parameters come from the partitions; frozen ones and buffers from the model states,
    as they are stored there. Names and order are those of the module's state dict.

    Raises:
        DamagedError: A parameter is in none of them, or is not what another place says.
        FormatError: A frozen parameter is stored in parts that are not known.
    """
    return _Master(save, root).contents()


class _Master:
    def __init__(self, save: Save, root: Path) -> None:
        self.save, self.root = save, root
        self.model = save.models[0]
        self.where = str(root / self.model.file)
        self.saved = as_saved(self.model, root)
        self.tensors: dict[str, TensorEntry] = {}

    def contents(self) -> Contents:
        names = dict.fromkeys([*self.model.module, *self.model.frozen, *self.save.parts])
        for name in (*names, *self.model.shared):
            entry = self.entry(name)
            if entry is not None and entry.name not in self.tensors:
                self.tensors[entry.name] = entry
        return Contents(self._tied(), self.saved.blobs, ())

    def entry(self, name: str) -> TensorEntry | None:
        """Return the tensor called *name* in the module; None for a leaf that is none."""
        if name in self.save.parts:
            return self._optimised(name, self.save.parts[name])
        source = self.model.shared.get(name)
        if source is not None and self._holds(name, source):
            return self._shared(name, source)
        if self.save.stage == 3 and name in self.model.frozen:
            return self._frozen(name, self.model.frozen[name])
        found = self.saved.tensors.get(_key(name))
        if found is None and isinstance(self.model.fragments.get(name), StoredTensor):
            found = self._fragment(name)
        shape = self.model.frozen.get(name)
        if shape is not None and (found is None or found.shape != shape):
            raise self._lost(name, shape)
        if found is not None and self.save.stage == 3 and found.shape == (0,):
            raise self._lost(name, None)
        return found and replace(found, alias_of=None)

    def _holds(self, name: str, source: str) -> bool:
        """Whether *name* is *source*: parameters without elements all have address zero."""
        saved, other = (self.saved.tensors.get(_key(key)) for key in (name, source))
        return self.save.stage == 3 or saved is None or other is None or bool(saved.nbytes)

    def _optimised(self, name: str, part: Part) -> TensorEntry:
        saved = self.saved.tensors.get(_key(name))
        if self.save.stage < 3 and saved is not None and saved.shape != part.shape:
            raise DamagedError(
                f"`{name}` has two shapes",
                where=self.where,
                why=f"{list(saved.shape)} in `module`, {list(part.shape)} in `param_shapes`",
            )
        strips = self.save.strips
        dtype = strips[part.spans[0][0] if part.spans else 0].dtype
        grad = saved is not None and saved.requires_grad
        return _entry(name, dtype, part.shape, requires_grad=grad)._with(extents(part, strips))

    def _shared(self, name: str, source: str) -> TensorEntry:
        found = None if source == name or source in self.model.shared else self.entry(source)
        if found is None:
            raise DamagedError(
                f"`{name}` shares the data of `{source}`, which is not there", where=self.where
            )
        saved = self.saved.tensors.get(_key(name))
        if self.save.stage < 3 and saved is not None and saved.shape != found.shape:
            raise DamagedError(
                f"`{name}` and `{source}` share data and have different shapes",
                where=self.where,
                why=f"{list(saved.shape)} and {list(found.shape)}",
                hint="`--weights module` reads each as the module saved it",
            )
        return replace(found, name=_key(name), path=(ROOT, name), alias_of=_key(source))
