"""Flat state dicts of one rank, with local shards of tensors and with non-tensor values."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import index
from typing import NamedTuple, TypeGuard

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckptctl import dtypes
from ckptctl.catalog import Box, Index, Path
from ckptctl.distributed import compat
from ckptctl.distributed.compat import ShardedTensor
from ckptctl.distributed.group import get_world_size
from ckptctl.errors import RefusedError, UsageError, quote_names
from ckptctl.planner.boxes import intersect_boxes
from ckptctl.planner.placements import ShardPlacement as Cut
from ckptctl.planner.placements import compute_local_shard
from ckptctl.save_load.saving.local_shards import TensorMeta

StateDict = Mapping[str, object]
Part = tuple[torch.Tensor, torch.Tensor]
"""Tuple of a view of a tensor, and elements of the same shape to copy to the view."""


class TensorShard(NamedTuple):
    """Box of a global tensor, and the tensor in this rank's memory with its elements."""

    name: str
    box: Box
    tensor: torch.Tensor

    def select_box(self, box: Box) -> TensorShard:
        """Return the part of this shard that is in *box*, which must be inside the shard."""
        if box == self.box:
            return self
        tensor = self.tensor
        for dim, (start, first, size) in enumerate(
            zip(box.offsets, self.box.offsets, box.sizes, strict=True)
        ):
            tensor = tensor.narrow(dim, start - first, size)
        return TensorShard(self.name, box, tensor)


@dataclass(frozen=True, slots=True)
class RankTensor:
    """Tensor of a state dict, and the shards of the tensor that are on this rank."""

    meta: TensorMeta
    leaf: torch.Tensor | ShardedTensor
    shards: tuple[TensorShard, ...]  # local shards, empty if the entire tensor is on other ranks
    # Whether the tensor is neither a DTensor nor a ShardedTensor and has no placement attributes,
    # so only its name tells that other ranks may have the same tensor.
    is_regular: bool = False

    @property
    def may_be_replica(self) -> bool:
        """Whether other ranks may have the same shards."""
        leaf = self.leaf
        if not isinstance(leaf, DTensor):
            return True
        mesh = leaf.device_mesh
        sizes = zip(leaf.placements, mesh.shape, strict=True)
        copied = any(isinstance(placement, Replicate) and size > 1 for placement, size in sizes)
        return copied or mesh.size() < get_world_size()


@dataclass(frozen=True, slots=True)
class ObjectLeaf:
    """Non-tensor value of a state dict, and its path of keys."""

    path: Path
    value: object


@dataclass(frozen=True, slots=True)
class FlatState:
    """Tensors and non-tensor values of one rank's state dict, by name."""

    tensors: Mapping[str, RankTensor]
    values: Mapping[str, ObjectLeaf]

    @property
    def meta(self) -> dict[str, TensorMeta]:
        """Dtype, global shape and path of each tensor, by name."""
        return {name: tensor.meta for name, tensor in self.tensors.items()}

    @property
    def shards(self) -> list[TensorShard]:
        """Local shards of all tensors."""
        return [shard for tensor in self.tensors.values() for shard in tensor.shards]

    @property
    def paths(self) -> dict[str, Path]:
        """Paths of the non-tensor values, by name."""
        return {name: leaf.path for name, leaf in self.values.items()}

    @property
    def regular_names(self) -> list[str]:
        """Names of tensors that are neither DTensor nor ShardedTensor and have no placement."""
        return [name for name, tensor in self.tensors.items() if tensor.is_regular]


class LocalPlacement(NamedTuple):
    """Boxes of a global tensor, and the offset of each box in a local tensor."""

    shape: tuple[int, ...]  # of the global tensor
    boxes: tuple[Box, ...]  # of the global tensor
    starts: tuple[tuple[int, ...], ...]  # offsets of the boxes in the local tensor


PLACEMENT = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""Attributes of a local tensor that contains shards of a global tensor.

