"""Memory of the tensors that a load fills, including tied and overlapping ones.

Memory with several names is filled once. The data of the other names must be equal, and is compared
with the filled memory by a second plan.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from ckptctl.catalog import memory_name, row_major
from ckptctl.distributed.group import threads, world
from ckptctl.distributed.loading.pinned_buffers import device_buffers
from ckptctl.distributed.state import HeldShard, address, bytes_of, memory, row_major_parts
from ckptctl.errors import MappingError, RefusedError
from ckptctl.planner.plan import Plan
from ckptctl.save_load.loading.load_options import LoadOptions
from ckptctl.save_load.loading.state_mapping import StateMapping, Target, Wanted
from ckptctl.save_load.saving.local_shards import TensorMeta
from ckptctl.storage.byte_files import ByteSink, Memory
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from ckptctl.storage.threads import pause_gc

LONG = 4096


def views_of(places: Iterable[HeldShard]) -> dict[str, Memory]:
    """Map the names of *places* in a plan to their memory."""
    return {memory_name(str(number)): target(one.tensor) for number, one in enumerate(places)}


def wanted_of(tensors: Mapping[str, TensorMeta], places: Iterable[HeldShard]) -> dict[str, Wanted]:
    """Describe *places* as targets of a plan, for all of *tensors*."""
    targets: dict[str, list[Target]] = {name: [] for name in tensors}
    for number, place in enumerate(places):
        targets[place.name].append(Target(place.box, str(number), steps_of(place.tensor)))
    return {n: Wanted(one.dtype, one.shape, tuple(targets[n])) for n, one in tensors.items()}


def read_into(
    views: Mapping[str, Memory], plan: Plan, options: LoadOptions, *, once: bool = False
) -> Execution:
    """Execute the plan of a load.

    Args:
        views: Memory by its names in the plan.
        plan: Plan to execute.
        options: Options of the load.
        once: Whether no other rank reads the same bytes. Always true for a single process.

    Returns:
        The statistics, including elements that were out of range of their dtype.
    """
    how = ExecutionOptions(
        jobs=threads(options.jobs),
        checksum=options.checksum,
        sync=False,
        direct=once or world() == 1,
    )
    tensors = (one.tensor for one in views.values() if isinstance(one, Filled))
    root = Path(plan.source_root)
    # Thousands of short-lived objects, none in a reference cycle.
    with pause_gc(), device_buffers(tensors) as buffers:
        return execute_plan(plan, root, how, lambda _: None, memory=views, buffers=buffers)


def _copy(place: torch.Tensor, elements: torch.Tensor) -> None:
    place.copy_(elements, non_blocking=place.is_cuda)


class Filled(ByteSink):
    """Byte sink that writes row-major elements to a tensor of any strides and device."""

    checksummed = False

    def __init__(
        self,
        tensor: torch.Tensor,
        take: Callable[[torch.Tensor, torch.Tensor], object] = _copy,
    ) -> None:
        self.tensor = tensor
        self._take = take
        self._inference = tensor.is_inference()
        plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        # Few calls of torch, because each releases the GIL and then waits for it.
        self._bytes = bytes_of(tensor) if plain else None

    def write(self, offset: int, view: memoryview) -> None:
        """Write bytes of the row-major elements at *offset*."""
        tensor = self.tensor
        with torch.inference_mode() if self._inference else nullcontext():
            if self._bytes is not None:
                place = self._bytes[offset : offset + len(view)]
                self._take(place, torch.frombuffer(view, dtype=torch.uint8))
                return
            elements = torch.frombuffer(view, dtype=tensor.dtype)
            start = offset // tensor.element_size()
            for place, own in row_major_parts(tensor, start, elements):
                self._take(place, own)


def in_place(tensor: torch.Tensor) -> bool:
    """Return whether files are read directly into *tensor*, if it has long rows in host memory."""
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return False
    run = tensor.element_size()
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size != 1 and step * tensor.element_size() != run:
            steps = [n for size, n in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
            return run >= LONG and steps == sorted(steps, reverse=True)
        run *= size
    return True


def steps_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of *tensor* in elements, as a load plan sees them."""
    return tuple(tensor.stride()) if in_place(tensor) else row_major(tuple(tensor.shape))


