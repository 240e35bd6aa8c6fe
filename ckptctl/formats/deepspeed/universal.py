"""Read a universal DeepSpeed checkpoint, with one folder per complete parameter.

Source: ``deepspeed/checkpoint/ds_to_universal.py``. Tensors of stage 3 stay flat. The converter
casts all buffers to float32, so they are read from the model states.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.errors import (
    CkptError,
    DamagedError,
    FormatError,
    UnsupportedError,
    UsageError,
    quote_names,
    spell_option,
)
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.deepspeed.deepspeed_files import FP32, ZERO, model_files, require_world
from ckptctl.formats.deepspeed.deepspeed_model import ROOT, MasterWeights, as_saved, entry_of
from ckptctl.formats.deepspeed.optimizer import OPTIMIZER, add_other_ranks, plain_settings, rest_of
from ckptctl.formats.deepspeed.partitions import (
    FlatPart,
    Segment,
    Shape,
    Strip,
    extents,
)
from ckptctl.formats.deepspeed.states import ModelState, read_model
from ckptctl.formats.deepspeed.zero import complete_models
from ckptctl.formats.shared.findings import Faults
from ckptctl.formats.shared.stored_leaves import NO_CHECKSUMS, Leaves, stored_entry
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.paths import is_present
from ckptctl.storage.schema import find_member, malformed_errors, read_as
from ckptctl.storage.zips.zip_reader import StoredTensor, read_archive
from ckptctl.tree import TreePath
from ckptctl.units import pluralize, sort_naturally

_NOT_SETTINGS = (
    "param_groups",
    "optimizer_state_dict",
    "fp32_flat_groups",
    "zero_stage",
    "partition_count",
    "group_paddings",
    "param_alignment_paddings",
    "ds_version",
)
SETTINGS = "optimizer_state.pt"
FolderValues = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class UniversalSave:
    """A universal checkpoint.

    Attributes:
        source: The checkpoint's files.
        prefix: Folder of the tag, which all names start with.
        models: Model states of tensor-parallel ranks, or for stage 3 of all ranks.
        partitioned: Whether it was converted from stage 3.
        values: Content of the files by parameter and key (``fp32``, ``exp_avg``, ...).
        shapes: Optimized parameters that the model states list.
        faults: Collector of problems.
    """

    source: SourceFiles
    prefix: str
    models: tuple[ModelState, ...]
    partitioned: bool
    values: FolderValues
    shapes: Mapping[str, Shape]
    faults: Faults

    @classmethod
    def of(cls, source: SourceFiles, prefix: str, partial: bool = False) -> UniversalSave:
        """Read all files, or as many as possible if *partial*."""
        faults = Faults(source.root, partial)
        names = model_files(source.root, prefix.rstrip("/"), faults)
        finished = is_present(source.root / prefix / ZERO / SETTINGS)
        if names and not finished and partial:
            faults.missing(f"{prefix}{ZERO}/{SETTINGS}", "the optimizer's settings")
        elif not names or not finished:
            raise DamagedError(
                "the conversion to a universal checkpoint was not finished",
                where=str(source.root / prefix),
                why=f"`{ZERO}/{SETTINGS}` is missing" if names else "the model states are missing",
                hint="run ds_to_universal.py again",
            )
        partitioned = "zero_pp_rank" in names[0]
        models = read_models(source, names, partitioned, faults)
        values = read_folders(source, prefix + ZERO, faults)
        shapes = {name: shape for model in models for name, shape in model.shapes.items()}
        return cls(source, prefix, models, partitioned, values, shapes, faults)

    @property
    def model(self) -> ModelState:
        """Model states of the first rank with usable ones."""
        return next(model for model in self.models if not model.absent)

    def files(self) -> list[str]:
        """Return the names of all files of the checkpoint, except unusable ones."""
        inner = (self.file(name, key) for name in self.values for key in self.values[name])
        found = [*(model.file for model in self.models), *inner, f"{self.prefix}{ZERO}/{SETTINGS}"]
        return [name for name in found if name not in self.faults.files]

    def file(self, name: str, key: str) -> str:
        """Return the file of one value of a parameter."""
        return f"{self.prefix}{ZERO}/{name}/{key}.pt"

    def notes(self) -> Iterator[str]:
        """Yield notes for the user."""
        if not self.model.checksums:
            yield NO_CHECKSUMS
        if self.model.content["module"] is None:
            yield (
                "buffers are missing: universal checkpoints of a pipeline engine do not contain "
                "them"
            )

    @property
    def divided(self) -> bool:
        """Whether tensor or pipeline parallelism divided the model states."""
        first = self.model.content
        return first.get("mp_world_size", 1) != 1 or first["module"] is None

    def weights(self, asked: ReadOptions) -> Leaves:
        """Return the requested weights of the model."""
        root = self.source.root
        if asked.weights == "module":
            if self.partitioned or self.divided:
                raise UsageError(
                    "the weights in `module` are divided among the ranks",
                    where=str(root / self.models[0].file),
                    hint=f"pass {spell_option('--weights master')}",
                )
            return as_saved(self.model)
        zero = (
            find_member(dict[str, object], self.model.content, "ds_config", "zero_optimization")
            or {}
        )
        shuffled = zero.get("round_robin_gradients")
        if shuffled and not self.partitioned and self.model.content.get("dp_world_size") != 1:
            raise FormatError(
                "ds_to_universal.py mixed up the parameters of this checkpoint",
                where=str(root / self.models[0].file),
                why="the converter ignores the parameter order of `round_robin_gradients`",
                hint=f"read the original checkpoint, or pass {spell_option('--weights module')}",
            )
        missing = [name for name in self.shapes if FP32 not in self.values.get(name, {})]
        if missing and not self.faults.partial:
            raise DamagedError(
                f"{pluralize(len(missing), 'parameter is', 'parameters are')} missing",
                where=str(root / self.prefix / ZERO),
                why=quote_names([f"{name}/{FP32}.pt" for name in missing]),
            )
        if not self.divided:
            found = self._parameters({*self.model.module, *self.model.frozen})
            return MasterWeights(self.models, found, self.partitioned, self.faults).leaves()
        return self._undivided(root)

    def _undivided(self, root: TreePath) -> Leaves:
        """Return the model if the model states have only parts of its tensors, except buffers."""
        first = self.model
        kept = set(find_member(list[str], first.content, "buffer_names") or ())
        module = {name: item for name, item in first.module.items() if name in kept}
        found = self._parameters(kept)
        lost = [*(first.module.keys() - found.keys() - kept - first.shared.keys())]
        if lost and self.faults.partial:
            for name in lost:
                why = "it is divided among the model states of several ranks"
                self.faults.nowhere(name, why, self.file(name, FP32))
        elif lost:
            raise DamagedError(
                f"{pluralize(len(lost), 'tensor is', 'tensors are')} not stored as a whole in any "
                "file",
                where=str(root / self.prefix / ZERO),
                why=f"the model states contain {quote_names(sort_naturally(lost))}, divided among the ranks",
            )
        model = replace(first, module=module)
        return MasterWeights((model,), found, False, self.faults).leaves()

    def _parameters(self, others: Set[str]) -> dict[str, TensorEntry]:
        """Return the tensors under ``zero`` that are parameters, and not in *others*."""
        found = {
            name: self.parameter(name, FP32)
            for name in sort_naturally(self.values)
            if FP32 in self.values[name] and (name in self.shapes or name not in others)
        }
        gone = ((name, self.missing(name, FP32, None)) for name in self.shapes.keys() - found)
        return {**found, **{name: entry for name, entry in gone if entry is not None}}

    def missing(self, name: str, key: str, like: object) -> TensorEntry | None:
        """Return a placeholder for a value in a missing file, or None if its shape is unknown."""
        file, shape = self.file(name, key), self._known_shape(name)
        if file not in self.faults.files:
            self.faults.missing(file, f"`{key}` of the parameter `{name}`")
        others = (keys[key] for n, keys in self.values.items() if n in self.shapes and key in keys)
        other = tensor_in(like or next(others, None))
        if other is None and not self.faults.partial:
            where = str(self.source.root / file)
            raise DamagedError(f"`{key}` of `{name}` is missing", where=where)
        if other is None or (shape is None and other.shape):
            self.faults.nowhere(f"{ROOT}.{name}" if key == FP32 else f"{name}.{key}", file, file)
            return None
        shape = shape if other.shape and key != "step" and shape is not None else other.shape
        return entry_of(name, other.dtype, shape, (Extent(Box.whole(shape), file, 0, 0),))

    def _known_shape(self, name: str) -> Shape | None:
        """Return the shape of a parameter, if known from its other values or the model states.

        Vocabularies may be truncated or padded, so other values take precedence.
        """
        for key, value in self.values.get(name, {}).items():
            tensor = tensor_in(value)
            if key != "step" and tensor is not None and tensor.shape:
                return self.parameter(name, key).shape
        return None if self.divided else self.shapes[name]

    def parameter(self, name: str, key: str) -> TensorEntry:
        """Return one value of a parameter in its shape (tensors of stage 3 are stored flat)."""
        value = self.values[name][key]
        tensor = tensor_in(value)
        where = str(self.source.root / self.file(name, key))
        if tensor is None:
            raise UnsupportedError(f"`{key}` of `{name}` is not a tensor", where=where)
        shape = self._shape(name, tensor, isinstance(value, dict) and "vocab_tensor" in value)
        if shape is None or (shape != tensor.shape and tensor.strides is not None):
            raise UnsupportedError(
                f"the shape of `{key}` of `{name}` differs from that of the parameter",
                where=where,
                why=f"{list(tensor.shape)}, expected {list(self.shapes[name])} from the model "
                "states",
            )
        if shape == tensor.shape:
            found = stored_entry((OPTIMIZER, "state", name, key), tensor, self.file(name, key))
            return entry_of(name, tensor.dtype, shape, found.extents)
        strip = Strip([Segment(self.file(name, key), tensor)])
        boxes = extents(FlatPart(shape, ((0, 0, math.prod(shape)),), 0), [strip])
        return entry_of(name, tensor.dtype, shape, boxes)

    def _shape(self, name: str, tensor: StoredTensor, cut: bool) -> Shape | None:
        """Return the parameter's shape, or None if the tensor does not match it."""
        shape = self.shapes.get(name)
        if shape is None or self.divided or shape == tensor.shape:
            return tensor.shape
        if cut and shape[1:] == tensor.shape[1:]:
            return tensor.shape
        return shape if tensor.shape == (math.prod(shape),) else None


