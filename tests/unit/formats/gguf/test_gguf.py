"""GGUF by its definition; tests/oracle/test_gguf.py has the package gguf and transformers."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError, DamagedError, FormatError, MappingError, UnsupportedError
from ckptctl.formats.gguf.gguf_reader import read_header
from ckptctl.numerics.kinds.gguf import LAYOUTS
from ckptctl.numerics.quantization.ggml import BLOCK_TYPES, INTEGER_TYPES
from ckptctl.storage.files import source_files
from tests import effort
from tests.checkpoints.gguf import Raw, gguf_bytes, value, write_gguf
from tests.checkpoints.readers import raw_bytes

TENSORS = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "b.weight": torch.randn(2, 3, 5).to(torch.bfloat16),
}
Q8_0 = Raw(8, (64, 3), bytes(range(204)))
NAMED: dict[str, Any] = {"general.architecture": "strange"}


def test_unquantized_gguf_tensors_convert_exactly(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", NAMED, TENSORS)
    assert list(formats.sniff_formats(file)) == list(formats.sniff_formats(tmp_path)) == ["gguf"]
    ckptctl.convert(file, tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    told = ckptctl.inspect(tmp_path)
    assert "GGUF architecture `strange` is not supported" in told.notes[0]
    assert ckptctl.verify(file).verdict == "complete"


def test_quantized_gguf_tensor_name_includes_type(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", NAMED, {"a.weight": Q8_0})
    told = ckptctl.inspect(file)
    assert [(one.name, one.shape) for one in told.tensors] == [("a.weight.Q8_0", (3, 68))]
    assert (told.quantized, told.dequantizable) == ({"a.weight": "GGUF Q8_0"}, True)


def test_dequantizing_rare_gguf_type_is_an_error(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", NAMED, {"a.weight": Raw(15, (256, 1), bytes(292))})
    with pytest.raises(CkptError, match="cannot dequantize rare GGUF types"):
        ckptctl.convert(file, tmp_path / "out", to="hf", dequantize="bf16")


DIGESTS = {
    "Q4_0": ((0,), "6c9ac7b51895c6a7"),
    "Q4_1": ((0, 2), "7a28a30a794d4b7e"),
    "Q5_0": ((0,), "ef8b268cc5a82a3e"),
    "Q5_1": ((0, 2), "65d590f384f6a22e"),
    "Q8_0": ((0,), "fa085e24ec1aed2b"),
    "Q2_K": ((80, 82), "737ec215c65fb256"),
    "Q3_K": ((108,), "0ffb2b560325b53f"),
    "Q4_K": ((0, 2), "7385b72be9b43a8a"),
    "Q5_K": ((0, 2), "914d1df2f329139d"),
    "Q6_K": ((208,), "340be2894a64666a"),
}
"""Offsets of the float16 factors of a block, and SHA-256 of what ``gguf.dequantize`` computes.

