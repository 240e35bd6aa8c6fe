"""Every golden model in every layout, read in parts: what each part gets is proven by digests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl import formats
from ckptctl.catalog import Box, build_memory_name
from ckptctl.save_load.loading.load_options import LoadOptions
from ckptctl.save_load.loading.reading import prepare_read
from ckptctl.save_load.loading.state_mapping import (
    MemoryBox,
    RequestedTensor,
    StateMapping,
    map_state,
)
from ckptctl.save_load.saving.local_shards import TensorMeta
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from tests.checkpoints.golden import Golden, State, digest, family_of, names
from tests.sweeps import one_in

PARTS = 3
CHOSEN = ("gpt_oss", "llama4_text", "mixtral", "phi3", "qwen3_moe", "deepseek_v3", "gemma3")


def cases() -> Iterator[tuple[str, str]]:
    """Yield golden models of hard families, with each of their layouts."""
    for name in names():
        if family_of(name) in CHOSEN:
            yield from ((name, layout) for layout in Golden.read(name).digests)


@pytest.mark.parametrize(("name", "layout"), one_in(11, cases()))
def test_every_tensor_loads_exactly_in_parts(tmp_path: Path, name: str, layout: str) -> None:
    golden = Golden.read(name)
    source = golden.save(tmp_path / "hf")
    family = family_of(name)
    ckptctl.convert(source, tmp_path / "t.pt", to="torch", to_layout=layout, model_type=family)
    truth: State = torch.load(tmp_path / "t.pt")
    assert digest(truth) == golden.digests[layout]
    leaves = {
        key: TensorMeta(_kind(value), tuple(value.shape), (key,)) for key, value in truth.items()
    }
    options = LoadOptions(model_type=family, layout=layout)
    mapping = map_state(formats.open_checkpoint(source), leaves, options.mapping)
    for dim in range(3):
        found = {key: torch.zeros_like(value) for key, value in truth.items()}
        for part in range(PARTS):
            _read(mapping, found, dim, part)
        assert digest(found) == golden.digests[layout], dim


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _read(mapping: StateMapping, found: State, dim: int, part: int) -> None:
    """Read the rows that one of three ranks holds, and put them into the full tensors."""
    wanted: dict[str, RequestedTensor] = {}
    views: dict[str, memoryview] = {}
    pieces: dict[str, tuple[torch.Tensor, bytearray]] = {}
    for key, full in found.items():
        cut = min(dim, full.ndim - 1)
        chunks = full.chunk(PARTS, cut) if full.ndim else (full,)
        targets: tuple[MemoryBox, ...] = ()
        if part < len(chunks) and chunks[part].numel():
            own = chunks[part]
            offsets = [0] * full.ndim
            if full.ndim:
                offsets[cut] = sum(chunk.shape[cut] for chunk in chunks[:part])
            memory = bytearray(own.nbytes)
            steps = own.contiguous().stride()
            targets = (MemoryBox(Box(tuple(offsets), tuple(own.shape)), key, tuple(steps)),)
            views[build_memory_name(key)] = memoryview(memory)
            pieces[key] = own, memory
        wanted[key] = RequestedTensor(_kind(full), tuple(full.shape), targets)
    plan = prepare_read(mapping, wanted, cast=False).plan_tensors(wanted)
    how = ExecutionOptions(checksum=False)
    execute_plan(plan, Path(plan.source_root), how, lambda _: None, memory=views)
    for own, memory in pieces.values():
        own.copy_(torch.frombuffer(memory, dtype=own.dtype).view(own.shape))