def surroundings(save: UniversalSave) -> Leaves:
    """Return all leaves other than the model."""
    found = Leaves()
    model, where = save.model, str(save.source.root / save.model.file)
    found.add(rest_of(model), (), model.file, where)
    if save.partitioned:
        add_other_ranks(found, save.models, model, save.source)
    for name, keys in save.values.items():
        for key in keys:
            if key != FP32:
                _add_state(save, name, key, found)
    groups = [[*group] for model in save.models for group in model.groups or ()]
    for (name, key), like in lacking(save.values, groups).items():
        entry = save.missing(name, key, like) if key != FP32 else None
        if entry is not None:
            path = (OPTIMIZER, "state", name, key)
            found.tensors[".".join(path)] = replace(entry, name=".".join(path), path=path)
    _add_settings(save, found)
    return found


def _add_state(save: UniversalSave, name: str, key: str, found: Leaves) -> None:
    value = save.values[name][key]
    path = (OPTIMIZER, "state", name, key)
    file = save.file(name, key)
    if isinstance(value, StoredTensor) and (not value.shape or key == "step"):
        entry = stored_entry(path, value, file)
    elif isinstance(value, StoredTensor | dict):
        moment = save.parameter(name, key)
        entry = replace(moment, name=".".join(path), path=path)
    else:
        found.add(value, path, file, str(save.source.root / file))
        return
    found.tensors[entry.name] = entry


