"""Parse and check the model and optimizer states of one DeepSpeed rank.

Source: ``deepspeed/runtime/engine.py`` (``_common_checkpoint_state``), ``zero/stage_1_and_2.py``,
``zero/stage3.py``, ``bf16_optimizer.py`` (``state_dict`` of each). Nothing of DeepSpeed is
imported: its classes, and all others that are not torch's, become inert records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated

from ckptctl.errors import FormatError, UnsupportedError, quote_names
from ckptctl.formats.deepspeed.deepspeed_files import CONVERSION_ADVICE, match_state_file_name
from ckptctl.formats.deepspeed.partitions import Segment, Shape, is_flat
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.inert import Inert
from ckptctl.storage.pickles.torch_tensors import MAX_RANK
from ckptctl.storage.schema import (
    NOT_EMPTY,
    Constraint,
    MismatchError,
    Natural,
    Schema,
    read_as,
    read_nested_or_none,
    size_between,
    wrap_malformed_errors,
)
from ckptctl.storage.zips.zip_reader import StoredTensor, TorchArchive, read_archive

MODEL_KEYS = (
    "module",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "buffer_names",
)
_EXPERT_KEYS = ("ds_autoep_layers", "autoep_layers", "ds_zero_partition_groups")


Shapes = dict[str, Annotated[tuple[Natural, ...], size_between(0, MAX_RANK)]]
FlatTensor = Annotated[StoredTensor, Constraint("a flat tensor", is_flat)]
Names = dict[str, object]


@dataclass(frozen=True, slots=True)
class _ModelFile(Schema):
    """Content of a model-state file."""

    module: Names | None
    param_shapes: Annotated[tuple[Shapes, ...], NOT_EMPTY] | Shapes | None = None
    frozen_param_shapes: Shapes | None = None
    frozen_param_fragments: Names | None = None
    shared_params: dict[str, str] | None = None
    buffer_names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Parallelism(Schema):
    """Tensor-parallel size in a model-state file, which universal checkpoints ignore."""

    mp_world_size: Natural = 1


@dataclass(frozen=True, slots=True)
class _OptimFile(Schema):
    """Content of an optimizer-state file."""

    optimizer_state_dict: Names


@dataclass(frozen=True, slots=True)
class _ZeroState(Schema):
    """State dict of a ZeRO optimizer, with this rank's fp32 partitions."""

    partition_count: Natural | Annotated[tuple[Natural, ...], NOT_EMPTY]
    zero_stage: int | Inert = 1
    fp32_flat_groups: Annotated[tuple[FlatTensor, ...], NOT_EMPTY] | None = None
    single_partition_of_fp32_groups: Annotated[tuple[FlatTensor, ...], NOT_EMPTY] | None = None
    param_alignment_paddings: Annotated[tuple[tuple[Natural, ...], ...], NOT_EMPTY] | None = None


def _parse_groups(shapes: tuple[Shapes, ...] | Shapes | None) -> tuple[Shapes, ...] | None:
    """Return the parameter shapes of each group, or None if not recorded.

    DeepSpeed before 0.6 wrote a single group without a list.
    """
    groups = (shapes,) if isinstance(shapes, dict) else shapes
    names = [name for group in groups or () for name in group]
    if len(set(names)) < len(names):
        raise MismatchError("without a parameter that occurs twice", shapes, "param_shapes")
    return groups


def _parse_stage(recorded: int | Inert) -> int:
    """Return the ZeRO stage, 1 or 2, from an integer or from an unpickled ``ZeroStageEnum``."""
    stage = recorded.args[0] if isinstance(recorded, Inert) and recorded.args else recorded
    if not isinstance(stage, int) or stage not in (1, 2):
        raise MismatchError("1 or 2", stage, "zero_stage")
    return stage


