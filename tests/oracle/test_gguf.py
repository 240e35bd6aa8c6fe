"""GGUF files of the package gguf 0.19, against its own reader and against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from tests.oracle.tiny import TINY, family_of

pytest.importorskip("transformers", reason="the oracle extra is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

import gguf
import numpy as np

from ckptctl.formats.gguf.gguf_reader import OmittedArray, read_header
from ckptctl.numerics.quantization.ggml import BLOCK_TYPES, UNQUANTIZED_TYPES
from ckptctl.storage.files import source_files
from tests.oracle import gguf_files, hf_models
from tests.oracle.gguf_files import NAMES, UNREAD
from tests.oracle.models import TOLERANCE, distance
from tests.oracle.test_families import WRONG, with_swapped_norms

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
Kind = gguf.GGMLQuantizationType


def config_of(name: str) -> Any:
    """Return a configuration that GGUF has words for: llama.cpp knows the windows of Gemma 3."""
    config = TINY[name]()
    if name == "gemma3_text":
        config.num_hidden_layers = 7
        config.layer_types = [f"{'full' if n == 5 else 'sliding'}_attention" for n in range(7)]
    return config


def made(tmp_path: Path, name: str) -> tuple[Any, Path, torch.Tensor]:
    """Return a random model, its folder and its logits."""
    model = hf_models.random_model(config_of(name))
    return model, hf_models.save(model, tmp_path / "hf"), hf_models.logits(model)


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return distance(found, expected) < TOLERANCE * max(1.0, float(expected.abs().max()))


def converted(source: Path, out: Path, **options: Any) -> torch.Tensor:
    ckptctl.convert(source, out, to="hf", **options)
    return hf_models.logits(hf_models.load_strict(out))


@pytest.mark.parametrize("name", NAMES)
def test_unquantized_gguf_to_hf_keeps_logits(tmp_path: Path, name: str) -> None:
    """config.json is made of the file alone."""
    model, folder, expected = made(tmp_path, name)
    state = gguf_files.tensors(model, folder)
    file = gguf_files.write(tmp_path / "model.gguf", model, state)
    if name not in UNREAD:
        assert near(gguf_files.logits(file, model.config), expected)
    assert near(converted(file, tmp_path / "out"), expected)
    wrong = gguf_files.write(tmp_path / "wrong.gguf", model, with_swapped_norms(state))
    assert distance(converted(wrong, tmp_path / "wrong"), expected) > WRONG


@pytest.mark.parametrize("name", NAMES)
def test_hf_to_gguf_layout_matches_gguf_tensors(tmp_path: Path, name: str) -> None:
    """The same layout, the other way: what would be in a GGUF file."""
    model, folder, _ = made(tmp_path, name)
    out = tmp_path / "gguf.pt"
    ckptctl.convert(folder, out, to="torch", to_layout="gguf", model_type=family_of(name))
    found = torch.load(out, weights_only=True)
    expected = gguf_files.tensors(model, folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("name", ["llama2", "qwen3_moe", "gemma2"])
def test_dequantized_gguf_matches_transformers_logits(tmp_path: Path, name: str, kind: str) -> None:
    model, folder, expected = made(tmp_path, name)
    state = gguf_files.tensors(model, folder)
    file = gguf_files.write(tmp_path / "model.gguf", model, state, kind)
    found = converted(file, tmp_path / "out", dequantize="float32")
    assert near(found, gguf_files.logits(file, model.config))
    assert distance(found, expected) > TOLERANCE * float(expected.abs().max())
    told = ckptctl.inspect(file)
    assert (told.format, told.model_type, told.lacks) == ("gguf", family_of(name), ())


def finite_blocks(kind: Any, rows: int, blocks: int) -> np.ndarray:
    """Return random blocks of *kind* whose elements are finite in fp32."""
    size = next(one for number, one in BLOCK_TYPES.items() if number == kind).nbytes
    generator = np.random.default_rng(int(kind))
    raw = generator.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    while True:
        values = gguf.dequantize(raw, kind)
        strange = ~np.isfinite(values).all(axis=-1)
        if not strange.any():
            return raw.reshape(rows, blocks * size)
        raw[strange] = generator.integers(0, 256, (int(strange.sum()), size), dtype=np.uint8)


@pytest.mark.parametrize(
    "kind",
    [Kind(n) for n, one in BLOCK_TYPES.items() if one.understood],
    ids=lambda kind: kind.name,
)
def test_gguf_dequantization_is_bit_exact(tmp_path: Path, kind: Any) -> None:
    raw = finite_blocks(kind, 6, 5)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "unheard-of")
    writer.add_tensor("a.weight", raw, raw_dtype=kind)
    writer.add_tensor("b.weight", raw.reshape(2, 3, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = torch.from_numpy(gguf.dequantize(raw, kind))
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / f"{dtype}.pt"
        ckptctl.convert(tmp_path / "m.gguf", out, to="torch", dequantize=dtype)
        found = torch.load(out, weights_only=True)
        wanted = expected.to(getattr(torch, dtype))
        assert torch.equal(found["a.weight"], wanted)
        assert torch.equal(found["b.weight"], wanted.view(2, 3, -1))


def test_block_sizes_match_gguf_package() -> None:
    sizes = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    ours = {number: (one.elements, one.nbytes) for number, one in BLOCK_TYPES.items()}
    assert {n: size for n, size in sizes.items() if n not in UNQUANTIZED_TYPES} == ours
    assert {Kind(n).name for n in BLOCK_TYPES} == {one.name for one in BLOCK_TYPES.values()}


def test_header_matches_gguf_reader(tmp_path: Path) -> None:
    model, folder, _ = made(tmp_path, "qwen3_moe")
    state = gguf_files.tensors(model, folder)
    file = gguf_files.write(tmp_path / "model.gguf", model, state, "Q8_0")
    theirs = gguf.GGUFReader(file)
    with source_files(tmp_path) as files:
        ours = read_header(files, file.name)
    assert [(one.name, one.shape, one.kind, one.offset, one.nbytes) for one in ours.tensors] == [
        (
            one.name,
            tuple(map(int, one.shape))[::-1],
            int(one.tensor_type),
            one.data_offset,
            one.n_bytes,
        )
        for one in theirs.tensors
    ]
    fields = {key: field.contents() for key, field in theirs.fields.items() if "GGUF." not in key}
    assert ours.metadata.keys() == fields.keys()
    kept = {
        key: value for key, value in ours.metadata.items() if not isinstance(value, OmittedArray)
    }
    assert kept == {key: fields[key] for key in kept}


def test_split_gguf_converts_and_requires_every_file(tmp_path: Path) -> None:
    model, folder, expected = made(tmp_path, "qwen2")
    state = gguf_files.tensors(model, folder)
    target = tmp_path / "parts"
    target.mkdir()
    writer = gguf.GGUFWriter(target / "m.gguf", "qwen2", split_max_tensors=9)
    gguf_files.describe(writer, model.config)
    for name, value in state.items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file(target / "m.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(target.iterdir())
    assert len(files) > 1
    assert near(converted(target, tmp_path / "out"), expected)
    assert near(converted(files[1], tmp_path / "again"), expected)
    files[-1].unlink()
    with pytest.raises(ckptctl.CkptError, match="1 of 3 files are missing"):
        ckptctl.inspect(target)
    assert (
        load_file(tmp_path / "out" / "model.safetensors").keys() == gguf_files.saved(folder).keys()
    )
