"""Memory of the tensors that a load fills, including tied and overlapping tensors.

Memory that several tensors share is filled once, for the first of these tensors. A second plan
reads the data of the other tensors and compares it with the filled memory, because it must be
equal.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from ckptctl.catalog import build_memory_name, compute_row_major_strides
from ckptctl.distributed.group import choose_thread_count, get_world_size
from ckptctl.distributed.loading.pinned_buffers import create_pinned_buffers
from ckptctl.distributed.state import (
    TensorShard,
    get_address,
    iterate_row_major_parts,
    to_memoryview,
    view_as_bytes,
)
from ckptctl.errors import MappingError, RefusedError
from ckptctl.planner.plan import Plan
from ckptctl.save_load.loading.load_options import LoadOptions
from ckptctl.save_load.loading.state_mapping import MemoryBox, RequestedTensor, StateMapping
from ckptctl.save_load.saving.local_shards import TensorMeta
from ckptctl.storage.byte_files import ByteSink, Memory
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from ckptctl.storage.threads import pause_gc

MIN_RUN_BYTES = 4096


def build_memory_by_name(shards: Iterable[TensorShard]) -> dict[str, Memory]:
    """Map the name that a plan uses for the memory of each shard to that memory."""
    return {
        build_memory_name(str(number)): get_target_memory(shard.tensor)
        for number, shard in enumerate(shards)
    }


def build_requested_tensors(
    tensors: Mapping[str, TensorMeta], shards: Iterable[TensorShard]
) -> dict[str, RequestedTensor]:
    """Describe *tensors* as tensors that a plan must read into the memory of *shards*."""
    targets: dict[str, list[MemoryBox]] = {name: [] for name in tensors}
    for number, shard in enumerate(shards):
        targets[shard.name].append(
            MemoryBox(shard.box, str(number), get_load_strides(shard.tensor))
        )
    return {
        tensor_name: RequestedTensor(meta.dtype, meta.shape, tuple(targets[tensor_name]))
        for tensor_name, meta in tensors.items()
    }


def execute_load_plan(
    views: Mapping[str, Memory], plan: Plan, options: LoadOptions, *, once: bool = False
) -> Execution:
    """Execute the plan of a load.

    Args:
        views: Memory by its names in the plan.
        plan: Plan to execute.
        options: Options of the load.
        once: Whether no other rank reads the same bytes. In a single process, this is always true.

    Returns:
        The statistics, including elements that are out of the range of the target dtype.
    """
    execution_options = ExecutionOptions(
        jobs=choose_thread_count(options.jobs),
        checksum=options.checksum,
        sync=False,
        direct=once or get_world_size() == 1,
    )
    tensors = (view.tensor for view in views.values() if isinstance(view, TensorSink))
    root = Path(plan.source_root)
    # Thousands of short-lived objects, none in a reference cycle.
    with pause_gc(), create_pinned_buffers(tensors) as buffers:
        return execute_plan(
            plan, root, execution_options, lambda _: None, memory=views, make_buffers=buffers
        )


def _copy_elements(place: torch.Tensor, elements: torch.Tensor) -> None:
    place.copy_(elements, non_blocking=place.is_cuda)


class TensorSink(ByteSink):
    """Byte sink that writes row-major elements to a tensor with any strides on any device."""

    checksummed = False

    def __init__(
        self,
        tensor: torch.Tensor,
        copy_elements: Callable[[torch.Tensor, torch.Tensor], object] = _copy_elements,
    ) -> None:
        self.tensor = tensor
        self._take = copy_elements
        self._inference = tensor.is_inference()
        is_direct = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        # Few calls of torch, because each releases the GIL and then waits for it.
        self._bytes = view_as_bytes(tensor) if is_direct else None

    def write(self, offset: int, view: memoryview) -> None:
        """Write *view*, row-major elements that start at byte *offset*, to the tensor."""
        tensor = self.tensor
        with torch.inference_mode() if self._inference else nullcontext():
            if self._bytes is not None:
                place = self._bytes[offset : offset + len(view)]
                self._take(place, torch.frombuffer(view, dtype=torch.uint8))
                return
            elements = torch.frombuffer(view, dtype=tensor.dtype)
            start = offset // tensor.element_size()
            for place, part in iterate_row_major_parts(tensor, start, elements):
                self._take(place, part)


def is_read_in_place(tensor: torch.Tensor) -> bool:
    """Return whether the memory of *tensor* can be read into directly.

    This is the case if the tensor is on the CPU and consists of long contiguous runs.
    """
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return False
    run = tensor.element_size()
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size != 1 and step * tensor.element_size() != run:
            steps = [n for size, n in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
            return run >= MIN_RUN_BYTES and steps == sorted(steps, reverse=True)
        run *= size
    return True


def get_load_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides in elements that a load plan must use for *tensor*.

    They are contiguous strides if files are not read into the memory of *tensor* directly.
    """
    return (
        tuple(tensor.stride())
        if is_read_in_place(tensor)
        else compute_row_major_strides(tuple(tensor.shape))
    )