def _add_settings(save: UniversalSave, found: Leaves) -> None:
    """Add the settings of all parameters, and for stage 3 the counters of each."""
    file = f"{save.prefix}{ZERO}/{SETTINGS}"
    where = str(save.source.root / file)
    read = partial(read_archive, save.source, unknown="inert")
    archive = save.faults.read(file, read, (CkptError,))
    with malformed_errors("malformed settings of the optimizer", where):
        content = {} if archive is None else read_as(dict[str, object], archive.root)
    states = find_member(dict[object, object], content, "optimizer_state_dict", "state") or {}
    owners = [
        (name, number) for number, group in enumerate(save.model.groups or ()) for name in group
    ]
    for name, number in owners:
        state = find_member(dict[object, object], states.get(number)) or {}
        if "step" in state and "step" not in save.values.get(name, ()):
            found.add(state["step"], (OPTIMIZER, "state", name, "step"), file, where)
    rest = {key: item for key, item in content.items() if key not in _NOT_SETTINGS}
    groups = find_member(list[object], content, "param_groups") or ()
    settings = plain_settings(rest, groups, owners)
    found.add(settings, (OPTIMIZER,), file, where)


def read_folders(source: SourceFiles, folder: str, faults: Faults) -> FolderValues:
    """Read the files of all parameters by parameter and key (``fp32``, ``exp_avg``, ...)."""
    values: dict[str, dict[str, object]] = {}
    homes = sorted(item for item in (source.root / folder).iterdir() if item.is_dir())
    for home in homes:
        values[home.name] = {}
        for item in sorted(item for item in home.iterdir() if item.suffix == ".pt"):
            name = f"{folder}/{home.name}/{item.name}"
            found = faults.read(name, lambda file: (_value(source, file),), (CkptError,))
            if found is not None:
                values[home.name][item.stem] = found[0]
    return values


