"""Virtual files: rectangles, and every kind against implementations that are not ours."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptctl.catalog import (
    Box,
    Catalog,
    ComputedTensor,
    ComputeInput,
    Extent,
    TensorEntry,
    build_computed_name,
)
from ckptctl.errors import DamagedError
from ckptctl.numerics.quantization.formulas import ScaleBlocks
from ckptctl.planner.copying.blocks import build_rearranged_file
from ckptctl.planner.strided import StridedTensor, stack
from ckptctl.storage.compare import are_tensors_equal
from ckptctl.storage.computed import (
    OpenFiles,
    load_kinds,
    needs_torch,
    open_catalog_reader,
    split_rectangles,
)
from ckptctl.storage.files import source_files
from tests.checkpoints.readers import raw_bytes
from tests.sweeps import one_in

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NAME = build_computed_name("w")


@pytest.fixture
def files(tmp_path):
    with source_files(tmp_path) as found:
        yield found


def stored(files, name, tensor):
    """Write *tensor* into a file of its own and return it as an input."""
    (files.root / name).write_bytes(raw_bytes(tensor))
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    extent = Extent(Box.whole(shape), name, 0, tensor.numel() * tensor.element_size())
    return ComputeInput(files.root, TensorEntry(name, dtype, shape, (extent,), (name,)))


def read(files, computed, spans, others=()):
    """Return the bytes of *spans* of the virtual file."""
    opened = OpenFiles({NAME: computed, **dict(others)}, lambda _: files)
    buffer = memoryview(bytearray(sum(size for _, size in spans)))
    pieces, start = [], 0
    for offset, size in spans:
        pieces.append((offset, size, start))
        start += size
    opened.open_source(files, NAME).read_pieces(pieces, buffer)
    return bytes(buffer)


def same_everywhere(files, computed, expected):
    """Read the file whole, in random pieces and in columns."""
    data, item = raw_bytes(expected), expected.element_size()
    assert read(files, computed, [(0, len(data))]) == data
    dice = random.Random(0)
    for _ in range(12):
        cuts = sorted(dice.randrange(0, len(data) // item) * item for _ in range(6))
        spans = [(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=True) if b > a]
        dice.shuffle(spans)
        wanted = b"".join(data[a : a + size] for a, size in spans)
        assert read(files, computed, spans) == wanted
    width = expected.shape[-1] * item
    column = [(row * width + 5 * item, 7 * item) for row in range(len(data) // width)]
    assert read(files, computed, column) == b"".join(data[a : a + size] for a, size in column)


def fp8(files, weight, scale, dtype, block=(128, 128)):
    inputs = stored(files, "weight", weight), stored(files, "scale", scale)
    sizes = ScaleBlocks(*block)
    return ComputedTensor("block_fp8", dtype, tuple(weight.shape), inputs, sizes)


def every_fp8(*shape):
    torch.manual_seed(1)
    return torch.randint(0, 256, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def deepseek(weight, scale, dtype, block=128):
    """What ``weight_dequant_kernel`` of DeepSeek-V3 does, block by block."""
    found = torch.empty(weight.shape, dtype=dtype)
    for row in range(0, weight.shape[0], block):
        for column in range(0, weight.shape[1], block):
            part = slice(row, row + block), slice(column, column + block)
            factor = scale[row // block, column // block].float()
            found[part] = (weight[part].float() * factor).to(dtype)
    return found


@pytest.mark.parametrize("dtype", one_in(3, DTYPES))
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_dequantization_matches_deepseek_for_any_size(files, dtype, scales):
    weight, scale = every_fp8(300, 200), (torch.rand(3, 2) * 3 + 0.01).to(scales)
    computed = fp8(files, weight, scale, dtype)
    same_everywhere(files, computed, deepseek(weight, scale, DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(256, 384), (3, 256, 128)])
def test_fp8_dequantization_matches_transformers(files, dtype, shape):
    weight = every_fp8(*shape)
    scale = torch.rand(*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    peer = pytest.importorskip("transformers.integrations.finegrained_fp8")
    theirs = peer.Fp8Dequantize(None)._dequantize_one(weight, scale, DTYPES[dtype])
    same_everywhere(files, fp8(files, weight, scale, dtype), theirs)


def test_fp8_dequantization_with_single_scale_matches_transformers(files):
    weight, scale = every_fp8(20, 30), torch.tensor(0.3)
    peer = pytest.importorskip("transformers.integrations.finegrained_fp8")
    theirs = peer.Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
    same_everywhere(files, fp8(files, weight, scale, "bfloat16", (20, 30)), theirs)


def test_every_fp8_byte_dequantizes_exactly_to_float32(files):
    weight = torch.arange(256, dtype=torch.uint8).view(1, 256).view(torch.float8_e4m3fn)
    computed = fp8(files, weight, torch.ones(1, 2), "float32")
    assert read(files, computed, [(0, 1024)]) == raw_bytes(weight.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_dequantization_matches_transformers(files, dtype):
    torch.manual_seed(2)
    blocks = torch.randint(0, 256, (3, 40, 5, 16), dtype=torch.uint8)
    scales = torch.randint(0, 256, (3, 40, 5), dtype=torch.uint8)
    inputs = stored(files, "b", blocks), stored(files, "s", scales)
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=DTYPES[dtype]).transpose(1, 2)
    same_everywhere(files, ComputedTensor("mxfp4", dtype, (3, 40, 160), inputs), theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_mxfp4_byte_and_scale_pair_matches_transformers(files, dtype):
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 16)
    inputs = stored(files, "b", blocks), stored(files, "s", scales)
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    theirs = mxfp4.convert_moe_packed_tensors(blocks[None], scales[None], dtype=DTYPES[dtype])
    expected = theirs[0].transpose(0, 1)
    computed = ComputedTensor("mxfp4", dtype, (256, 512), inputs)
    found = read(files, computed, [(0, expected.numel() * expected.element_size())])
    assert torch.equal(
        torch.frombuffer(bytearray(found), dtype=DTYPES[dtype]).view(256, 512).nan_to_num(9.0),
        expected.nan_to_num(9.0),
    )


@pytest.mark.parametrize("shape", [(), (9,), (4, 6)])
def test_constant_file_reads_as_constant(files, shape):
    ones = ComputedTensor("constant", "bfloat16", shape, arguments=1.0)
    expected = raw_bytes(torch.ones(shape, dtype=torch.bfloat16))
    assert read(files, ones, [(0, len(expected))]) == expected
    zeros = ComputedTensor("constant", "float32", shape)
    assert not any(read(files, zeros, [(0, 2 * len(expected))]))


def test_computed_file_reads_from_computed_input(files):
    weight = torch.ones(8, 8).to(torch.float8_e4m3fn)
    inner = build_computed_name("scale")
    whole = Extent(Box((0, 0), (1, 1)), inner, 0, 4)
    scale = ComputeInput(Path(), TensorEntry("scale", "float32", (1, 1), (whole,), ("scale",)))
    inputs = stored(files, "w", weight), scale
    sizes = ScaleBlocks(128, 128)
    computed = ComputedTensor("block_fp8", "float32", (8, 8), inputs, sizes)
    constant = ComputedTensor("constant", "float32", (1, 1), arguments=2.5)
    found = read(files, computed, [(0, 256)], {inner: constant}.items())
    assert found == raw_bytes(torch.full((8, 8), 2.5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("turned", [False, True])
def test_rearranged_tensor_reads_match_torch_in_any_rectangle(files, dtype, turned):
    """Experts apart, stacked and reordered: in long runs, and element by element."""
    experts = [torch.randn(60, 400) for _ in range(3)]
    inputs = [stored(files, f"e{number}", one) for number, one in enumerate(experts)]
    stacked = stack([StridedTensor.from_entry(one.entry) for one in inputs])
    order = (0, 2, 1) if turned else (1, 0, 2)
    computed = build_rearranged_file(inputs[0].root, stacked.permute(order).cast(dtype))
    assert needs_torch(computed) == (turned or dtype == "bfloat16")
    same_everywhere(files, computed, torch.stack(experts).permute(order).to(DTYPES[dtype]))


def test_nested_computed_files_use_separate_buffers(files):
    """A rectangle of the outer file takes two of the inner one, and both have an input."""
    base = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(2))
    inner, shape = build_computed_name("inner"), tuple(base.shape)
    whole = (stored(files, "base", base),)
    same = ComputedTensor("added", "float32", shape, whole, 0)
    given = ComputeInput(Path(), same.to_entry("inner", ("inner",), inner))
    computed = ComputedTensor("lora", "bfloat16", shape, (given,), ())
    found = read(files, computed, [(0, base.nbytes // 2)], {inner: same}.items())
    assert found == raw_bytes(base.bfloat16())


def test_computed_tensors_compare_by_elements(files):
    stored(files, "real", torch.full((3, 4), 2.0))
    made = {
        build_computed_name("a"): ComputedTensor("constant", "float32", (3, 4), arguments=2),
        build_computed_name("b"): ComputedTensor("constant", "float32", (4, 3), arguments=2),
        build_computed_name("c"): ComputedTensor("constant", "float32", (3, 4), arguments=3),
    }
    places = {"real": "real", **{name[2:]: name for name in made}}
    entries = {
        name: TensorEntry(
            name,
            "float32",
            (3, 4),
            (Extent(Box.whole((3, 4)), file, 0, 48, strides=(1, 3) if name == "b" else None),),
            (name,),
        )
        for name, file in places.items()
    }
    root = files.root
    catalog = Catalog(root, root, "hf", {}, entries, computed=made)
    with open_catalog_reader(catalog) as reader:
        assert are_tensors_equal(reader, entries["real"], entries["a"])
        assert are_tensors_equal(reader, entries["a"], entries["b"])
        assert not are_tensors_equal(reader, entries["a"], entries["c"])


def test_inputs_split_into_boxes_are_read(files):
    weight, scale = every_fp8(300, 200), torch.rand(3, 2)
    computed = fp8(files, weight, scale, "float32")
    (files.root / "left").write_bytes(raw_bytes(weight[:, :70]))
    (files.root / "right").write_bytes(raw_bytes(weight[:, 70:]))
    extents = (
        Extent(Box((0, 0), (300, 70)), "left", 0, 300 * 70),
        Extent(Box((0, 70), (300, 130)), "right", 0, 300 * 130),
    )
    entry = TensorEntry("weight", "float8_e4m3fn", (300, 200), extents, ("weight",))
    cut = ComputeInput(files.root, entry)
    computed = replace(computed, inputs=(cut, computed.inputs[1]))
    same_everywhere(files, computed, deepseek(weight, scale, torch.float32))


def test_truncated_input_is_damaged(files):
    computed = fp8(files, every_fp8(128, 128), torch.ones(1, 1), "float32")
    (files.root / "weight").write_bytes(b"short")
    with pytest.raises(DamagedError, match="truncated"):
        read(files, computed, [(0, 128 * 128 * 4)])


def test_rectangles_group_rows_within_limit():
    column = [(row * 100 + 20, 10, row * 10) for row in range(50)]
    found = list(split_rectangles(column, 100, max_bytes=200))
    assert [(one.row, one.rows, one.start, one.nbytes) for one in found] == [
        (0, 20, 20, 10),
        (20, 20, 20, 10),
        (40, 10, 20, 10),
    ]
    assert [one.destinations for one in found] == [[(0, 200)], [(200, 200)], [(400, 100)]]


def test_range_splits_into_head_full_rows_and_tail():
    found = [
        (r.row, r.rows, r.start, r.nbytes) for r in split_rectangles([(30, 300, 0)], 100, 1000)
    ]
    assert found == [(0, 1, 30, 70), (1, 2, 0, 100), (3, 1, 0, 30)]


def test_row_above_limit_is_split():
    found = [(r.row, r.rows, r.start, r.nbytes) for r in split_rectangles([(0, 250, 0)], 100, 64)]
    assert found == [(0, 1, 0, 64), (0, 1, 64, 36), (1, 1, 0, 64), (1, 1, 64, 36), (2, 1, 0, 50)]


@pytest.mark.parametrize(
    ("width", "offset", "step"),
    [
        (16384, 0, 64 * 16384),  # 64 rows are a mebibyte
        (28672, 0, 64 * 28672),
        (28672, 16 << 20, 10 * 64 * 28672 - (16 << 20)),  # a unit begins between them
        (64 << 10, 5, (1 << 20) - 5),  # 64 rows are too many: whole rows
        (3 << 20, 0, 1 << 20),  # a row is too long
    ],
)
def test_best_step_aligns_to_row_groups(width, offset, step):
    computed = ComputedTensor("lora", "bfloat16", (4096, width // 2), (), ())
    found = OpenFiles({NAME: computed}, lambda _: pytest.fail("nothing is read")).find_virtual_file(
        NAME
    )
    assert found.choose_read_size(offset, 1 << 20) == step


def test_builtin_computed_kinds_are_registered():
    assert {"block_fp8", "mxfp4", "constant"} <= load_kinds().keys()
    assert all(callable(kind.compute) for kind in load_kinds().values())
