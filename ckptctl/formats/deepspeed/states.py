"""What the model and optimizer states of one DeepSpeed rank say, checked and named.

Source: ``deepspeed/runtime/engine.py`` (``_common_checkpoint_state``), ``zero/stage_1_and_2.py``,
``zero/stage3.py``, ``bf16_optimizer.py`` (``state_dict`` of each). Nothing of DeepSpeed is
imported: its classes, and all others that are not torch's, become inert records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import cast

from ckptctl.errors import FormatError, UnsupportedError, listed
from ckptctl.formats.deepspeed.files import ADVICE, saved_name
from ckptctl.formats.deepspeed.partitions import Segment, Shape
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.inert import Inert
from ckptctl.storage.pickles.torch_tensors import MAX_RANK
from ckptctl.storage.zips.reader import StoredTensor, TorchArchive, read_archive

INDEX = (
    "module",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "buffer_names",
)
_EXPERTS = ("ds_autoep_layers", "autoep_layers", "ds_zero_partition_groups")


def _mapping_of(value: object, what: str, where: str) -> Mapping[str, object]:
    """Return a dict whose keys are strings."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UnsupportedError(f"`{what}` is not a mapping with string keys", where=where)
    return value


def _items_of(value: object, what: str, where: str) -> Sequence[object]:
    """Return a list or tuple that is not empty."""
    if not isinstance(value, list | tuple) or not value:
        raise UnsupportedError(f"`{what}` is not a non-empty list", where=where)
    return value


def _whole_number(value: object, what: str, where: str) -> int:
    """Return a number that is not negative."""
    if type(value) is not int or value < 0:
        raise UnsupportedError(f"`{what}` is not a number", where=where)
    return value


def _shape_of(value: object, where: str) -> Shape:
    """Return the shape of a parameter."""
    if isinstance(value, tuple | list) and len(value) <= MAX_RANK:
        return tuple(_whole_number(size, "a size of a parameter", where) for size in value)
    raise UnsupportedError("the shape of a parameter is malformed", where=where)


def _shapes_of(value: object, where: str) -> dict[str, Shape]:
    """Return the shapes of parameters by name."""
    found = _mapping_of(value, "the shapes of parameters", where)
    return {name: _shape_of(shape, where) for name, shape in found.items()}


def _groups_of(value: object, where: str) -> tuple[dict[str, Shape], ...]:
    """Return a dict per group; versions before 0.6 wrote the only group without a list."""
    many = [value] if isinstance(value, dict) else _items_of(value, "param_shapes", where)
    groups = tuple(_shapes_of(group, where) for group in many)
    names = [name for group in groups for name in group]
    if len(set(names)) < len(names):
        raise UnsupportedError("`param_shapes` contains a parameter twice", where=where)
    return groups


def _segment_of(value: object, file: str, where: str) -> Segment:
    """Return a partition: a flat tensor without gaps."""
    if not isinstance(value, StoredTensor) or len(value.shape) != 1 or value.strides is not None:
        raise UnsupportedError("a partition is not a flat tensor", where=where)
    return Segment(file, value)


def _stage_of(value: object, where: str) -> int:
    """Return the number in a ``ZeroStageEnum``, which is a record here."""
    if isinstance(value, Inert) and len(value.args) == 1:
        value = value.args[0]
    if type(value) is not int or value not in (1, 2):
        raise UnsupportedError("`zero_stage` does not match the partitions", where=where)
    return value


def _world_of(value: object, where: str) -> int:
    """Return the number of ranks, which all groups must have in common."""
    counts = {
        _whole_number(count, "partition_count", where)
        for count in (value if isinstance(value, list | tuple) else [value])
    }
    if len(counts) > 1:
        raise FormatError(
            "expert parallelism is not supported",
            where=where,
            why=f"parameter groups have {' or '.join(map(str, sorted(counts)))} partitions",
        )
    if not counts or counts == {0}:
        raise UnsupportedError("`partition_count` is not a valid number of ranks", where=where)
    return counts.pop()