def _parse_world_size(partition_count: int | tuple[int, ...], where: str) -> int:
    """Return the number of ranks, or raise if the parameter groups have different numbers."""
    counts = {*partition_count} if isinstance(partition_count, tuple) else {partition_count}
    if len(counts) > 1:
        raise FormatError(
            "expert parallelism is not supported",
            where=where,
            why=f"parameter groups have {' or '.join(map(str, sorted(counts)))} partitions",
        )
    if counts == {0}:
        raise MismatchError("a positive integer", 0, "partition_count")
    return counts.pop()


def _parse_mappings(value: object) -> tuple[Mapping[str, tuple[object, object]], ...] | None:
    """Map each group's parameter names to ``(start, numel)``, or return None if not recorded."""
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


def _parse_base_state(value: object, count: int) -> tuple[tuple[Names, ...], Sequence[object]]:
    """Return the inner optimizer's state for each of *count* partitions, and its ``param_groups``.

    *value* is a list in elastic checkpoints, and None if a script removed the optimizer.
    """
    base = {"state": dict(enumerate(value))} if isinstance(value, list) else value
    content = {} if base is None else read_as(Names, base, "the inner optimizer's state")
    states = read_nested_or_none(dict[object, object], content, "state") or {}
    settings = read_nested_or_none(list[object], content, "param_groups") or ()
    return tuple(read_as(Names, states.get(n, {}), f"state[{n}]") for n in range(count)), settings


