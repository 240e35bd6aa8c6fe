"""Plans for parts of tensors in memory: what is read goes with what is wanted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptctl import formats
from ckptctl.catalog import Box, build_memory_name
from ckptctl.errors import CoverageError, MappingError
from ckptctl.save_load.loading.checks import require_boxes_covered
from ckptctl.save_load.loading.load_options import LoadOptions
from ckptctl.save_load.loading.reading import prepare_read
from ckptctl.save_load.loading.state_mapping import (
    MemoryBox,
    RequestedTensor,
    StateMapping,
    map_state,
)
from ckptctl.save_load.saving.local_shards import TensorMeta
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from tests.checkpoints import rename, save_hf, tiny_llama, to_meta_names

QUERY = "layers.0.attention.wq.weight"


def _read(mapping: StateMapping, name: str, box: Box, full: torch.Tensor) -> Execution:
    """Read one box and compare it with that part of *full*."""
    memory = bytearray(box.numel * full.element_size())
    steps = tuple(torch.empty(box.sizes, device="meta").stride())
    kind = str(full.dtype).removeprefix("torch.")
    wanted = {name: RequestedTensor(kind, tuple(full.shape), (MemoryBox(box, "0", steps),))}
    plan = prepare_read(mapping, wanted, cast=False).plan_tensors(wanted)
    how = ExecutionOptions(checksum=False)
    views = {build_memory_name("0"): memoryview(memory)}
    done = execute_plan(plan, Path(plan.source_root), how, lambda _: None, memory=views)
    cuts = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    found = torch.frombuffer(memory, dtype=full.dtype).view(box.sizes)
    assert torch.equal(found, full[cuts])
    return done


@pytest.mark.parametrize(
    "box", [Box((8, 0), (8, 64)), Box((0, 24), (64, 8)), Box((3, 5), (41, 17)), Box((7, 9), (1, 1))]
)
def test_slice_of_permuted_tensor_reads_bounded_bytes(tmp_path: Path, box: Box) -> None:
    weights, config = tiny_llama()
    folder = save_hf(tmp_path / "hf", weights, config)
    meta = to_meta_names(weights, config)
    leaves = {
        name: TensorMeta("bfloat16", tuple(value.shape), (name,)) for name, value in meta.items()
    }
    mapping = map_state(formats.open_checkpoint(folder), leaves, LoadOptions().mapping)
    assert (mapping.from_layout, mapping.prefix) == ("hf", "")
    done = _read(mapping, QUERY, box, meta[QUERY])
    assert done.bytes_read <= 2 * box.numel * 2 + 64


def test_state_with_prefixed_names_maps_without_model_type(tmp_path: Path) -> None:
    tensors = {"a.b": torch.randn(5, 7), "c": torch.arange(4)}
    folder = save_hf(tmp_path / "hf", tensors)
    leaves = {
        f"net.{name}": TensorMeta(
            str(value.dtype).removeprefix("torch."), tuple(value.shape), ("net",)
        )
        for name, value in tensors.items()
    }
    leaves = {
        name: TensorMeta(one.dtype, one.shape, ("net", name[4:])) for name, one in leaves.items()
    }
    mapping = map_state(formats.open_checkpoint(folder), leaves, LoadOptions().mapping)
    assert mapping.prefix == "net." and mapping.layout is None
    _read(mapping, "net.a.b", Box((1, 2), (3, 4)), tensors["a.b"])


def test_state_with_unknown_layout_is_a_mapping_error(tmp_path: Path) -> None:
    weights, config = tiny_llama()
    folder = save_hf(tmp_path / "hf", weights, config)
    leaves = {
        f"odd.{name}": TensorMeta("bfloat16", (2, 2), (f"odd.{name}",)) for name in ("x", "y")
    }
    with pytest.raises(MappingError, match="unknown layout of the state"):
        map_state(formats.open_checkpoint(folder), leaves, LoadOptions(model_type="llama3").mapping)
    assert rename(weights, "hf", "meta")


def test_box_out_of_bounds_is_a_coverage_error(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "hf", {"a": torch.zeros(6, 2)})
    entry = formats.open_checkpoint(folder).tensors["a"]
    require_boxes_covered(entry, [MemoryBox(Box((2, 0), (3, 2)), "0", (2, 1))])
    with pytest.raises(CoverageError):
        require_boxes_covered(entry, [MemoryBox(Box((4, 0), (3, 2)), "0", (2, 1))])
