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
    format_option,
    quote_names,
)
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.deepspeed.deepspeed_files import (
    FP32,
    ZERO,
    find_model_files,
    require_files_of_all_ranks,
)
from ckptctl.formats.deepspeed.deepspeed_model import (
    MODULE_KEY,
    MasterWeights,
    extract_module_leaves,
    make_parameter_entry,
)
from ckptctl.formats.deepspeed.optimizer import (
    OPTIMIZER,
    add_other_rank_leaves,
    build_optimizer_settings,
    extract_non_model_entries,
)
from ckptctl.formats.deepspeed.partitions import (
    FlatLocation,
    FlatVector,
    Segment,
    Shape,
    locate_extents,
)
from ckptctl.formats.deepspeed.states import ModelState, read_model_state
from ckptctl.formats.deepspeed.zero import fill_missing_models
from ckptctl.formats.shared.findings import FaultCollector
from ckptctl.formats.shared.stored_leaves import NO_CHECKSUMS, Leaves, make_stored_entry
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.paths import is_present
from ckptctl.storage.schema import read_as, read_nested_or_none, wrap_malformed_errors
from ckptctl.storage.zips.zip_reader import StoredTensor, read_archive
from ckptctl.tree import TreePath
from ckptctl.units import pluralize, sort_naturally