@dataclass(frozen=True, slots=True)
class ModelState:
    """Model states of one rank.

    Attributes:
        file: Path of the file, relative to the checkpoint's root.
        content: Complete content of the file.
        module: State dict of the module.
        groups: Shapes of each group's parameters by name, in the order of the flat vectors. None
            without ZeRO (stage 0).
        frozen_shapes: Shapes of parameters that are not optimized, by name.
        frozen_data: Data of the frozen parameters. For stage 3, this rank's shard of each.
        tied_names: For each tied parameter, the name of the parameter that stores its data.
        buffer_names: Names of the persistent buffers, or empty if not recorded.
        has_checksums: Whether the file records checksums.
        is_placeholder: Whether this is a placeholder for a rank with an unusable file.
    """

    file: str
    content: Mapping[str, object]
    module: Mapping[str, object]
    groups: tuple[dict[str, Shape], ...] | None
    frozen_shapes: Mapping[str, Shape]
    frozen_data: Mapping[str, object]
    tied_names: Mapping[str, str]
    buffer_names: Sequence[str]
    has_checksums: bool
    is_placeholder: bool = False

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of all optimized parameters by name, in the order of the flat vectors."""
        return {name: shape for group in self.groups or () for name, shape in group.items()}


@dataclass(frozen=True, slots=True)
class OptimState:
    """Optimizer states of one rank.

    Attributes:
        file: Path of the file, relative to the checkpoint's root.
        stage: ZeRO stage (1, 2 or 3). ``BF16_Optimizer`` counts as stage 1.
        world: Number of ranks among which the groups are partitioned.
        partitions: The rank's fp32 partition of each group, or of each sub-group for stage 3.
        paddings: Number of padding elements after each parameter of each group, or None.
        mappings: First element and number of elements of each parameter in the rank's partition of
            each group. Wrong with ``round_robin_gradients``. None if not recorded.
        states: The inner optimizer's state for each partition.
        param_groups: The inner optimizer's ``param_groups``.
        other_entries: Other entries of the state dict, such as loss scaler and gradient clipping.
        is_placeholder: Whether this is a placeholder for a rank with an unusable file.
    """

    file: str
    stage: int
    world: int
    partitions: tuple[Segment, ...]
    paddings: tuple[tuple[int, ...], ...] | None
    mappings: tuple[Mapping[str, tuple[object, object]], ...] | None
    states: tuple[Mapping[str, object], ...]
    param_groups: Sequence[object]
    other_entries: Mapping[str, object]
    is_placeholder: bool = False


def read_model_state(
    files: SourceFiles, name: str, *, require_undivided: bool = True
) -> ModelState:
    """Read a model-state file.

    Raises if tensor parallelism divided the model, unless *require_undivided* is false.
    """
    archive = _read_archive(files, name)
    where = str(files.root / name)
    with wrap_malformed_errors("malformed model states", where):
        content = read_as(Names, archive.root)
        if "module" not in content or not content.keys() & {"dp_world_size", "ds_version"}:
            raise UnsupportedError(
                "the file does not contain model states",
                where=where,
                why=f"it contains {quote_names([*content])}",
            )
        _refuse_experts(content, where)
        fields = read_as(_ModelFile, content)
        if require_undivided:
            _refuse_divided(content, where)
        return ModelState(
            file=name,
            content=content,
            module=fields.module or {},
            groups=_parse_groups(fields.param_shapes),
            frozen_shapes=fields.frozen_param_shapes or {},
            frozen_data=fields.frozen_param_fragments or {},
            tied_names=fields.shared_params or {},
            buffer_names=fields.buffer_names or (),
            has_checksums=archive.checksums,
        )


def read_optim_state(files: SourceFiles, name: str) -> OptimState:
    """Read an optimizer-state file."""
    where = str(files.root / name)
    with wrap_malformed_errors("malformed optimizer states", where):
        inner = read_as(_OptimFile, _read_archive(files, name).root).optimizer_state_dict
        _refuse_experts(inner, where)
        is_stage_3 = "fp32_flat_groups" in inner
        key = "fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"
        if key not in inner:
            raise FormatError(
                "unknown kind of optimizer states",
                where=where,
                why=f"found the keys {quote_names([*inner])}",
                hint="use a checkpoint of DeepSpeed 0.4 or later",
            )
        fields = read_as(_ZeroState, inner)
        flat_tensors = (
            fields.fp32_flat_groups if is_stage_3 else fields.single_partition_of_fp32_groups
        )
        partitions = tuple(Segment(name, tensor) for tensor in flat_tensors or ())
        base_key = "optimizer_state_dict" if is_stage_3 else "base_optimizer_state"
        states, settings = _parse_base_state(inner.get(base_key), len(partitions))
        handled_keys = {key, base_key, "zero_stage", "partition_count", "ds_version"}
        handled_keys |= {"group_paddings", "param_alignment_paddings", "param_slice_mappings"}
        return OptimState(
            file=name,
            stage=3 if is_stage_3 else _parse_stage(fields.zero_stage),
            world=_parse_world_size(fields.partition_count, where),
            partitions=partitions,
            paddings=fields.param_alignment_paddings,
            mappings=_parse_mappings(inner.get("param_slice_mappings")),
            states=states,
            param_groups=settings,
            other_entries={
                name: value for name, value in inner.items() if name not in handled_keys
            },
        )


def _read_archive(files: SourceFiles, name: str) -> TorchArchive:
    """Read a state file, or raise if its zip records the file name of another rank."""
    archive = read_archive(files, name, unknown="inert")
    file_name = PurePosixPath(name).name
    recorded_name = match_state_file_name(f"{archive.folder}.pt")
    if recorded_name is not None and recorded_name != file_name:
        raise UnsupportedError(
            f"`{file_name}` belongs to another rank",
            where=str(files.root / name),
            why=f"it was saved as `{recorded_name}`",
            hint="copy the files again, keeping their names",
        )
    return archive


def _refuse_experts(content: Mapping[str, object], where: str) -> None:
    expert_keys = [key for key in _EXPERT_KEYS if content.get(key)]
    if expert_keys:
        raise FormatError(
            "expert parallelism is not supported",
            where=where,
            why=f"according to `{expert_keys[0]}`, ranks have different experts",
        )


def _refuse_divided(content: Names, where: str) -> None:
    if (world := read_as(_Parallelism, content).mp_world_size) > 1:
        raise FormatError(
            "tensor parallelism is not supported",
            where=where,
            why=f"mp_world_size is {world}",
            hint=CONVERSION_ADVICE,
        )
    if content["module"] is None:
        raise FormatError(
            "the model states do not contain the model",
            where=where,
            why="a pipeline engine saves the model in layer_*-model_states.pt",
            hint=CONVERSION_ADVICE,
        )