def _value(source: SourceFiles, name: str) -> object:
    archive = read_archive(source, name, unknown="inert")
    file = name.rpartition("/")[2]
    if archive.folder not in (file.removesuffix(".pt"), "archive"):
        raise UnsupportedError(
            f"the content of `{file}` does not match its name",
            where=str(source.root / name),
            why=f"it was saved as `{archive.folder}.pt`",
        )
    return archive.root


def tensor_in(value: object) -> StoredTensor | None:
    """Return the tensor in a parameter's file, which may be below ``param``, or None."""
    tensor = value.get("param") if isinstance(value, dict) else value
    return tensor if isinstance(tensor, StoredTensor) else None


def lacking(values: FolderValues, groups: Iterable[Sequence[str]]) -> dict[tuple[str, str], object]:
    """Find values that parameters lack, but others of their group have.

    Returns the value of another parameter for each missing ``(parameter, key)``.
    """
    found: dict[tuple[str, str], object] = {}
    for names in groups:
        usual: dict[str, object] = {}
        for name in names:
            usual = {**values.get(name, {}), **usual}
        for name in names:
            for key in usual.keys() - values.get(name, {}).keys():
                found[name, key] = usual[key]
    return found


def read_models(
    source: SourceFiles, names: tuple[str, ...], partitioned: bool, faults: Faults
) -> tuple[ModelState, ...]:
    """Read the model states of all ranks."""
    read = partial(read_model, source, whole=False)
    held = [faults.read(name, read, (CkptError,)) for name in names]
    first = next((model for model in held if model is not None), None)
    if first is None:
        read(names[0])
        raise UnsupportedError("the model states changed", where=str(source.root / names[0]))
    world = first.content.get("dp_world_size")
    if partitioned and isinstance(world, int) and len(names) != world:
        names = require_world(source.root, names, world, "model", faults)
    return complete_models([*held, *(None,) * (len(names) - len(held))], names)
