"""What a universal checkpoint of DeepSpeed holds: whole parameters, each in a folder of its own.

Source: ``deepspeed/checkpoint/ds_to_universal.py``. Stage 3 leaves tensors flat. The converter
makes all buffers float32, so they come from the model states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

from ckptctl.catalog import TensorEntry
from ckptctl.errors import DamagedError, FormatError, UsageError, listed
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.deepspeed_files import model_names, require_world
from ckptctl.formats.deepspeed_model import as_saved, entry_of, master
from ckptctl.formats.deepspeed_optimizer import OPTIMIZER, Leaves, plain_settings, stored_entry
from ckptctl.formats.deepspeed_partitions import Part, Segment, Shape, Strip, extents
from ckptctl.formats.deepspeed_states import INDEX, ModelState, read_model
from ckptctl.formats.torch_file import NO_CHECKSUMS, Contents
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.torch_zip import StoredTensor, read_archive
from ckptctl.units import natural

ZERO = "zero"
FP32 = "fp32"
SETTINGS = "optimizer_state.pt"
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


@dataclass(frozen=True, slots=True)
class UniversalSave:
    """One universal checkpoint.

    Attributes:
        source: The checkpoint's files.
        prefix: Of all names: the tag's folder.
        models: Model states: of tensor-parallel ranks, or of all ranks at stage 3.
        partitioned: Whether it was made from stage 3.
        values: By parameter and key (``fp32``, ``exp_avg``, ...) what that file holds.
        shapes: The optimised parameters that the model states name.
    """

    source: SourceFiles
    prefix: str
    models: tuple[ModelState, ...]
    partitioned: bool
    values: Mapping[str, Mapping[str, object]]
    shapes: Mapping[str, Shape]

    @classmethod
    def of(cls, source: SourceFiles, prefix: str) -> UniversalSave:
        """Read everything.

        Raises:
            DamagedError: Files are missing, or are not what they should be.
        """
        folder = source.root / prefix
        names = [prefix + name for name in model_names(folder)]
        if not names or not (folder / ZERO / SETTINGS).is_file():
            raise DamagedError(
                "the conversion to a universal checkpoint was not finished",
                where=str(folder),
                why=f"`{ZERO}/{SETTINGS}` is missing" if names else "the model states are missing",
                hint="run ds_to_universal.py again",
            )
        partitioned = "zero_pp_rank" in names[0]
        models = tuple(read_model(source, name, whole=False) for name in names)
        world = models[0].content.get("dp_world_size")
        if partitioned and isinstance(world, int) and len(models) != world:
            require_world(source.root, tuple(names), world, "model")
        values = {
            item.name: dict(_values(source, f"{prefix}{ZERO}/{item.name}"))
            for item in sorted((folder / ZERO).iterdir())
            if item.is_dir()
        }
        shapes = {name: shape for model in models for name, shape in model.shapes.items()}
        return cls(source, prefix, models, partitioned, values, shapes)

    def files(self) -> list[str]:
        """Return the names of all files that are part of it."""
        inner = (self.file(name, key) for name in self.values for key in self.values[name])
        return [
            *(model.file for model in self.models),
            *inner,
            f"{self.prefix}{ZERO}/{SETTINGS}",
        ]

    def file(self, name: str, key: str) -> str:
        """Return the file of one value of a parameter."""
        return f"{self.prefix}{ZERO}/{name}/{key}.pt"

    def notes(self) -> Iterator[str]:
        """Yield what a reader should know."""
        if not self.models[0].checksums:
            yield NO_CHECKSUMS
        if self.models[0].content["module"] is None:
            yield "saved by a pipeline engine: its buffers are not part of a universal checkpoint"

    @property
    def divided(self) -> bool:
        """Return whether tensor or pipeline parallelism divided the model states."""
        first = self.models[0].content
        return first.get("mp_world_size", 1) != 1 or first["module"] is None

    def weights(self, asked: ReadOptions) -> Contents:
        """Return the model as asked for."""
        root = self.source.root
        if asked.weights == "module":
            if self.partitioned or self.divided:
                raise UsageError(
                    "the weights in `module` are divided among ranks",
                    where=str(root / self.models[0].file),
                    hint="`--weights master`",
                )
            return as_saved(self.models[0], root)
        self._require_order()
        missing = [name for name in self.shapes if FP32 not in self.values.get(name, {})]
        if missing:
            raise DamagedError(
                f"{len(missing)} parameters are missing",
                where=str(root / self.prefix / ZERO),
                why=listed([f"{name}/{FP32}.pt" for name in missing]),
            )
        if not self.divided:
            found = self._parameters({*self.models[0].module, *self.models[0].frozen})
            return master(self.models, found, self.partitioned, root)
        return self._undivided(root)

    def _undivided(self, root: Path) -> Contents:
        """The model where no model states have whole tensors, except for buffers."""
        first = self.models[0]
        buffers = first.content.get("buffer_names")
        kept = set(buffers) if isinstance(buffers, list) else set()
        module = {name: item for name, item in first.module.items() if name in kept}
        found = self._parameters(kept)
        lost = [*(first.module.keys() - found.keys() - kept - first.shared.keys())]
        if lost:
            raise DamagedError(
                f"{len(lost)} tensors are whole nowhere",
                where=str(root / self.prefix / ZERO),
                why=f"model states have {listed(natural(lost))}, divided among ranks",
            )
        return master((replace(first, module=module),), found, False, root)

    def _require_order(self) -> None:
        """Refuse what the converter gets wrong: it ignores the order of round robin."""
        config = self.models[0].content.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        shuffled = isinstance(zero, dict) and zero.get("round_robin_gradients")
        if shuffled and not self.partitioned and self.models[0].content.get("dp_world_size") != 1:
            raise FormatError(
                "ds_to_universal.py mixes up the parameters of such a checkpoint",
                where=str(self.source.root / self.models[0].file),
                why="the converter ignores the order that `round_robin_gradients` gives them",
                hint="read the checkpoint that it was made from, or `--weights module`",
            )

    def _parameters(self, others: Set[str]) -> dict[str, TensorEntry]:
        """The tensors under ``zero`` that are parameters, and not *others*."""
        return {
            name: self._parameter(name, FP32)
            for name in natural(self.values)
            if FP32 in self.values[name] and (name in self.shapes or name not in others)
        }

    def _parameter(self, name: str, key: str) -> TensorEntry:
        """One tensor; stage 3 leaves it flat."""
        value = self.values[name][key]
        tensor = value.get("param") if isinstance(value, dict) else value
        where = str(self.source.root / self.file(name, key))
        if not isinstance(tensor, StoredTensor):
            raise DamagedError(f"`{key}` of `{name}` is not a tensor", where=where)
        shape = self._shape(name, tensor, isinstance(value, dict) and "vocab_tensor" in value)
        if shape is None or (shape != tensor.shape and tensor.strides is not None):
            raise DamagedError(
                f"`{key}` of `{name}` has another shape than the parameter",
                where=where,
                why=f"{list(tensor.shape)}, the model states say {list(self.shapes[name])}",
            )
        if shape == tensor.shape:
            found = stored_entry((OPTIMIZER, "state", name, key), tensor, self.file(name, key))
            return entry_of(name, tensor.dtype, shape, found.extents)
        strip = Strip([Segment(self.file(name, key), tensor)])
        boxes = extents(Part(shape, ((0, 0, math.prod(shape)),), 0), [strip])
        return entry_of(name, tensor.dtype, shape, boxes)

    def _shape(self, name: str, tensor: StoredTensor, cut: bool) -> Shape | None:
        """The parameter's shape; None where the tensor cannot have it."""
        shape = self.shapes.get(name)
        if shape is None or self.divided or shape == tensor.shape:
            return tensor.shape
        if cut and shape[1:] == tensor.shape[1:]:
            return tensor.shape
        return shape if tensor.shape == (math.prod(shape),) else None

    def surroundings(self) -> Leaves:
        """Return everything outside the model."""
        found = Leaves()
        model, where = self.models[0], str(self.source.root / self.models[0].file)
        rest = {key: value for key, value in model.content.items() if key not in INDEX}
        if rest.get(OPTIMIZER, found) is None:
            del rest[OPTIMIZER]
        found.add(rest, (), model.file, where)
        for name, keys in self.values.items():
            for key in keys:
                if key != FP32:
                    self._add_state(name, key, found)
        self._add_settings(found)
        return found

    def _add_state(self, name: str, key: str, found: Leaves) -> None:
        value = self.values[name][key]
        path = (OPTIMIZER, "state", name, key)
        file = self.file(name, key)
        if isinstance(value, StoredTensor) and (not value.shape or key == "step"):
            entry = stored_entry(path, value, file)
        elif isinstance(value, StoredTensor | dict):
            moment = self._parameter(name, key)
            entry = replace(moment, name=".".join(path), path=path)
        else:
            found.add(value, path, file, str(self.source.root / file))
            return
        found.tensors[entry.name] = entry

    def _add_settings(self, found: Leaves) -> None:
        """Add what all parameters have in common, and at stage 3 the counters of each."""
        file = f"{self.prefix}{ZERO}/{SETTINGS}"
        where = str(self.source.root / file)
        content = read_archive(self.source, file, unknown="inert").root
        if not isinstance(content, dict):
            raise DamagedError("the optimizer's settings are not a dict", where=where)
        groups, inner = content.get("param_groups"), content.get("optimizer_state_dict")
        states = inner.get("state") if isinstance(inner, dict) else None
        owners = [
            (name, number)
            for number, group in enumerate(self.models[0].groups or ())
            for name in group
        ]
        for name, number in owners:
            state = states.get(number) if isinstance(states, dict) else None
            if (
                isinstance(state, dict)
                and "step" in state
                and "step" not in self.values.get(name, ())
            ):
                found.add(state["step"], (OPTIMIZER, "state", name, "step"), file, where)
        rest = {key: item for key, item in content.items() if key not in _NOT_SETTINGS}
        settings = plain_settings(rest, groups if isinstance(groups, list) else (), owners)
        found.add(settings, (OPTIMIZER,), file, where)


def _values(source: SourceFiles, folder: str) -> Iterator[tuple[str, object]]:
    """Yield key and content of every file of a parameter."""
    for item in sorted((source.root / folder).iterdir()):
        if item.suffix != ".pt":
            continue
        archive = read_archive(source, f"{folder}/{item.name}", unknown="inert")
        if archive.folder not in (item.stem, "archive"):
            raise DamagedError(
                f"`{item.name}` is not what it is called",
                where=str(item),
                why=f"it was saved as `{archive.folder}.pt`",
            )
        yield item.stem, archive.root