_NON_SETTINGS_KEYS = (
    "param_groups",
    "optimizer_state_dict",
    "fp32_flat_groups",
    "zero_stage",
    "partition_count",
    "group_paddings",
    "param_alignment_paddings",
    "ds_version",
)
SETTINGS_FILE = "optimizer_state.pt"
ParameterValues = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class UniversalSave:
    """Universal checkpoint whose files have been read.

    Attributes:
        source: Files of the checkpoint.
        prefix: Tag folder, which is the prefix of every file name.
        models: Model states of tensor-parallel ranks, or for stage 3 of all ranks.
        partitioned: Whether it was converted from stage 3.
        values: Content of each value file, by parameter name and key (``fp32``, ``exp_avg``, ...).
        shapes: Shapes of the optimized parameters in the model states, by name.
        faults: Collector of missing and unusable files.
    """

    source: SourceFiles
    prefix: str
    models: tuple[ModelState, ...]
    partitioned: bool
    values: ParameterValues
    shapes: Mapping[str, Shape]
    faults: FaultCollector

    @classmethod
    def open_save(cls, source: SourceFiles, prefix: str, partial: bool = False) -> UniversalSave:
        """Read all files of the checkpoint.

        If *partial*, missing and unusable files become findings instead of errors.
        """
        faults = FaultCollector(source.root, partial)
        names = find_model_files(source.root, prefix.rstrip("/"), faults)
        finished = is_present(source.root / prefix / ZERO / SETTINGS_FILE)
        if names and not finished and partial:
            faults.add_missing_file(f"{prefix}{ZERO}/{SETTINGS_FILE}", "the optimizer's settings")
        elif not names or not finished:
            raise DamagedError(
                "the conversion to a universal checkpoint was not finished",
                where=str(source.root / prefix),
                why=f"`{ZERO}/{SETTINGS_FILE}` is missing"
                if names
                else "the model states are missing",
                hint="run ds_to_universal.py again",
            )
        partitioned = "zero_pp_rank" in names[0]
        models = read_model_states(source, names, partitioned, faults)
        values = read_parameter_values(source, prefix + ZERO, faults)
        shapes = {name: shape for model in models for name, shape in model.shapes.items()}
        return cls(source, prefix, models, partitioned, values, shapes, faults)

    @property
    def model(self) -> ModelState:
        """Model states of the first rank whose model-state file could be read."""
        return next(model for model in self.models if not model.is_placeholder)

    def list_files(self) -> list[str]:
        """Return the names of all files of the checkpoint, except unusable ones."""
        inner = (
            self.format_value_file(name, key) for name in self.values for key in self.values[name]
        )
        names = [
            *(model.file for model in self.models),
            *inner,
            f"{self.prefix}{ZERO}/{SETTINGS_FILE}",
        ]
        return [name for name in names if name not in self.faults.unusable_files]

    def format_value_file(self, name: str, key: str) -> str:
        """Return the path of the file with the value *key* of the parameter *name*."""
        return f"{self.prefix}{ZERO}/{name}/{key}.pt"

    def list_notes(self) -> Iterator[str]:
        """Yield notes about missing checksums and missing buffers."""
        if not self.model.has_checksums:
            yield NO_CHECKSUMS
        if self.model.content["module"] is None:
            yield (
                "buffers are missing: universal checkpoints of a pipeline engine do not contain "
                "them"
            )

    @property
    def is_divided(self) -> bool:
        """Whether tensor or pipeline parallelism divided the model states."""
        first = self.model.content
        return first.get("mp_world_size", 1) != 1 or first["module"] is None

    def read_weights(self, options: ReadOptions) -> Leaves:
        """Return the weights that *options* select, by default the fp32 parameters."""
        root = self.source.root
        if options.weights == "module":
            if self.partitioned or self.is_divided:
                raise UsageError(
                    "the weights in `module` are divided among the ranks",
                    where=str(root / self.models[0].file),
                    hint=f"pass {format_option('--weights master')}",
                )
            return extract_module_leaves(self.model)
        zero = (
            read_nested_or_none(
                dict[str, object], self.model.content, "ds_config", "zero_optimization"
            )
            or {}
        )
        shuffled = zero.get("round_robin_gradients")
        if shuffled and not self.partitioned and self.model.content.get("dp_world_size") != 1:
            raise FormatError(
                "ds_to_universal.py mixed up the parameters of this checkpoint",
                where=str(root / self.models[0].file),
                why="the converter ignores the parameter order of `round_robin_gradients`",
                hint=f"read the original checkpoint, or pass {format_option('--weights module')}",
            )
        missing = [name for name in self.shapes if FP32 not in self.values.get(name, {})]
        if missing and not self.faults.partial:
            raise DamagedError(
                f"{pluralize(len(missing), 'parameter is', 'parameters are')} missing",
                where=str(root / self.prefix / ZERO),
                why=quote_names([f"{name}/{FP32}.pt" for name in missing]),
            )
        if not self.is_divided:
            parameters = self._build_parameter_entries(
                {*self.model.module, *self.model.frozen_shapes}
            )
            return MasterWeights(
                self.models, parameters, self.partitioned, self.faults
            ).build_leaves()
        return self._extract_undivided_weights(root)

    def _extract_undivided_weights(self, root: TreePath) -> Leaves:
        """Return the model if tensor or pipeline parallelism divided the model states.

        Parameters are read from the ``zero`` folder, and buffers from the first model states.
        """
        first = self.model
        buffer_names = set(read_nested_or_none(list[str], first.content, "buffer_names") or ())
        module = {name: item for name, item in first.module.items() if name in buffer_names}
        parameters = self._build_parameter_entries(buffer_names)
        lost = [*(first.module.keys() - parameters.keys() - buffer_names - first.tied_names.keys())]
        if lost and self.faults.partial:
            for name in lost:
                why = "it is divided among the model states of several ranks"
                self.faults.add_missing_tensor(name, why, self.format_value_file(name, FP32))
        elif lost:
            raise DamagedError(
                f"{pluralize(len(lost), 'tensor is', 'tensors are')} not stored as a whole in any "
                "file",
                where=str(root / self.prefix / ZERO),
                why=f"the model states contain {quote_names(sort_naturally(lost))}, divided "
                "among the ranks",
            )
        model = replace(first, module=module)
        return MasterWeights((model,), parameters, False, self.faults).build_leaves()

    def _build_parameter_entries(self, other_names: Set[str]) -> dict[str, TensorEntry]:
        """Return the fp32 parameters in the ``zero`` folder, with placeholders for missing ones.

        Tensors in *other_names* are skipped unless they are optimized.
        """
        entries = {
            name: self.build_value_entry(name, FP32)
            for name in sort_naturally(self.values)
            if FP32 in self.values[name] and (name in self.shapes or name not in other_names)
        }
        placeholders = (
            (name, self.make_placeholder(name, FP32, None)) for name in self.shapes.keys() - entries
        )
        return {**entries, **{name: entry for name, entry in placeholders if entry is not None}}

    def make_placeholder(self, name: str, key: str, template: object) -> TensorEntry | None:
        """Return a placeholder for the missing value *key*, or None if its shape is unknown.

        *template* is the value *key* of another parameter, or None.
        """
        file, shape = self.format_value_file(name, key), self._find_shape(name)
        if file not in self.faults.unusable_files:
            self.faults.add_missing_file(file, f"`{key}` of the parameter `{name}`")
        other_values = (
            keys[key] for n, keys in self.values.items() if n in self.shapes and key in keys
        )
        sample = get_value_tensor(template or next(other_values, None))
        if sample is None and not self.faults.partial:
            where = str(self.source.root / file)
            raise DamagedError(f"`{key}` of `{name}` is missing", where=where)
        if sample is None or (shape is None and sample.shape):
            self.faults.add_missing_tensor(
                f"{MODULE_KEY}.{name}" if key == FP32 else f"{name}.{key}", file, file
            )
            return None
        shape = shape if sample.shape and key != "step" and shape is not None else sample.shape
        return make_parameter_entry(
            name, sample.dtype, shape, (Extent(Box.whole(shape), file, 0, 0),)
        )

    def _find_shape(self, name: str) -> Shape | None:
        """Return the shape of a parameter, or None if it is unknown.

        Other values of the parameter take precedence over the model states, because the converter
        may truncate or pad the vocabulary.
        """
        for key, value in self.values.get(name, {}).items():
            tensor = get_value_tensor(value)
            if key != "step" and tensor is not None and tensor.shape:
                return self.build_value_entry(name, key).shape
        return None if self.is_divided else self.shapes[name]

    def build_value_entry(self, name: str, key: str) -> TensorEntry:
        """Return the value *key* of a parameter, with the shape of the parameter if stored flat."""
        value = self.values[name][key]
        tensor = get_value_tensor(value)
        where = str(self.source.root / self.format_value_file(name, key))
        if tensor is None:
            raise UnsupportedError(f"`{key}` of `{name}` is not a tensor", where=where)
        shape = self._resolve_shape(
            name, tensor, isinstance(value, dict) and "vocab_tensor" in value
        )
        if shape is None or (shape != tensor.shape and tensor.strides is not None):
            raise UnsupportedError(
                f"the shape of `{key}` of `{name}` differs from that of the parameter",
                where=where,
                why=f"{list(tensor.shape)}, expected {list(self.shapes[name])} from the model "
                "states",
            )
        if shape == tensor.shape:
            stored = make_stored_entry(
                (OPTIMIZER, "state", name, key), tensor, self.format_value_file(name, key)
            )
            return make_parameter_entry(name, tensor.dtype, shape, stored.extents)
        vector = FlatVector([Segment(self.format_value_file(name, key), tensor)])
        boxes = locate_extents(FlatLocation(shape, ((0, 0, math.prod(shape)),), 0), [vector])
        return make_parameter_entry(name, tensor.dtype, shape, boxes)

    def _resolve_shape(self, name: str, tensor: StoredTensor, is_truncated: bool) -> Shape | None:
        """Return the shape to give to a value of a parameter, or None if its shape does not fit."""
        shape = self.shapes.get(name)
        if shape is None or self.is_divided or shape == tensor.shape:
            return tensor.shape
        if is_truncated and shape[1:] == tensor.shape[1:]:
            return tensor.shape
        return shape if tensor.shape == (math.prod(shape),) else None