Its input is 6 blocks of ``random.Random(name).randbytes``, with the highest exponent bit of each
factor cleared.
"""


@pytest.mark.parametrize("name", DIGESTS)
def test_gguf_integers_dequantize_as_in_the_reference(tmp_path: Path, name: str) -> None:
    number, block = next((n, block) for n, block in BLOCK_TYPES.items() if block.name == name)
    offsets, digest = DIGESTS[name]
    raw = bytearray(random.Random(name).randbytes(6 * block.nbytes))
    for start in range(0, len(raw), block.nbytes):
        for offset in offsets:
            raw[start + offset + 1] &= 0xBF
    tensor = Raw(number, (2 * block.elements, 3), bytes(raw))
    file = write_gguf(tmp_path / "m.gguf", NAMED, {"a.weight": tensor})
    ckptctl.convert(file, tmp_path / "out.pt", to="torch", dequantize="float32")
    values = torch.load(tmp_path / "out.pt", weights_only=True)["a.weight"]
    assert hashlib.sha256(raw_bytes(values)).hexdigest().startswith(digest)


def test_gguf_integer_types_all_have_a_layout() -> None:
    assert LAYOUTS.keys() == DIGESTS.keys() == INTEGER_TYPES


LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 12,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.context_length": 64,
    "tokenizer.ggml.tokens": [f"t{n}" for n in range(10)],
    "tokenizer.ggml.eos_token_id": 2,
}


def llama() -> dict[str, torch.Tensor]:
    shapes = {"token_embd": (10, 8), "output_norm": (8,), "blk.0.attn_norm": (8,)}
    shapes |= {"blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8)}
    shapes |= {"blk.0.attn_output": (8, 8), "blk.0.ffn_norm": (8,), "blk.0.ffn_gate": (12, 8)}
    shapes |= {"blk.0.ffn_up": (12, 8), "blk.0.ffn_down": (8, 12)}
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def test_llama_gguf_converts_with_generated_config(tmp_path: Path) -> None:
    state = llama()
    file = write_gguf(tmp_path / "m.gguf", LLAMA, state)
    ckptctl.convert(file, tmp_path / "out", to="hf")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"], config["eos_token_id"]) == ("llama", 10, 2)
    assert (config["tie_word_embeddings"], config["torch_dtype"]) == (True, "float32")
    assert config["rms_norm_eps"] == 1e-5
    found = load_file(tmp_path / "out" / "model.safetensors")
    rows = state["blk.0.attn_q.weight"].view(2, 2, 2, 8).transpose(1, 2).reshape(8, 8)
    assert torch.equal(found["model.layers.0.self_attn.q_proj.weight"], rows)
    assert "lm_head.weight" not in found


@pytest.mark.parametrize(
    ("more", "factors", "said"),
    [
        ({"llama.attention.head_count": [2, 2]}, None, "differs from layer to layer"),
        ({"llama.rope.scaling.type": "longrope"}, None, "scaling of rotary frequencies"),
        ({}, [1.0, 7.0], "scaling of rotary frequencies"),
        ({"llama.rope.scale_linear": 4.0}, None, "scaling of rotary frequencies"),
        ({"llama.rope.dimension_count": 2}, None, "scaling of rotary frequencies"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, None, "`rms_norm_eps` is 'x'"),
        ({"llama.rope.freq_base": float("nan")}, None, "`rope_theta` is nan"),
    ],
)
def test_unsupported_llama_metadata_generates_no_config(
    tmp_path: Path, more: dict[str, Any], factors: list[float] | None, said: str
) -> None:
    state = llama() | ({"rope_freqs.weight": torch.tensor(factors)} if factors else {})
    file = write_gguf(tmp_path / "m.gguf", LLAMA | more, state)
    assert any(said in note for note in ckptctl.inspect(file).notes)


def test_mapping_quantized_gguf_hints_at_dequantize(tmp_path: Path) -> None:
    told = LLAMA | {"llama.embedding_length": 32, "llama.feed_forward_length": 64}
    state: dict[str, Any] = {"token_embd.weight": torch.randn(10, 32)}
    state |= {name: torch.ones(32) for name in llama() if "norm" in name}
    rows = {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": 32, "ffn_gate": 64}
    for name, count in (rows | {"ffn_up": 64}).items():
        state[f"blk.0.{name}.weight"] = Raw(8, (32, count), bytes(34 * count))
    state["blk.0.ffn_down.weight"] = Raw(8, (64, 32), bytes(68 * 32))
    file = write_gguf(tmp_path / "m.gguf", told, state)
    assert "llama2" in ckptctl.inspect(file).candidates
    with pytest.raises(MappingError) as raised:
        ckptctl.convert(file, tmp_path / "out", to="hf")
    assert raised.value.what == "the checkpoint is quantized: GGUF Q8_0"
    assert "dequantize" in str(raised.value.hint)


def test_quantized_gguf_of_unknown_type_is_a_mapping_error(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", NAMED, {"a.weight": Q8_0})
    with pytest.raises(MappingError, match="unknown model type") as raised:
        ckptctl.convert(file, tmp_path / "out", to="meta")
    assert "the checkpoint is quantized (GGUF Q8_0)" in str(raised.value.hint)


@pytest.mark.parametrize("key", [key for key in LLAMA if key.startswith("llama.")])
def test_missing_llama_metadata_uses_default_or_generates_no_config(
    tmp_path: Path, key: str
) -> None:
    """What llama.cpp assumes is stated; what it requires and is not there makes none."""
    state = llama() | {
        "blk.0.attn_k.weight": torch.ones(8, 8),
        "blk.0.attn_v.weight": torch.ones(8, 8),
    }
    told = {**LLAMA, "llama.attention.head_count_kv": 2}
    file = write_gguf(tmp_path / "m.gguf", {k: v for k, v in told.items() if k != key}, state)
    if key in ("llama.rope.freq_base", "llama.attention.head_count_kv"):
        ckptctl.convert(file, tmp_path / "out", to="hf")
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert (config["rope_theta"], config["num_key_value_heads"]) == (10000.0, 2)
    else:
        assert any("GGUF file does not state" in note for note in ckptctl.inspect(file).notes)


def test_vocab_size_falls_back_to_embedding_rows(tmp_path: Path) -> None:
    told = {key: value for key, value in LLAMA.items() if key != "tokenizer.ggml.tokens"}
    ckptctl.convert(write_gguf(tmp_path / "m.gguf", told, llama()), tmp_path / "out", to="hf")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 10


def test_split_gguf_files_are_read_as_one_model(tmp_path: Path) -> None:
    for number, (name, tensor) in enumerate(TENSORS.items()):
        parts = {"split.no": number, "split.count": 2, "split.tensors.count": 2}
        write_gguf(tmp_path / f"m-{number + 1:05d}-of-00002.gguf", NAMED | parts, {name: tensor})
    assert [one.name for one in ckptctl.inspect(tmp_path).tensors] == list(TENSORS)
    second = tmp_path / "m-00002-of-00002.gguf"
    assert len(ckptctl.inspect(second).tensors) == 2
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(second.read_bytes())
    with pytest.raises(DamagedError, match="do not belong to one model"):
        ckptctl.inspect(tmp_path)
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(DamagedError, match="1 of 2 files are missing"):
        ckptctl.inspect(second)


def test_folder_of_several_gguf_models_is_ambiguous(tmp_path: Path) -> None:
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf", "mmproj-m.gguf"):
        write_gguf(tmp_path / name, NAMED, TENSORS)
    with pytest.raises(FormatError, match="2 GGUF files"):
        ckptctl.inspect(tmp_path)
    assert ckptctl.inspect(tmp_path / "m-Q4_0.gguf").verdict == "complete"


NESTED = struct.pack("<IIQ", 9, 9, 1) + value([1])[4:]
DAMAGED = {
    "cut": (gguf_bytes(NAMED, TENSORS)[:-40], "truncated"),
    "cut in the header": (gguf_bytes(NAMED, TENSORS)[:60], "truncated"),
    "cut after the magic": (b"GGUF", "truncated"),
    "more tensors": (gguf_bytes(NAMED, {}, counts=(9999, 1)), "truncated"),
    "a long text": (gguf_bytes({"a": struct.pack("<IQ", 8, 1 << 40)}, {}), "truncated"),
    "a long array": (gguf_bytes({"a": struct.pack("<IIQ", 9, 12, 1 << 60)}, {}), "truncated"),
    "many texts": (gguf_bytes({"a": struct.pack("<IIQ", 9, 8, 1 << 60)}, {}), "truncated"),
    "outside": (gguf_bytes(NAMED, TENSORS, offsets={"b.weight": 1 << 40}), "truncated"),
    "overlap": (gguf_bytes(NAMED, TENSORS, offsets={"b.weight": 32}), "overlap at byte"),
    "unaligned": (gguf_bytes(NAMED, TENSORS, offsets={"b.weight": 33}), "not a multiple of 32"),
    "twice": (gguf_bytes(NAMED, TENSORS).replace(b"b.weight", b"a.weight"), "duplicate"),
    "half a block": (gguf_bytes(NAMED, {"a": Raw(8, (40, 1), bytes(43))}), "not a multiple of 32"),
}
STRANGE = {
    "version": (gguf_bytes(NAMED, TENSORS, version=1), "version 1"),
    "big endian": (gguf_bytes(NAMED, TENSORS, version=3 << 24), "byte order is reversed"),
    "a million keys": (gguf_bytes({}, {}, counts=(0, 1 << 40)), "entries"),
    "nested arrays": (gguf_bytes({"a": NESTED}, {}), "array of unknown type 9"),
    "a strange value": (gguf_bytes({"a": struct.pack("<I", 77)}, {}), "value of unknown type 77"),
    "a strange tensor": (gguf_bytes(NAMED, {"a": Raw(999, (4,), b"abcd")}), "type 999"),
    "dimensions": (gguf_bytes(NAMED, {"a": Raw(0, (1,) * 5, b"abcd")}), "5 dimensions"),
    "alignment": (gguf_bytes({"general.alignment": 24}, TENSORS), "not a power of two"),
    "no text": (gguf_bytes({}, {"ab": TENSORS["a.weight"]}).replace(b"ab", b"\xff\xfe"), "UTF-8"),
    "a key twice": (gguf_bytes({"ab": 1, "cd": 1}, {}).replace(b"cd", b"ab"), "duplicate"),
}


@pytest.mark.parametrize("case", [*DAMAGED, *STRANGE])
def test_malformed_gguf_is_damaged_or_unsupported(tmp_path: Path, case: str) -> None:
    content, said = (DAMAGED | STRANGE)[case]
    (tmp_path / "m.gguf").write_bytes(content)
    kind = DamagedError if case in DAMAGED else UnsupportedError
    with pytest.raises(kind) as caught:
        ckptctl.inspect(tmp_path / "m.gguf")
    assert said in f"{caught.value}: {caught.value.why}"
    assert ckptctl.verify(tmp_path / "m.gguf").verdict == (
        "damaged" if case in DAMAGED else "unknown"
    )


def test_config_json_that_contradicts_gguf_is_a_mapping_error(tmp_path: Path) -> None:
    """The number of heads decides in which order rows are written."""
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 8, "vocab_size": 10}
    config |= {"num_hidden_layers": 1, "intermediate_size": 12, "rms_norm_eps": 1e-5}
    config["tie_word_embeddings"] = True
    file = write_gguf(tmp_path / "m.gguf", LLAMA, llama())
    for heads, theta in ((4, 10000.0), (2, 500000.0), (2, 10000.0)):
        config |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
        config["rope_theta"] = theta
        (tmp_path / "config.json").write_text(json.dumps(config))
        if (heads, theta) == (2, 10000.0):
            break
        with pytest.raises(MappingError, match="contradict each other") as caught:
            ckptctl.convert(file, tmp_path.with_name("refused"), to="hf")
        assert "the metadata of" in str(caught.value.where)
    ckptctl.convert(file, tmp_path.with_name("out"), to="hf")
    assert not any("is generated from" in note for note in ckptctl.inspect(file).notes)


@pytest.mark.parametrize("other", [torch.ones(3, 64), Raw(2, (64, 3), bytes(108))])
def test_duplicate_tensor_in_split_gguf_is_damaged(tmp_path: Path, other: Any) -> None:
    for number, one in enumerate((Q8_0, other)):
        parts = {"split.no": number, "split.count": 2, "split.tensors.count": 2}
        file = write_gguf(tmp_path / f"m-{number + 1:05d}-of-00002.gguf", parts, {"a": one})
    with pytest.raises(DamagedError, match="duplicate tensor `a`"):
        ckptctl.inspect(file)


def test_tensor_name_that_collides_with_typed_name_is_unsupported(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", {}, {"a.Q8_0": torch.ones(2), "a": Q8_0})
    with pytest.raises(UnsupportedError, match=r"duplicate tensor `a\.Q8_0`"):
        ckptctl.inspect(file)


def test_read_header_work_per_tensor_is_bounded(tmp_path: Path) -> None:
    def work(count: int) -> int:
        tensors = {f"t{number}": torch.ones(1) for number in range(count)}
        write_gguf(tmp_path / "a.gguf", {"general.architecture": "llama"}, tensors)
        with source_files(tmp_path) as files:
            return effort.lines(lambda: read_header(files, "a.gguf"))

    assert work(2_000) - work(1_000) < 1_000 * 70
