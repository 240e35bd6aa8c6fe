"""Buffers that a device copies from: in which order they are filled, without a device."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, cast

import pytest
import torch

from ckptctl.distributed.loading.pinned_buffers import (
    BUFFER_SETS_PER_THREAD,
    MAX_PINNED_SET_BYTES,
    PinnedBuffers,
    create_pinned_buffers,
)
from ckptctl.planner.copying.tile import ScatterPattern
from ckptctl.storage.buffers import CAST_BUFFER, STAGING_BUFFER, TILE_BUFFER, TileBuffers
from ckptctl.storage.compute_device import warn_slow_copies

log: list[str] = []
pinned_tensors: list[torch.Tensor] = []


class Event:
    def __init__(self) -> None:
        self.name = ""

    def record(self, stream: Stream) -> None:
        stream.events += 1
        self.name = f"{stream.device}.{stream.events}"
        log.append(f"record {self.name}")

    def query(self) -> bool:
        return not self.name

    def synchronize(self) -> None:
        log.append(f"wait {self.name}")


class Stream:
    def __init__(self, device: str) -> None:
        self.device, self.events = device, 0

    def synchronize(self) -> None:
        log.append(f"wait {self.device}")


class Tensor(NamedTuple):
    device: str
    is_cuda: bool = True


def buffers_for(*devices: str) -> PinnedBuffers:
    return PinnedBuffers([Stream(device) for device in devices])  # type: ignore[misc]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is pinned; devices are fakes that write down what they are told."""
    sizes: list[int] = []
    empty = torch.empty

    def take(size: int, *, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if pin_memory:
            sizes.append(size)
            pinned_tensors.append(empty(size, **more))
            return pinned_tensors[-1]
        return empty(size, **more)

    log.clear()
    pinned_tensors.clear()
    monkeypatch.setattr(torch, "empty", take)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(f"use {stream.device}"))
    return sizes


def test_buffer_is_refilled_only_after_its_copies_finish(pinned: list[int]) -> None:
    buffers = buffers_for("a", "b")
    places = []
    for step in range(2 * BUFFER_SETS_PER_THREAD + 1):
        log.append(f"step {step}")
        places.append(buffers.get_buffer(TILE_BUFFER, 1000 + step))
        places[-1][0] = step
    assert [place[0] for place in places] == [4, 3, 4, 3, 4]
    assert log[:3] == ["step 0", "use a", "use b"]
    waits: dict[int, list[str]] = {}
    for line in log:
        what, _, value = line.partition(" ")
        if what == "step":
            step, waits[int(value)] = int(value), []
        elif what == "wait":
            waits[step].append(value)
    # The first turn's events come behind what nothing has been copied from yet.
    assert waits[2] == ["a.2", "b.2"] and waits[3] == ["a.3", "b.3"]
    assert waits[4] == ["a.4", "b.4"]
    assert pinned == [4096] * BUFFER_SETS_PER_THREAD


def test_tile_and_cast_buffers_rotate_but_staging_does_not(pinned: list[int]) -> None:
    buffers = buffers_for("a")
    rounds = [
        [buffers.get_buffer(name, 5000) for name in (TILE_BUFFER, STAGING_BUFFER, CAST_BUFFER)]
        for _ in range(3)
    ]
    addresses = [
        [torch.frombuffer(view, dtype=torch.uint8).data_ptr() for view in one] for one in rounds
    ]
    assert addresses[0] == addresses[2]
    assert [a == b for a, b in zip(addresses[0], addresses[1], strict=True)] == [False, True, False]
    assert (
        sorted(pinned) == [8192] * 2 * BUFFER_SETS_PER_THREAD
    )  # what is only read from is not pinned


def test_places_point_into_current_buffer(pinned: list[int]) -> None:
    buffers = buffers_for("a")
    pattern = ScatterPattern(((0, 2), (10, 3)))
    for step in range(4):
        buffer = buffers.get_buffer(TILE_BUFFER, 100)
        for _, views in buffers.list_run_views(pattern, buffer):
            for view in views:
                view[:] = bytes([step]) * len(view)
        assert bytes(buffer[:2]) == bytes(buffer[10:13])[:2] == bytes([step]) * 2


def test_pinned_memory_is_bounded(pinned: list[int]) -> None:
    buffers = buffers_for("a")
    for size in (1, 100_000, 3 << 20, MAX_PINNED_SET_BYTES, 5, 16 << 20, MAX_PINNED_SET_BYTES + 1):
        for _ in range(BUFFER_SETS_PER_THREAD):
            assert len(buffers.get_buffer(TILE_BUFFER, size)) >= size
            assert len(buffers.get_buffer(CAST_BUFFER, 2 * size)) >= 2 * size
    assert max(pinned) == MAX_PINNED_SET_BYTES
    assert sum(turn.nbytes for turn in buffers._buffer_sets) <= BUFFER_SETS_PER_THREAD * (
        MAX_PINNED_SET_BYTES + 2 * MAX_PINNED_SET_BYTES
    )
    held = [view for turn in buffers._buffer_sets for view in turn._buffers.values()]
    assert (
        sum(len(view) for view in held if hasattr(view.obj, "tensor"))
        <= BUFFER_SETS_PER_THREAD * MAX_PINNED_SET_BYTES
    )
    assert 16 * BUFFER_SETS_PER_THREAD * MAX_PINNED_SET_BYTES <= 300 << 20
    tile = buffers.get_buffer(TILE_BUFFER, MAX_PINNED_SET_BYTES)
    assert hasattr(tile.obj, "tensor")  # whatever was cast before


def test_pinning_failure_falls_back_to_pageable_memory(
    monkeypatch: pytest.MonkeyPatch, pinned: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    empty = torch.empty

    def refuse(*size: Any, **how: Any) -> torch.Tensor:
        if how.pop("pin_memory", False):
            raise RuntimeError("CUDA error: out of memory\nand more")
        return empty(*size, **how)

    monkeypatch.setattr(torch, "empty", refuse)
    warn_slow_copies.cache_clear()
    buffers = buffers_for("a")
    for _ in range(3):
        assert len(buffers.get_buffer(TILE_BUFFER, 5000)) >= 5000
    assert capsys.readouterr().err.count("CUDA error: out of memory") == 1


def test_streams_wait_for_earlier_work_and_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, pinned: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(f"settle {device}"))
    tensors = cast(list[torch.Tensor], [Tensor("a"), Tensor("host", is_cuda=False), Tensor("a")])
    with pytest.raises(KeyError), create_pinned_buffers(tensors) as make:
        make().get_buffer(TILE_BUFFER, 10)
        weakref.finalize(pinned_tensors[0], log.append, "free")
        pinned_tensors.clear()
        raise KeyError
    # Freed before its copies are done it would be given to check the new commit.
    assert log == ["settle a", "use a", "record a.1", "wait a", "free"]


def test_host_tensors_use_plain_tile_buffers() -> None:
    with create_pinned_buffers([torch.zeros(3)]) as make:
        assert make is TileBuffers