They are those of ``CheckpointableTensor`` in torch 2.14.
"""


def has_placement(leaf: object) -> TypeGuard[torch.Tensor]:
    """Return whether *leaf* is a local tensor with placement attributes.

    *leaf* may have any class, and the installed torch need not define ``CheckpointableTensor``.
    """
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor | ShardedTensor):
        return False
    return all(hasattr(leaf, attribute) for attribute in PLACEMENT)


def copy_placement(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the placement attributes of *source* to *target*."""
    for attribute in PLACEMENT:
        setattr(target, attribute, getattr(source, attribute))


def read_placement(name: str, leaf: torch.Tensor) -> LocalPlacement:
    """Read the placement attributes of a tensor.

    Raises:
        RefusedError: The attributes contradict each other or the tensor.
    """
    try:
        shape = _to_ints(leaf.global_shape)  # type: ignore[attr-defined]
        offsets, starts, sizes = (
            tuple(map(_to_ints, getattr(leaf, attribute))) for attribute in PLACEMENT[1:]
        )
        if not len(offsets) == len(starts) == len(sizes):
            counts = f"{len(offsets)}, {len(starts)} and {len(sizes)}"
            raise ValueError(f"offsets, places and sizes differ in number: {counts}")
        for offset, start, size in zip(offsets, starts, sizes, strict=True):
            _require_within(offset, size, shape, "the global shape")
            _require_within(start, size, tuple(leaf.size()), "the local tensor, which has")
        boxes = tuple(map(Box, offsets, sizes))
        for number, box in enumerate(boxes):
            for earlier in boxes[:number]:
                if intersect_boxes(box, earlier):
                    raise ValueError(f"{box} and {earlier} overlap")
    except (TypeError, ValueError) as error:
        raise RefusedError(
            f"the placement of `{name}` is inconsistent",
            where=f"tensor `{name}`, {', '.join(PLACEMENT)}",
            why=str(error),
        ) from error
    return LocalPlacement(shape, boxes, starts)


def _to_ints(values: Iterable[object]) -> tuple[int, ...]:
    return tuple(index(value) for value in values)  # type: ignore[arg-type]


def _require_within(
    start: tuple[int, ...], size: tuple[int, ...], shape: tuple[int, ...], description: str
) -> None:
    if not len(start) == len(size) == len(shape):
        raise ValueError(f"{list(start)} and {list(size)} do not match {description} {list(shape)}")
    if any(
        first < 0 or length < 0 or first + length > end
        for first, length, end in zip(start, size, shape, strict=True)
    ):
        raise ValueError(f"{Box(start, size)} is outside {description} {list(shape)}")


def flatten_state(state_dict: StateDict, *, on_meta: bool = False) -> FlatState:
    """Flatten *state_dict* and find the local shards of its tensors, without copying.

    Names are those of stock ``dcp.save``: keys joined by dots. Objects with a method ``state_dict``
    are replaced by its result.

    Args:
        state_dict: Nested state dict.
        on_meta: Whether tensors may be on the meta device.

    Raises:
        UsageError: Names are ambiguous, or the state dict contains itself.
        RefusedError: A tensor cannot be stored.
    """
    expanded = expand_stateful(state_dict)
    try:
        flat, paths = compat.flatten_state_dict(expanded)
    except ValueError as error:
        raise UsageError(
            "two values of the state dict have the same name", why=str(error)
        ) from error
    except RecursionError:
        raise UsageError(
            "the state dict contains itself, or is nested too deeply",
            where=quote_names(_find_recursive_keys(expanded)),
        ) from None
    tensors: dict[str, RankTensor] = {}
    values: dict[str, ObjectLeaf] = {}
    for name, leaf in flat.items():
        path = keys_to_path(paths[name])
        if isinstance(leaf, torch.Tensor | ShardedTensor):
            tensors[name] = build_rank_tensor(name, leaf, path, on_meta=on_meta)
        else:
            values[name] = ObjectLeaf(path, leaf)
    return FlatState(tensors, values)


