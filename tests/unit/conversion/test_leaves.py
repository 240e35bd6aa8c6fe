"""Strings of a file, tensors inside of leaves, quantized weights and their scales."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ckptctl
from ckptctl.catalog import Blob, Catalog, TensorEntry
from ckptctl.conversion.leaves import unpack_tensors
from ckptctl.errors import DamagedError, MappingError, UnsupportedError, UsageError
from ckptctl.formats import open_checkpoint, resolve_codecs
from ckptctl.numerics.dequantizing import require_scales_kept
from tests.checkpoints.readers import differences
from tests.unit.conversion.recognition.test_quantized import (
    BLOCKS,
    NORM,
    SCALE,
    SCALES,
    WEIGHT,
    catalog,
)

LEAF = "rng_state/shard_1_2"
STACK = "decoder.layers."
OBJECT = re.compile(rf"{STACK}([^0-9].*/shard)_(\d+)_\d+")


@pytest.fixture
def megatron(data: Path) -> Path:
    return data / "wrappers" / "megatron" / "ckpt" / "iter_0000010"


def stock(path: Path, scratch: Path) -> dict[str, Any]:
    """Return what torch's own consolidation makes of a DCP directory, with each layer by itself."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path, scratch / "stock.pt")
    found = dict(torch.load(scratch / "stock.pt", weights_only=False))
    stacked = [
        key for key, value in found.items() if key.startswith(STACK) and is_stack(key, value)
    ]
    for key in stacked:
        rest = key.removeprefix(STACK)
        found |= {f"{STACK}{layer}.{rest}": row for layer, row in enumerate(found.pop(key))}
    return {OBJECT.sub(rf"{STACK}\2.\1_0_1", key): value for key, value in found.items()}