def extract_training_state(save: UniversalSave) -> Leaves:
    """Return all leaves except the model, with the optimizer state by parameter name."""
    leaves = Leaves()
    model, where = save.model, str(save.source.root / save.model.file)
    leaves.add_object(extract_non_model_entries(model), (), model.file, where)
    if save.partitioned:
        add_other_rank_leaves(leaves, save.models, model, save.source)
    for name, keys in save.values.items():
        for key in keys:
            if key != FP32:
                _add_optimizer_value(save, name, key, leaves)
    groups = [[*group] for model in save.models for group in model.groups or ()]
    for (name, key), template in find_missing_values(save.values, groups).items():
        entry = save.make_placeholder(name, key, template) if key != FP32 else None
        if entry is not None:
            path = (OPTIMIZER, "state", name, key)
            leaves.tensors[".".join(path)] = replace(entry, name=".".join(path), path=path)
    _add_settings(save, leaves)
    return leaves


def _add_optimizer_value(save: UniversalSave, name: str, key: str, leaves: Leaves) -> None:
    value = save.values[name][key]
    path = (OPTIMIZER, "state", name, key)
    file = save.format_value_file(name, key)
    if isinstance(value, StoredTensor) and (not value.shape or key == "step"):
        entry = make_stored_entry(path, value, file)
    elif isinstance(value, StoredTensor | dict):
        moment = save.build_value_entry(name, key)
        entry = replace(moment, name=".".join(path), path=path)
    else:
        leaves.add_object(value, path, file, str(save.source.root / file))
        return
    leaves.tensors[entry.name] = entry


