"""Merged rows against the formula, in any order and in any pieces."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptctl import formats
from ckptctl.catalog import ComputedTensor, ComputeInput
from ckptctl.numerics.kinds.lora import LoraUpdate
from ckptctl.planner.copying.blocks import build_rearranged_file
from ckptctl.planner.strided import StridedTensor
from ckptctl.storage.computed import OpenFiles
from ckptctl.storage.files import source_files
from tests.sweeps import one_in

ROWS, COLUMNS, RANK = 96, 40, 5
ORDER = ((4, 2, 12), (0, 2, 1))
"""Sizes of the axes that dimensions are made of, and their order."""


@pytest.fixture
def state():
    generator = torch.Generator().manual_seed(1)
    return {
        "base": torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16),
        "a": torch.randn(RANK, COLUMNS, generator=generator),
        "b": torch.randn(ROWS + 8, RANK, generator=generator).to(torch.float16),
        "magnitude": torch.rand(ROWS + 8, generator=generator) + 0.5,
    }


@pytest.fixture
def inputs(state, tmp_path: Path):
    save_file(state, tmp_path / "model.safetensors")
    catalog = formats.open_checkpoint(tmp_path)
    return {name: ComputeInput(tmp_path, entry) for name, entry in catalog.tensors.items()}


def read(made, pieces, every=1):
    """The elements of what is computed, asked for in so many bytes; the others are 0."""
    computed, others = made
    found = bytearray(ROWS * COLUMNS * getattr(torch, computed.dtype).itemsize)
    view, start = memoryview(found), 0
    root = computed.inputs[0].root
    with source_files(root) as files:
        virtual = OpenFiles({"//x": computed, **others}, lambda _: files).create_reader(root)
        while start < len(found):
            size = min(pieces, len(found) - start)
            virtual.readv("//x", [view[start : start + size]], start)
            start += size * every
    return torch.frombuffer(found, dtype=getattr(torch, computed.dtype)).view(ROWS, COLUMNS)


def reordered(tensor, dim, order):
    """The tensor with the axes of a dimension in another order."""
    if not order:
        return tensor
    sizes, places = order
    split = tensor.split(dim, sizes)
    after = (*range(dim), *(dim + one for one in places), *range(dim + 3, len(split.shape)))
    return split.permute(after).merge(dim, 3)


def definition(
    inputs, dtype="float32", dora=False, order=None, first=0, rows=(0, ROWS), columns=()
):
    names = ("b", "magnitude") if dora else ("b",)
    parts = {"a": reordered(StridedTensor.from_entry(inputs["a"].entry), 1, columns)}
    for name in names:
        held = StridedTensor.from_entry(inputs[name].entry).narrow(0, first, ROWS)
        parts[name] = reordered(held, 0, order)
    root = inputs["base"].root
    others = {f"//{name}": build_rearranged_file(root, part) for name, part in parts.items()}
    made = (
        ComputeInput(root, others[f"//{name}"].to_entry(name, (), f"//{name}")) for name in parts
    )
    change = LoraUpdate(range(*rows), 0.7, dora)
    every = (inputs["base"], *made)
    return ComputedTensor("lora", dtype, (ROWS, COLUMNS), every, arguments=(change,)), others


def expected(state, first=0, order=None, dora=False):
    b, m = state["b"].double(), state["magnitude"].double()[:, None]
    b, m = (part[first : first + ROWS] for part in (b, m))
    if order:
        b, m = (p.reshape(4, 2, 12, -1).transpose(1, 2).reshape(ROWS, -1) for p in (b, m))
    whole = state["base"].double() + 0.7 * (b @ state["a"].double())
    return whole * (m / whole.norm(dim=1, keepdim=True)) if dora else whole


@pytest.mark.parametrize("dora", one_in(2, [False, True]))
@pytest.mark.parametrize("order", [None, ORDER])
@pytest.mark.parametrize("first", [0, 8])
def test_merged_rows_match_formula(state, inputs, dora, order, first):
    found = read(definition(inputs, dora=dora, order=order, first=first), 1 << 20)
    torch.testing.assert_close(
        found.double(), expected(state, first, order, dora), rtol=2e-6, atol=2e-6
    )


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    "pieces", [pytest.param(52, marks=pytest.mark.slow), 160, 1000, 3 * 160 + 4]
)
def test_block_size_changes_no_bit(inputs, dora, pieces):
    one = definition(inputs, dora=dora, order=ORDER)
    assert torch.equal(read(one, pieces), read(one, 1 << 20))


@pytest.mark.parametrize("dora", [False, True])
def test_single_elements_match_complete_read(inputs, dora):
    one, every = definition(inputs, dora=dora, order=ORDER), 61
    found, whole = read(one, 4, every), read(one, 1 << 20)
    assert torch.equal(found.flatten()[::every], whole.flatten()[::every])


def test_merge_rounds_once(state, inputs):
    found = read(definition(inputs, "bfloat16"), 1 << 20)
    assert torch.equal(found, read(definition(inputs), 1 << 20).to(torch.bfloat16))


def test_rows_outside_change_are_unchanged(state, inputs):
    found = read(definition(inputs, "bfloat16", rows=(10, 30)), 1 << 20)
    assert torch.equal(found[:10], state["base"][:10])
    assert torch.equal(found[30:], state["base"][30:])
    assert (found[10:30] != state["base"][10:30]).any(dim=1).all()


@pytest.mark.parametrize("pieces", [160, 1 << 20])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("rows", [(1, ROWS, 2), (5, 77, 3)])
def test_rows_evenly_apart_match_formula(state, inputs, dora, pieces, rows):
    found = read(definition(inputs, dora=dora, rows=rows), pieces).double()
    changed = torch.zeros(ROWS, dtype=torch.bool)
    changed[rows[0] : rows[1] : rows[2]] = True
    b, m = state["b"].double()[: changed.sum()], state["magnitude"].double()[: changed.sum(), None]
    want = state["base"].double()
    sums = want[changed] + 0.7 * (b @ state["a"].double())
    want[changed] = sums * (m / sums.norm(dim=1, keepdim=True)) if dora else sums
    torch.testing.assert_close(found, want, rtol=2e-6, atol=2e-6)


def test_reordered_columns_of_lora_a_match_formula(state, inputs):
    found = read(definition(inputs, columns=((5, 2, 4), (1, 0, 2))), 1 << 20)
    a = state["a"].double().view(RANK, 5, 2, 4).transpose(1, 2).reshape(RANK, COLUMNS)
    whole = state["base"].double() + 0.7 * (state["b"][:ROWS].double() @ a)
    torch.testing.assert_close(found.double(), whole, rtol=2e-6, atol=2e-6)
