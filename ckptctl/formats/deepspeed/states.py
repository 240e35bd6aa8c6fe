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
from ckptctl.formats.deepspeed.fields import (
    base_of,
    groups_of,
    items_of,
    mapping_of,
    mappings_of,
    paddings_of,
    segment_of,
    shapes_of,
    stage_of,
    whole_number,
    world_of,
)
from ckptctl.formats.deepspeed.files import ADVICE, saved_name
from ckptctl.formats.deepspeed.partitions import Segment, Shape
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.zips.reader import TorchArchive, read_archive

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
    """Read one file of model states.

    Args:
        files: The checkpoint's files.
        name: The one to read.
        whole: Whether tensor and pipeline parallelism may not have divided the model.

    Raises:
        FormatError: It needs more than is written, as tensor parallelism or experts.
        UnsupportedError: It is not what DeepSpeed writes.
    """
    archive = _archive(files, name)
    where = str(files.root / name)
    content = mapping_of(archive.root, "the file", where)
    if "module" not in content or not content.keys() & {"dp_world_size", "ds_version"}:
        raise UnsupportedError(
            "these are no model states", where=where, why=f"the file has {listed([*content])}"
        )
    _refuse_experts(content, where)
    if whole:
        _refuse_divided(content, where)
    shared = mapping_of(content.get("shared_params") or {}, "shared_params", where)
    if not all(isinstance(source, str) for source in shared.values()):
        raise UnsupportedError("`shared_params` is not a map of names", where=where)
    groups = content.get("param_shapes")
    return ModelState(
        file=name,
        content=content,
        module={} if content["module"] is None else mapping_of(content["module"], "module", where),
        groups=None if groups is None else groups_of(groups, where),
        frozen=shapes_of(content.get("frozen_param_shapes") or {}, where),
        fragments=mapping_of(content.get("frozen_param_fragments") or {}, "fragments", where),
        shared=cast("dict[str, str]", shared),
        checksums=archive.checksums,
    )


def read_optim(files: SourceFiles, name: str) -> OptimState:
    """Read one file of optimizer states.

    Raises:
        FormatError: They are of a kind that is not known.
        UnsupportedError: The file is not what DeepSpeed writes.
    """
    where = str(files.root / name)
    content = mapping_of(_archive(files, name).root, "the file", where)
    inner = mapping_of(content.get("optimizer_state_dict"), "optimizer_state_dict", where)
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
    partitions = tuple(segment_of(item, name, where) for item in items_of(inner[key], key, where))
    base_key = "optimizer_state_dict" if sharded else "base_optimizer_state"
    states, settings = base_of(inner.get(base_key), len(partitions), where)
    index = {key, base_key, "zero_stage", "partition_count", "ds_version"}
    index |= {"group_paddings", "param_alignment_paddings", "param_slice_mappings"}
    return OptimState(
        file=name,
        stage=3 if sharded else stage_of(inner.get("zero_stage", 1), where),
        world=world_of(inner.get("partition_count"), where),
        partitions=partitions,
        paddings=paddings_of(inner.get("param_alignment_paddings"), where),
        mappings=mappings_of(inner.get("param_slice_mappings")),
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
    if whole_number(content.get("mp_world_size", 1), "mp_world_size", where) > 1:
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