def _paddings_of(value: object, where: str) -> tuple[tuple[int, ...], ...] | None:
    """Return the elements after each parameter of each group; None: none."""
    if value is None:
        return None
    groups = _items_of(value, "param_alignment_paddings", where)
    if not all(isinstance(group, list | tuple) for group in groups):
        raise UnsupportedError(
            "`param_alignment_paddings` does not contain a list for each group", where=where
        )
    return tuple(
        tuple(_whole_number(gap, "an alignment padding", where) for gap in group)
        for group in cast("Sequence[Sequence[object]]", groups)
    )


def _mappings_of(value: object) -> tuple[Mapping[str, tuple[object, object]], ...] | None:
    """Return ``(start, numel)`` of every ``fragment_address``; None: they are not recorded."""
    if not isinstance(value, list):
        return None
    return tuple(
        {
            name: (record.state.get("start"), record.state.get("numel"))
            for name, record in group.items()
            if isinstance(record, Inert) and isinstance(record.state, dict)
        }
        for group in value
        if isinstance(group, dict)
    )


def _base_of(
    value: object, count: int, where: str
) -> tuple[tuple[Mapping[str, object], ...], Sequence[object]]:
    """Return the inner optimizer's states by partition, and its settings.

    Elastic checkpoints have a list of states; files that a script has made smaller have none.
    """
    if value is None:
        return ({},) * count, ()
    if isinstance(value, list):
        elastic = dict(enumerate(value))
        return tuple(_mapping_of(elastic.get(n, {}), "state", where) for n in range(count)), ()
    base = _mapping_of(value, "the inner optimizer's state", where)
    state, settings = base.get("state"), base.get("param_groups")
    found = state if isinstance(state, dict) else {}
    states = tuple(_mapping_of(found.get(n, {}), "state", where) for n in range(count))
    return states, settings if isinstance(settings, list) else ()