def target(tensor: torch.Tensor) -> Memory:
    """Return the memory of *tensor* for the executor, which the tensor must outlive.

    Raises:
        RefusedError: It is an expanded tensor.
    """
    if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise RefusedError(
            "an expanded tensor cannot be filled",
            where=f"shape {list(tensor.shape)}, strides {list(tensor.stride())}",
            hint="call `clone` on it first",
        )
    return memory(tensor) if in_place(tensor) else Filled(tensor)


class Tied(NamedTuple):
    """Shard whose memory is filled by another one, at least in part."""

    place: HeldShard
    filled: int


def find_same_memory(places: Sequence[HeldShard], new: Container[str] = ()) -> list[int]:
    """Return the index of the first place with the same memory, for each place.

    Args:
        places: Shards to fill.
        new: Names of tensors that are replaced by new ones, which stay tied to each other.
    """
    known: dict[object, int] = {}
    found: list[int] = []
    for number, place in enumerate(places):
        own = place.tensor
        kind = (own.device, own.dtype, own.shape, own.stride(), place.name in new)
        memory = (address(own), *kind)
        found.append(known.setdefault(memory, number) if own.numel() else number)
    return found


def split_tied(
    places: Sequence[HeldShard],
    same: Sequence[int],
    meeting: Mapping[int, int],
    mapping: StateMapping,
) -> tuple[list[HeldShard], list[Tied]]:
    """Split places into those to fill, each memory once, and those to compare later."""
    offered = mapping.tensors
    if len(set(same)) == len(places) and not meeting:
        return [place for place in places if place.name in offered], []
    entries = mapping.catalog.tensors
    sources = {  # equal if two names get the same elements
        name: ([entries[source.key].extents for source in composed.sources], composed.arrangement)
        for name, composed in offered.items()
    }
    filled: dict[int, int] = {}
    fill: list[HeldShard] = []
    again: list[Tied] = []
    for place, first in zip(places, same, strict=True):
        if place.name not in offered:
            continue
        number = filled.setdefault(first, len(fill))
        if number == len(fill):
            fill.append(place)
        elif sources.get(place.name) != sources.get(fill[number].name) or (
            place.box != fill[number].box
        ):
            again.append(Tied(place, number))
    both = ((one, other) for one, other in meeting.items() if {one, other} <= filled.keys())
    again += [Tied(places[one], filled[other]) for one, other in both]
    return fill, again


def wanted_again(tied: Sequence[Tied], wanted: dict[str, Wanted]) -> dict[str, Wanted]:
    """Describe the shards that are read again and compared."""
    targets: dict[str, list[Target]] = {}
    for number, (place, _) in enumerate(tied):
        steps = row_major(tuple(place.tensor.shape))
        targets.setdefault(place.name, []).append(Target(place.box, str(number), steps))
    return {
        name: Wanted(wanted[name].dtype, wanted[name].shape, tuple(some))
        for name, some in targets.items()
    }


def comparison_views(
    tied: Sequence[Tied], fill: Sequence[HeldShard], where: str
) -> dict[str, Memory]:
    """Map the names of compared shards to sinks that raise if the data differs."""

    def equal(name: str, filled: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def require(place: torch.Tensor, elements: torch.Tensor) -> None:
            own = place.resolve_conj().resolve_neg().contiguous().cpu()
            if not torch.equal(bytes_of(own), bytes_of(elements)):
                raise MappingError(
                    f"`{filled}` and `{name}` have different values",
                    where=where,
                    why="in the state they share memory",
                    hint="use separate tensors in the state, or omit one of the names",
                )

        return require

    return {
        memory_name(str(number)): Filled(place.tensor, equal(place.name, fill[filled].name))
        for number, (place, filled) in enumerate(tied)
    }
