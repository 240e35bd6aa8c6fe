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

from ckptctl.errors import DamagedError, FormatError, listed
from ckptctl.formats.deepspeed_files import ADVICE, saved_name
from ckptctl.formats.deepspeed_partitions import Segment, Shape
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.inert import Inert
from ckptctl.storage.torch_globals import MAX_RANK
from ckptctl.storage.torch_zip import StoredTensor, TorchArchive, read_archive

INDEX = (
    "module",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "buffer_names",
)
_EXPERTS = ("ds_autoep_layers", "autoep_layers", "ds_zero_partition_groups")


@dataclass(frozen=True, slots=True)
class ModelState:
    """The model states of one rank.

    Attributes:
        file: Relative to the checkpoint's root.
        content: All of it.
        module: The module's state dict.
        groups: Names and shapes in the optimizer's flat vectors; None: no ZeRO (stage 0).
        frozen: Names and shapes of parameters that are not optimised.
        fragments: Those parameters, or at stage 3 this rank's share of each.
        shared: Names that have no data of their own, each with the one that has.
        checksums: Whether the file has checksums.
    """

    file: str
    content: Mapping[str, object]
    module: Mapping[str, object]
    groups: tuple[dict[str, Shape], ...] | None
    frozen: Mapping[str, Shape]
    fragments: Mapping[str, object]
    shared: Mapping[str, str]
    checksums: bool

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the optimised parameters in the order of the flat vectors."""
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


def read_model(files: SourceFiles, name: str, *, whole: bool = True) -> ModelState:
    """Read one file of model states.

    Args:
        files: The checkpoint's files.
        name: The one to read.
        whole: Whether tensor and pipeline parallelism may not have divided the model.

    Raises:
        FormatError: It needs more than is written, as tensor parallelism or experts.
        DamagedError: It is not what DeepSpeed writes.
    """
    archive = _archive(files, name)
    where = str(files.root / name)
    content = _mapping(archive.root, "the file", where)
    if "module" not in content or not content.keys() & {"dp_world_size", "ds_version"}:
        raise DamagedError(
            "these are no model states", where=where, why=f"the file has {listed([*content])}"
        )
    _refuse_experts(content, where)
    if whole:
        _refuse_divided(content, where)
    shared = _mapping(content.get("shared_params") or {}, "shared_params", where)
    if not all(isinstance(source, str) for source in shared.values()):
        raise DamagedError("`shared_params` is not a map of names", where=where)
    groups = content.get("param_shapes")
    return ModelState(
        file=name,
        content=content,
        module={} if content["module"] is None else _mapping(content["module"], "module", where),
        groups=None if groups is None else _groups(groups, where),
        frozen=_shapes(content.get("frozen_param_shapes") or {}, where),
        fragments=_mapping(content.get("frozen_param_fragments") or {}, "fragments", where),
        shared=cast("dict[str, str]", shared),
        checksums=archive.checksums,
    )


def read_optim(files: SourceFiles, name: str) -> OptimState:
    """Read one file of optimizer states.

    Raises:
        FormatError: They are of a kind that is not known.
        DamagedError: The file is not what DeepSpeed writes.
    """
    where = str(files.root / name)
    content = _mapping(_archive(files, name).root, "the file", where)
    inner = _mapping(content.get("optimizer_state_dict"), "optimizer_state_dict", where)
    _refuse_experts(inner, where)
    sharded = "fp32_flat_groups" in inner
    key = "fp32_flat_groups" if sharded else "single_partition_of_fp32_groups"
    if key not in inner:
        raise FormatError(
            "optimizer states of a kind that is not known",
            where=where,
            why=f"they have {listed([*inner])}",
            hint="versions of DeepSpeed before 0.4 are not read",
        )
    partitions = tuple(_segment(item, name, where) for item in _items(inner[key], key, where))
    base_key = "optimizer_state_dict" if sharded else "base_optimizer_state"
    states, settings = _base(inner.get(base_key), len(partitions), where)
    index = {key, base_key, "zero_stage", "partition_count", "ds_version"}
    index |= {"group_paddings", "param_alignment_paddings", "param_slice_mappings"}
    return OptimState(
        file=name,
        stage=3 if sharded else _stage(inner.get("zero_stage", 1), where),
        world=_world(inner.get("partition_count"), where),
        partitions=partitions,
        paddings=_paddings(inner.get("param_alignment_paddings"), where),
        mappings=_mappings(inner.get("param_slice_mappings")),
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
        raise DamagedError(
            f"`{here}` is not the file of this rank",
            where=str(files.root / name),
            why=f"it was saved as `{was}`",
            hint="copy the files again, each under its own name",
        )
    return archive


def _refuse_experts(content: Mapping[str, object], where: str) -> None:
    found = [key for key in _EXPERTS if content.get(key)]
    if found:
        raise FormatError(
            "this was saved with a mixture of experts divided among ranks, which is not read",
            where=where,
            why=f"`{found[0]}` says that ranks hold different experts",
        )


def _refuse_divided(content: Mapping[str, object], where: str) -> None:
    if _whole(content.get("mp_world_size", 1), "mp_world_size", where) > 1:
        raise FormatError(
            "this was saved with tensor parallelism, which is not read",
            where=where,
            why=f"mp_world_size is {content['mp_world_size']}",
            hint=ADVICE,
        )
    if content["module"] is None:
        raise FormatError(
            "the model is not in the model states",
            where=where,
            why="a pipeline engine saves it in layer_*-model_states.pt",
            hint=ADVICE,
        )


def _mapping(value: object, what: str, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise DamagedError(f"`{what}` is not a map of names", where=where)
    return value


def _items(value: object, what: str, where: str) -> Sequence[object]:
    if not isinstance(value, list | tuple) or not value:
        raise DamagedError(f"`{what}` is not a list with anything in it", where=where)
    return value


def _whole(value: object, what: str, where: str) -> int:
    if type(value) is not int or value < 0:
        raise DamagedError(f"`{what}` is not a number", where=where)
    return value


def _shape(value: object, where: str) -> Shape:
    if isinstance(value, tuple | list) and len(value) <= MAX_RANK:
        return tuple(_whole(size, "a size of a parameter", where) for size in value)
    raise DamagedError("the shape of a parameter is not one", where=where)


def _shapes(value: object, where: str) -> dict[str, Shape]:
    found = _mapping(value, "the shapes of parameters", where)
    return {name: _shape(shape, where) for name, shape in found.items()}


def _groups(value: object, where: str) -> tuple[dict[str, Shape], ...]:
    """One group per dict; versions before 0.6 wrote the only group without a list."""
    many = [value] if isinstance(value, dict) else _items(value, "param_shapes", where)
    groups = tuple(_shapes(group, where) for group in many)
    names = [name for group in groups for name in group]
    if len(set(names)) < len(names):
        raise DamagedError("`param_shapes` names a parameter twice", where=where)
    return groups


def _segment(value: object, file: str, where: str) -> Segment:
    if not isinstance(value, StoredTensor) or len(value.shape) != 1 or value.strides is not None:
        raise DamagedError("a partition is not a flat tensor", where=where)
    return Segment(file, value)


def _stage(value: object, where: str) -> int:
    """The number in a ``ZeroStageEnum``, which is a record here."""
    if isinstance(value, Inert) and len(value.args) == 1:
        value = value.args[0]
    if type(value) is not int or value not in (1, 2):
        raise DamagedError("`zero_stage` does not fit the partitions", where=where)
    return value


def _world(value: object, where: str) -> int:
    counts = {
        _whole(count, "partition_count", where)
        for count in (value if isinstance(value, list | tuple) else [value])
    }
    if len(counts) > 1:
        raise FormatError(
            "this was saved with a mixture of experts divided among ranks, which is not read",
            where=where,
            why=f"groups have {' or '.join(map(str, sorted(counts)))} partitions",
        )
    if not counts or counts == {0}:
        raise DamagedError("`partition_count` is not a number of ranks", where=where)
    return counts.pop()


def _paddings(value: object, where: str) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    return tuple(
        tuple(_whole(gap, "an alignment padding", where) for gap in cast("list[object]", group))
        for group in _items(value, "param_alignment_paddings", where)
        if isinstance(group, list | tuple)
    )


def _mappings(value: object) -> tuple[Mapping[str, tuple[object, object]], ...] | None:
    """Records of class ``fragment_address``; None where they are not what is expected."""
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


def _base(
    value: object, count: int, where: str
) -> tuple[tuple[Mapping[str, object], ...], Sequence[object]]:
    """The inner optimizer's states by partition and its settings.

    Elastic checkpoints have a list of states; files that a script has made smaller have none.
    """
    if value is None:
        return ({},) * count, ()
    if isinstance(value, list):
        elastic = dict(enumerate(value))
        return tuple(_mapping(elastic.get(n, {}), "state", where) for n in range(count)), ()
    base = _mapping(value, "the inner optimizer's state", where)
    state, settings = base.get("state"), base.get("param_groups")
    found = state if isinstance(state, dict) else {}
    states = tuple(_mapping(found.get(n, {}), "state", where) for n in range(count))
    return states, settings if isinstance(settings, list) else ()