def get_target_memory(tensor: torch.Tensor) -> Memory:
    """Return the memory of *tensor* for the executor, which the tensor must outlive.

    Raises:
        RefusedError: *tensor* is expanded, so several of its elements share memory.
    """
    if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise RefusedError(
            "an expanded tensor cannot be filled",
            where=f"shape {list(tensor.shape)}, strides {list(tensor.stride())}",
            hint="call `clone` on it first",
        )
    return to_memoryview(tensor) if is_read_in_place(tensor) else TensorSink(tensor)


class TiedShard(NamedTuple):
    """Shard whose memory is filled, at least partly, when another shard is read."""

    shard: TensorShard
    filled_index: int


def find_first_with_same_memory(
    shards: Sequence[TensorShard], replaced_names: Container[str] = ()
) -> list[int]:
    """Return, for each shard, the index of the first shard with the same memory.

    Args:
        shards: Shards to fill.
        replaced_names: Names of tensors that new ones replace. Ties between replaced tensors are
            kept.
    """
    first_by_memory: dict[object, int] = {}
    first_indices: list[int] = []
    for number, shard in enumerate(shards):
        tensor = shard.tensor
        kind = (
            tensor.device,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            shard.name in replaced_names,
        )
        memory = (get_address(tensor), *kind)
        first_indices.append(
            first_by_memory.setdefault(memory, number) if tensor.numel() else number
        )
    return first_indices


def split_tied(
    shards: Sequence[TensorShard],
    first_indices: Sequence[int],
    overlaps: Mapping[int, int],
    mapping: StateMapping,
) -> tuple[list[TensorShard], list[TiedShard]]:
    """Split *shards* into shards to read, one per memory range, and tied shards to compare."""
    offered = mapping.tensors
    if len(set(first_indices)) == len(shards) and not overlaps:
        return [shard for shard in shards if shard.name in offered], []
    entries = mapping.catalog.tensors
    sources = {  # equal for names that get the same elements of the checkpoint
        name: ([entries[source.key].extents for source in composed.sources], composed.arrangement)
        for name, composed in offered.items()
    }
    filled: dict[int, int] = {}
    shards_to_read: list[TensorShard] = []
    comparisons: list[TiedShard] = []
    for shard, first in zip(shards, first_indices, strict=True):
        if shard.name not in offered:
            continue
        number = filled.setdefault(first, len(shards_to_read))
        if number == len(shards_to_read):
            shards_to_read.append(shard)
        elif sources.get(shard.name) != sources.get(shards_to_read[number].name) or (
            shard.box != shards_to_read[number].box
        ):
            comparisons.append(TiedShard(shard, number))
    both = (
        (index, other_index)
        for index, other_index in overlaps.items()
        if {index, other_index} <= filled.keys()
    )
    comparisons += [TiedShard(shards[index], filled[other_index]) for index, other_index in both]
    return shards_to_read, comparisons


def build_comparison_targets(
    tied: Sequence[TiedShard], wanted: dict[str, RequestedTensor]
) -> dict[str, RequestedTensor]:
    """Describe tied shards as tensors that a plan must read and compare."""
    targets: dict[str, list[MemoryBox]] = {}
    for number, (place, _) in enumerate(tied):
        steps = compute_row_major_strides(tuple(place.tensor.shape))
        targets.setdefault(place.name, []).append(MemoryBox(place.box, str(number), steps))
    return {
        name: RequestedTensor(wanted[name].dtype, wanted[name].shape, tuple(boxes))
        for name, boxes in targets.items()
    }


def build_comparison_sinks(
    tied: Sequence[TiedShard], fill: Sequence[TensorShard], where: str
) -> dict[str, Memory]:
    """Map the names of tied shards to sinks that raise if data differs from filled memory."""

    def build_check(name: str, filled: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def check_elements(place: torch.Tensor, elements: torch.Tensor) -> None:
            expected = place.resolve_conj().resolve_neg().contiguous().cpu()
            if not torch.equal(view_as_bytes(expected), view_as_bytes(elements)):
                raise MappingError(
                    f"`{filled}` and `{name}` have different values",
                    where=where,
                    why="in the state they share memory",
                    hint="use separate tensors in the state, or omit one of the names",
                )

        return check_elements

    return {
        build_memory_name(str(number)): TensorSink(
            place.tensor, build_check(place.name, fill[filled].name)
        )
        for number, (place, filled) in enumerate(tied)
    }