def _add_settings(save: UniversalSave, leaves: Leaves) -> None:
    """Add the optimizer's settings, and step counters that only the settings file contains."""
    file = f"{save.prefix}{ZERO}/{SETTINGS_FILE}"
    where = str(save.source.root / file)
    read_file = partial(read_archive, save.source, unknown="inert")
    archive = save.faults.try_read(file, read_file, (CkptError,))
    with wrap_malformed_errors("malformed settings of the optimizer", where):
        content = {} if archive is None else read_as(dict[str, object], archive.root)
    states = (
        read_nested_or_none(dict[object, object], content, "optimizer_state_dict", "state") or {}
    )
    owners = [
        (name, number) for number, group in enumerate(save.model.groups or ()) for name in group
    ]
    for name, number in owners:
        state = read_nested_or_none(dict[object, object], states.get(number)) or {}
        if "step" in state and "step" not in save.values.get(name, ()):
            leaves.add_object(state["step"], (OPTIMIZER, "state", name, "step"), file, where)
    rest = {key: item for key, item in content.items() if key not in _NON_SETTINGS_KEYS}
    groups = read_nested_or_none(list[object], content, "param_groups") or ()
    settings = build_optimizer_settings(rest, groups, owners)
    leaves.add_object(settings, (OPTIMIZER,), file, where)


def read_parameter_values(
    source: SourceFiles, folder: str, faults: FaultCollector
) -> ParameterValues:
    """Read the value files of all parameters, by parameter name and key (``fp32``, ...)."""
    values: dict[str, dict[str, object]] = {}
    homes = sorted(item for item in (source.root / folder).iterdir() if item.is_dir())
    for home in homes:
        values[home.name] = {}
        for item in sorted(item for item in home.iterdir() if item.suffix == ".pt"):
            name = f"{folder}/{home.name}/{item.name}"
            content = faults.try_read(name, lambda file: (_read_value(source, file),), (CkptError,))
            if content is not None:
                values[home.name][item.stem] = content[0]
    return values


def _read_value(source: SourceFiles, name: str) -> object:
    archive = read_archive(source, name, unknown="inert")
    file = name.rpartition("/")[2]
    if archive.folder not in (file.removesuffix(".pt"), "archive"):
        raise UnsupportedError(
            f"the content of `{file}` does not match its name",
            where=str(source.root / name),
            why=f"it was saved as `{archive.folder}.pt`",
        )
    return archive.root


def get_value_tensor(value: object) -> StoredTensor | None:
    """Return the tensor that a value file contains directly or under ``param``, or None."""
    tensor = value.get("param") if isinstance(value, dict) else value
    return tensor if isinstance(tensor, StoredTensor) else None


def find_missing_values(
    values: ParameterValues, groups: Iterable[Sequence[str]]
) -> dict[tuple[str, str], object]:
    """Find values that are missing for a parameter although others of its group have them.

    Maps each missing ``(parameter name, key)`` to the value *key* of another parameter.
    """
    missing: dict[tuple[str, str], object] = {}
    for names in groups:
        group_values: dict[str, object] = {}
        for name in names:
            group_values = {**values.get(name, {}), **group_values}
        for name in names:
            for key in group_values.keys() - values.get(name, {}).keys():
                missing[name, key] = group_values[key]
    return missing


def read_model_states(
    source: SourceFiles, names: tuple[str, ...], partitioned: bool, faults: FaultCollector
) -> tuple[ModelState, ...]:
    """Read the model-state files *names*, with placeholders for missing or unusable files."""
    read_state = partial(read_model_state, source, require_undivided=False)
    states = [faults.try_read(name, read_state, (CkptError,)) for name in names]
    first = next((model for model in states if model is not None), None)
    if first is None:
        read_state(names[0])
        raise UnsupportedError("the model states changed", where=str(source.root / names[0]))
    world = first.content.get("dp_world_size")
    if partitioned and isinstance(world, int) and len(names) != world:
        names = require_files_of_all_ranks(source.root, names, world, "model", faults)
    return fill_missing_models([*states, *(None,) * (len(names) - len(states))], names)