@dataclass(frozen=True, slots=True)
class ModelState:
    """The model states of one rank.

    Attributes:
        file: Relative to the checkpoint's root.
        content: All of it.
        module: The module's state dict.
        groups: Names and shapes in the optimizer's flat vectors; None: no ZeRO (stage 0).
        frozen: Names and shapes of parameters that are not optimized.
        fragments: Those parameters, or at stage 3 this rank's share of each.
        shared: Names that have no data of their own, each with the one that has.
        checksums: Whether the file has checksums.
        absent: Whether this stands for a rank whose file cannot be used.
    """

    file: str
    content: Mapping[str, object]
    module: Mapping[str, object]
    groups: tuple[dict[str, Shape], ...] | None
    frozen: Mapping[str, Shape]
    fragments: Mapping[str, object]
    shared: Mapping[str, str]
    checksums: bool
    absent: bool = False

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the optimized parameters in the order of the flat vectors."""
        return {name: shape for group in self.groups or () for name, shape in group.items()}


@dataclass(frozen=True, slots=True)
class OptimState:
    """The optimizer states of one rank.

    Attributes:
        file: Relative to the checkpoint's root.
        stage: 1, 2 or 3; ``BF16_Optimizer`` counts as 1.
        world: The number of ranks that the partitions were made for.
        partitions: The rank's part of each group, or at stage 3 of each sub-group.
        paddings: Elements after each parameter of each group; None: none.
        mappings: For each group the first element and the number of elements that the rank holds
            of each parameter, as far as round robin did not change them; None: not recorded.
        states: The inner optimizer's state for each partition.
        settings: The inner optimizer's ``param_groups``.
        rest: Everything else: loss scaler, gradient clipping, ...
        absent: Whether this stands for a rank whose file cannot be used.
    """

    file: str
    stage: int
    world: int
    partitions: tuple[Segment, ...]
    paddings: tuple[tuple[int, ...], ...] | None
    mappings: tuple[Mapping[str, tuple[object, object]], ...] | None
    states: tuple[Mapping[str, object], ...]
    settings: Sequence[object]
    rest: Mapping[str, object]
    absent: bool = False


def read_model(files: SourceFiles, name: str, *, whole: bool = True) -> ModelState:
    """Read one file of model states."""
    archive = _archive(files, name)
    where = str(files.root / name)
    content = _mapping_of(archive.root, "the file", where)
    if "module" not in content or not content.keys() & {"dp_world_size", "ds_version"}:
        raise UnsupportedError(
            "the file does not contain model states",
            where=where,
            why=f"it contains {listed([*content])}",
        )
    _refuse_experts(content, where)
    if whole:
        _refuse_divided(content, where)
    shared = _mapping_of(content.get("shared_params") or {}, "shared_params", where)
    if not all(isinstance(source, str) for source in shared.values()):
        raise UnsupportedError("`shared_params` is not a mapping with string keys", where=where)
    groups = content.get("param_shapes")
    return ModelState(
        file=name,
        content=content,
        module={} if content["module"] is None else _mapping_of(content["module"], "module", where),
        groups=None if groups is None else _groups_of(groups, where),
        frozen=_shapes_of(content.get("frozen_param_shapes") or {}, where),
        fragments=_mapping_of(content.get("frozen_param_fragments") or {}, "fragments", where),
        shared=cast("dict[str, str]", shared),
        checksums=archive.checksums,
    )


def read_optim(files: SourceFiles, name: str) -> OptimState:
    """Read one file of optimizer states."""
    where = str(files.root / name)
    content = _mapping_of(_archive(files, name).root, "the file", where)
    inner = _mapping_of(content.get("optimizer_state_dict"), "optimizer_state_dict", where)
    _refuse_experts(inner, where)
    sharded = "fp32_flat_groups" in inner
    key = "fp32_flat_groups" if sharded else "single_partition_of_fp32_groups"
    if key not in inner:
        raise FormatError(
            "unknown kind of optimizer states",
            where=where,
            why=f"found the keys {listed([*inner])}",
            hint="use a checkpoint of DeepSpeed 0.4 or later",
        )
    partitions = tuple(_segment_of(item, name, where) for item in _items_of(inner[key], key, where))
    base_key = "optimizer_state_dict" if sharded else "base_optimizer_state"
    states, settings = _base_of(inner.get(base_key), len(partitions), where)
    index = {key, base_key, "zero_stage", "partition_count", "ds_version"}
    index |= {"group_paddings", "param_alignment_paddings", "param_slice_mappings"}
    return OptimState(
        file=name,
        stage=3 if sharded else _stage_of(inner.get("zero_stage", 1), where),
        world=_world_of(inner.get("partition_count"), where),
        partitions=partitions,
        paddings=_paddings_of(inner.get("param_alignment_paddings"), where),
        mappings=_mappings_of(inner.get("param_slice_mappings")),
        states=states,
        settings=settings,
        rest={name: value for name, value in inner.items() if name not in index},
    )


def _archive(files: SourceFiles, name: str) -> TorchArchive:
    """Read a file that must not be another rank's: torch names a zip after its file."""
    archive = read_archive(files, name, unknown="inert")
    here = PurePosixPath(name).name
    was = saved_name(f"{archive.folder}.pt")
    if was is not None and was != here:
        raise UnsupportedError(
            f"`{here}` belongs to another rank",
            where=str(files.root / name),
            why=f"it was saved as `{was}`",
            hint="copy the files again, keeping their names",
        )
    return archive


def _refuse_experts(content: Mapping[str, object], where: str) -> None:
    found = [key for key in _EXPERTS if content.get(key)]
    if found:
        raise FormatError(
            "expert parallelism is not supported",
            where=where,
            why=f"according to `{found[0]}`, ranks have different experts",
        )


def _refuse_divided(content: Mapping[str, object], where: str) -> None:
    if _whole_number(content.get("mp_world_size", 1), "mp_world_size", where) > 1:
        raise FormatError(
            "tensor parallelism is not supported",
            where=where,
            why=f"mp_world_size is {content['mp_world_size']}",
            hint=ADVICE,
        )
    if content["module"] is None:
        raise FormatError(
            "the model states do not contain the model",
            where=where,
            why="a pipeline engine saves the model in layer_*-model_states.pt",
            hint=ADVICE,
        )