def _find_recursive_keys(state_dict: StateDict) -> list[str]:
    """Find the keys of *state_dict* whose values contain themselves."""
    keys = []
    for key, value in state_dict.items():
        try:
            compat.flatten_state_dict({key: value})
        except RecursionError:
            keys.append(str(key))
    return keys


def keys_to_path(keys: Iterable[str | int]) -> Path:
    """Convert *keys*, as torch flattens a state dict, to a path."""
    return tuple(Index(key) if isinstance(key, int) else key for key in keys)


def path_to_keys(path: Path) -> tuple[str | int, ...]:
    """Convert a path to keys, as torch flattens a state dict."""
    return tuple(int(key) if isinstance(key, Index) else str(key) for key in path)


def expand_stateful(state_dict: StateDict) -> dict[str, object]:
    """Return a copy of *state_dict* in which state dicts replace stateful objects."""
    if not isinstance(state_dict, Mapping):
        raise UsageError(
            f"a {type(state_dict).__name__} is not a state dict",
            hint='pass a dictionary: `{"model": model, "optim": optimizer}`',
        )
    return {
        key: value.state_dict() if is_stateful(value) else value
        for key, value in state_dict.items()
    }


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Return whether *value* implements ``Stateful``. Tensors skip the slow protocol check."""
    return not isinstance(value, torch.Tensor) and isinstance(value, Stateful)


def build_rank_tensor(
    name: str, leaf: torch.Tensor | ShardedTensor, path: Path, *, on_meta: bool = False
) -> RankTensor:
    """Describe a tensor and its local shards.

    Raises:
        RefusedError: No supported format can store the tensor.
    """
    if isinstance(leaf, ShardedTensor):  # its tensor attributes log a deprecation warning
        shard_metadata = leaf.metadata()
        shape, torch_dtype = tuple(shard_metadata.size), shard_metadata.tensor_properties.dtype
        grad = shard_metadata.tensor_properties.requires_grad
    else:
        if leaf.is_nested:
            raise RefusedError(f"`{name}` is a nested tensor, which no supported format can store")
        shape, torch_dtype, grad = tuple(leaf.size()), leaf.dtype, leaf.requires_grad
    placement = read_placement(name, leaf) if has_placement(leaf) else None
    shape = placement.shape if placement else shape
    dtype = str(torch_dtype).removeprefix("torch.")
    if dtype not in dtypes.BY_NAME:
        raise RefusedError(f"`{name}` has dtype {dtype}, which no supported format can store")
    meta = TensorMeta(dtype, shape, path, bool(grad))
    if 0 in shape:  # every rank has the tensor's only box, which is empty
        shards = [TensorShard(name, Box.whole(shape), torch.empty(shape, dtype=torch_dtype))]
    elif placement:
        assert isinstance(leaf, torch.Tensor)
        shards = list(_iterate_placed_shards(name, _detach_dense(name, leaf, on_meta), placement))
    else:
        shards = list(_iterate_shards(name, leaf, on_meta))
    is_regular = not isinstance(leaf, DTensor | ShardedTensor) and placement is None
    return RankTensor(meta, leaf, tuple(shards), is_regular=is_regular)


def _iterate_placed_shards(
    name: str, local: torch.Tensor, placement: LocalPlacement
) -> Iterator[TensorShard]:
    for box, start in zip(placement.boxes, placement.starts, strict=True):
        if 0 in box.sizes:
            continue
        view = local
        for dim, (first, size) in enumerate(zip(start, box.sizes, strict=True)):
            view = view.narrow(dim, first, size)
        yield TensorShard(name, box, view)


def _iterate_shards(
    name: str, leaf: torch.Tensor | ShardedTensor, on_meta: bool
) -> Iterator[TensorShard]:
    if isinstance(leaf, ShardedTensor):
        for shard in leaf.local_shards():
            offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            if 0 not in sizes:
                box = Box(tuple(offsets), tuple(sizes))
                yield TensorShard(name, box, _detach_dense(name, shard.tensor))
    elif isinstance(leaf, DTensor):
        local = _detach_dense(name, leaf.to_local(), on_meta)
        mesh, coordinate = leaf.device_mesh, leaf.device_mesh.get_coordinate()
        if coordinate is None:
            return
        cuts = [_convert_placement(name, placement) for placement in leaf.placements]
        local_placement = compute_local_shard(
            tuple(leaf.shape), tuple(mesh.shape), tuple(coordinate), cuts
        )
        for part in local_placement.boxes:
            view = local
            for dim, (start, size) in enumerate(zip(part.start, part.box.sizes, strict=True)):
                view = view.narrow(dim, start, size)
            yield TensorShard(name, part.box, view)
    else:
        yield TensorShard(name, Box.whole(tuple(leaf.shape)), _detach_dense(name, leaf, on_meta))


def _convert_placement(name: str, placement: object) -> Cut | None:
    if isinstance(placement, compat.StridedShard):
        return Cut(int(placement.dim), int(placement.split_factor))
    if isinstance(placement, Shard):
        return Cut(int(placement.dim))
    if isinstance(placement, Replicate):
        return None
    raise RefusedError(
        f"`{name}` is placed as {placement}, which no checkpoint can store",
        hint="call `redistribute` to Shard or Replicate first",
    )


def _detach_dense(name: str, tensor: torch.Tensor, on_meta: bool = False) -> torch.Tensor:
    tensor = tensor.detach()
    if on_meta and tensor.is_meta and type(tensor) is torch.Tensor:
        return tensor
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise RefusedError(
            f"`{name}` is not a dense tensor in memory",
            why=f"its layout is {tensor.layout}, {tensor.device}",
        )
    if tensor.numel() and not tensor.data_ptr():
        raise RefusedError(
            f"`{name}` has no memory",
            why=f"it is a {type(tensor).__name__}",
            hint="save and load its component tensors",
        )
    return tensor


def get_address(tensor: torch.Tensor) -> object:
    """Return the address of the first element of *tensor*.

    For a tensor on the meta device, return its storage identity and offset.
    """
    return compat.locate_storage(tensor) if tensor.is_meta else tensor.data_ptr()


def count_spanned_elements(tensor: torch.Tensor) -> int:
    """Count the elements in memory from the first to the last one of *tensor*, with any gaps."""
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in pairs)


def to_memoryview(tensor: torch.Tensor) -> memoryview:
    """View the memory from the first to the last element of a host tensor, with any gaps.

    The tensor must outlive the view.
    """
    nbytes = count_spanned_elements(tensor) * tensor.element_size()
    array = (ctypes.c_char * nbytes).from_address(tensor.data_ptr()) if nbytes else bytearray()
    return memoryview(array).cast("B")


def view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as a 1-D byte tensor.

    Dimensions of size 1 may have any strides.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def iterate_row_major_parts(
    tensor: torch.Tensor, start: int, elements: torch.Tensor
) -> Iterator[Part]:
    """Split row-major *elements* into parts that match views of *tensor*.

    The first element corresponds to the row-major element *start* of *tensor*.
    """
    if tensor.ndim < 2:
        target = tensor.reshape(1) if tensor.ndim == 0 else tensor
        yield target[start : start + len(elements)], elements
        return
    inner = math.prod(tensor.shape[1:])
    first, skip = divmod(start, inner)
    if skip:
        count = min(inner - skip, len(elements))
        yield from iterate_row_major_parts(tensor[first], skip, elements[:count])
        first, elements = first + 1, elements[count:]
    rows = len(elements) // inner
    if rows:
        block = elements[: rows * inner].view(rows, *tensor.shape[1:])
        yield tensor[first : first + rows], block
    if len(elements) > rows * inner:
        yield from iterate_row_major_parts(tensor[first + rows], 0, elements[rows * inner :])