def is_stack(key: str, value: object) -> bool:
    return torch.is_tensor(value) and not key.removeprefix(STACK)[0].isdecimal()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return not differences({"x": one}, {"x": other})
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_output_matches_stock_dcp_load(megatron: Path, tmp_path: Path) -> None:
    expected = stock(megatron, tmp_path)
    assert torch.is_tensor(expected[LEAF][0]["torch"])
    for only in ("model", "all"):
        ckptctl.convert(megatron, tmp_path / only, to="torch", only=only)
        found = torch.load(tmp_path / only, weights_only=True)
        named = {key: value for key, value in expected.items() if only == "all" or key in found}
        assert {LEAF, "rng_state/shard_0_2"} <= named.keys() or only == "model"
        assert all(same(found[key], value) for key, value in named.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_items_are_copied_unchanged(megatron: Path, tmp_path: Path) -> None:
    expected = stock(megatron, tmp_path)
    ckptctl.convert(megatron, tmp_path / "out", to="dcp", only="all")
    blob = open_checkpoint(tmp_path / "out").blobs[LEAF]
    assert blob.file and blob.nbytes == open_checkpoint(megatron).blobs[LEAF].nbytes
    found = stock(tmp_path / "out", tmp_path)
    assert all(same(found[key], value) for key, value in expected.items())


def test_megatron_with_leaf_tensors_verifies_as_complete(megatron: Path) -> None:
    """The tensors are a few of a model's, which is all that there is to say."""
    found = ckptctl.verify(megatron, level="full")
    assert (found.findings, found.scope) == ((), "structure")
    assert any("or a different model; missing:" in note for note in found.notes)
    assert found.verdict == "complete"


def test_unpacked_name_collision_is_an_error(megatron: Path) -> None:
    found = open_checkpoint(megatron)
    read = resolve_codecs(Catalog(found.root, found.path, "dcp", {}, {}, blobs=found.blobs))
    name = f"{LEAF}.0.rank"
    taken = Catalog(
        found.root,
        found.path,
        "dcp",
        {},
        {name: TensorEntry(name, "int64", (), (), (name,))},
        blobs={LEAF: read.blobs[LEAF], "other": Blob("other", ("other",), value=3)},
    )
    with pytest.raises(UnsupportedError, match="two values"):
        unpack_tensors(taken, [LEAF])
    untouched, parts = unpack_tensors(taken, ["other"])
    assert untouched == taken and not parts


STATE = {"a.weight": torch.arange(64.0).reshape(8, 8), "b.weight": torch.ones(4, 4)}
KOHYA = {"ss_tag_frequency": '{"dog": 3}', "modelspec.title": "mine", "sshs_model_hash": "0f"}
TORCHAO = {"tensor_names": json.dumps(list(STATE)), "a.weight": '{"_type": "Float8Tensor"}'}
HASH = {"sshs_model_hash"}
BOUND = HASH | TORCHAO.keys()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    save_file(STATE, path, metadata=KOHYA | TORCHAO)
    return path


def read(path: Path) -> dict[str, str]:
    """Return what safetensors itself finds, the same in each file of *path*."""
    found: list[dict[str, str]] = []
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found.append(opened.metadata())
    assert all(one == found[0] for one in found)
    assert found[0].pop("format") == "pt"
    return found[0]


@pytest.mark.parametrize("shard", [128, 10**9])
def test_metadata_is_kept_but_hashes_are_dropped_when_sharded(
    source: Path, tmp_path: Path, shard: int
) -> None:
    """All of them; but a hash of one file's tensors is none of several files."""
    lost = HASH if shard == 128 else set()
    kept = {key: text for key, text in (KOHYA | TORCHAO).items() if key not in lost}
    done = ckptctl.convert(source, tmp_path / "out", to="hf", max_shard_size=shard)
    assert read(tmp_path / "out") == kept
    assert done.plan.left_out.keys() == {f"__metadata__.{key}" for key in lost}
    again = ckptctl.convert(tmp_path / "out", tmp_path / "again", to="hf")
    assert read(tmp_path / "again") == kept
    assert not again.plan.left_out


def test_hash_is_dropped_when_shards_are_merged(tmp_path: Path) -> None:
    for number, (name, tensor) in enumerate(STATE.items(), 1):
        file = tmp_path / f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensor}, file, metadata={"modelspec.hash_sha256": "0f", "a": "b"})
    done = ckptctl.convert(tmp_path, tmp_path.parent / "one", to="hf")
    assert read(tmp_path.parent / "one") == {"a": "b"}
    assert list(done.plan.left_out) == ["__metadata__.modelspec.hash_sha256"]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_extracted_tensors_keep_valid_metadata(source: Path, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"out{suffix}"
    done = ckptctl.extract(source, "a.weight", output=target)
    kept = KOHYA.keys() - HASH if suffix == ".safetensors" else set()
    if kept:
        with safe_open(target, "pt") as opened:
            assert opened.metadata() == {"format": "pt", **{key: KOHYA[key] for key in kept}}
    (note,) = done.notes
    assert all(f"`__metadata__.{key}`" in note for key in (KOHYA | TORCHAO).keys() - kept)
    assert not any(f"`__metadata__.{key}`" in note for key in kept)


@pytest.mark.parametrize("option", [{"dtype": "fp16"}, {"exclude": "b*"}])
def test_invalidated_metadata_is_dropped_and_named(source: Path, tmp_path: Path, option) -> None:
    done = ckptctl.convert(source, tmp_path / "out", to="hf", **option)
    assert read(tmp_path / "out").keys() == KOHYA.keys() - BOUND
    assert {name for name in done.plan.left_out if name.startswith("__")} == {
        f"__metadata__.{key}" for key in BOUND
    }


def test_formats_without_metadata_list_it_as_skipped(source: Path, tmp_path: Path) -> None:
    done = ckptctl.convert(source, tmp_path / "out", to="dcp")
    assert set(done.plan.left_out) == {f"__metadata__.{key}" for key in KOHYA | TORCHAO}


def test_contradicting_shard_metadata_is_dropped_with_note(tmp_path: Path) -> None:
    files = {}
    for number, (name, tensor) in enumerate(STATE.items(), 1):
        files[name] = f"model-{number:05d}-of-00002.safetensors"
        said = {"modelspec.title": f"{number}", "modelspec.author": "same"}
        save_file({name: tensor}, tmp_path / files[name], metadata=said)
    for index in (False, True):
        if index:
            content = json.dumps({"metadata": {"total_size": 320}, "weight_map": files})
            (tmp_path / "model.safetensors.index.json").write_text(content)
        done = ckptctl.convert(tmp_path, tmp_path.parent / f"out-{index}", to="hf")
        assert read(tmp_path.parent / f"out-{index}") == {"modelspec.author": "same"}
        assert any("`modelspec.title`" in note for note in done.plan.notes)


OTHER = {"b.weight": ("float8_e4m3fn", 128, 128)}
FP8 = {"quant_method": "fp8"}


def check(tensors, *, without=(), renamed=False, dtype=None, quantization=None, **options):
    chosen, found = tensors.keys() - set(without), catalog(tensors, quantization)
    require_scales_kept(found, chosen, renamed=renamed, dtype=dtype, **options)


def test_quantized_pair_can_be_renamed():
    check(WEIGHT | SCALE | NORM, renamed=True, quantization=FP8)
    check(BLOCKS | SCALES | NORM, renamed=True)


def test_complete_copy_requires_scales_unless_missing_tensors_are_allowed():
    with pytest.raises(DamagedError, match=r"without scales: `b\.weight`"):
        check(OTHER | WEIGHT | SCALE, quantization=FP8)
    check(OTHER | WEIGHT | SCALE, quantization=FP8, allow_missing=True)


def test_unscaled_float8_is_cast_as_plain_numbers():
    check(OTHER | NORM, renamed=True, dtype="bfloat16")


@pytest.mark.parametrize("renamed", [True, False])
@pytest.mark.parametrize("pair", [WEIGHT | SCALE, BLOCKS | SCALES])
def test_weights_without_scales_are_refused(pair, renamed):
    with pytest.raises(MappingError, match=r"1 quantized tensor .* without scales") as caught:
        check(pair | NORM, without=[list(pair)[1]], renamed=renamed)
    assert "--dequantize" in caught.value.hint


def test_weight_may_be_excluded_with_its_scales():
    check(WEIGHT | SCALE | NORM, without=[*WEIGHT, *SCALE], renamed=True, dtype="float32")


def test_dtype_cast_of_quantized_weights_is_refused():
    with pytest.raises(UsageError, match="`--dtype` cannot cast quantized") as caught:
        check(WEIGHT | SCALE | NORM, dtype="bfloat16")
    assert "--dequantize" in caught.value.hint


def test_cast_leaves_mxfp4_bytes_unchanged():
    check(BLOCKS | SCALES | NORM, dtype="float32")


@pytest.mark.parametrize(
    ("tensors", "quantization"), [(WEIGHT | SCALE | OTHER, None), (OTHER | NORM, FP8)]
)
def test_float8_without_scales_in_quantized_checkpoint_is_damage(tensors, quantization):
    with pytest.raises(DamagedError, match=r"without scales: `b\.weight`"):
        check(tensors, renamed=True, quantization=quantization)
