"""What ``--quantize`` writes beside llm-compressor, compressed-tensors and transformers.

llm-compressor's ``model_free_ptq`` quantizes without data, and without the model; transformers'
``Fp8Quantize`` is what it saves float8 with block scales by. Blocks that end inside of a block
are filled up with zeros, as DeepSeek's own kernel sees them.

``CKPTCTL_UPDATE_DIGESTS=1`` writes ``tests/data/quantized.json`` anew.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from tests.checkpoints import save_hf
from tests.checkpoints.golden import Golden, State, digest
from tests.checkpoints.quantized import DIGESTS, PLAIN, SCHEMES, WIDE, hard, llama
from tests.oracle.quantizers import FOLDER, load

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.utils import import_utils
from transformers.utils.quantization_config import CompressedTensorsConfig, FineGrainedFP8Config

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
PRESETS = {
    "fp8-channel": "FP8_DYNAMIC",
    "int4": "W4A16",
    "int8": "W8A16",
    "int8-channel": "W8A8",
    "mxfp4": "MXFP4A16",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4A16",
}
KINDS = (torch.bfloat16, torch.float16, torch.float32)
WRITTEN = Path(__file__).parents[1] / "data" / "quantized.json"


def blocks(state: State) -> State:
    """Return what transformers makes of a model."""
    how = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=how))
    found = {key: one for key, one in state.items() if key in PLAIN or one.dim() < 2}
    for key in state.keys() - found.keys():
        rows, columns = state[key].shape
        whole = torch.nn.functional.pad(state[key], (0, -columns % 128, 0, -rows % 128))
        made = quantizer._quantize_one(key, whole)
        found |= {**made, key: made[key][:rows, :columns].contiguous()}
    return found


def reference(scheme: str, folder: Path, out: Path) -> State:
    if scheme == "fp8-block":
        return blocks(load_file(folder / "model.safetensors"))
    ignore = [name.removesuffix(".weight") for name in PLAIN]
    load("llmcompressor").model_free_ptq(
        folder, out, scheme=PRESETS[scheme], ignore=ignore, device="cpu"
    )
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize(
    ("scheme", "ragged"),
    [(scheme, ragged) for scheme in SCHEMES for ragged in (False, True)[: 2 - (scheme in WIDE)]],
)
@pytest.mark.parametrize("dtype", KINDS)
def test_reference_quantizers_match_stored_digests(
    tmp_path: Path, scheme: str, dtype: torch.dtype, ragged: bool
) -> None:
    save_hf(tmp_path / "source", *llama(ragged, dtype))
    found = digest(reference(scheme, tmp_path / "source", tmp_path / "out"))
    name = str(dtype).removeprefix("torch.")
    key = f"{scheme} {name} {'ragged' if ragged else 'whole'}"
    if os.environ.get("CKPTCTL_UPDATE_DIGESTS"):
        known = {**json.loads(WRITTEN.read_text()), key: found}
        WRITTEN.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    else:
        assert found == DIGESTS[key]


@pytest.mark.parametrize("scheme", [scheme for scheme in PRESETS if scheme.startswith("mx")])
@pytest.mark.parametrize("dtype", KINDS)
def test_quotients_that_underflow_match_llm_compressor(
    tmp_path: Path, scheme: str, dtype: torch.dtype
) -> None:
    """E4M3 stores the sign of a quotient that becomes 0 in the dtype of the weight, E2M1 not."""
    state, config = llama(False, dtype)
    weight = state["model.layers.0.self_attn.q_proj.weight"]
    info = torch.finfo(dtype)
    for column, value in enumerate((info.smallest_normal * info.eps, info.smallest_normal)):
        weight[:, column::8], weight[:, column + 2 :: 8] = value, -value
    save_hf(tmp_path / "source", state, config)
    wanted = reference(scheme, tmp_path / "source", tmp_path / "wanted")
    ckptctl.convert(tmp_path / "source", tmp_path / "found", to="hf", quantize=scheme)
    assert digest(load_file(tmp_path / "found" / "model.safetensors")) == digest(wanted)


@pytest.mark.parametrize("scheme", WIDE)
def test_reference_refuses_groups_that_do_not_divide_a_row(tmp_path: Path, scheme: str) -> None:
    save_hf(tmp_path / "source", *llama(True, torch.bfloat16))
    with pytest.raises(ValueError, match="Unable to quantize tensor"):
        reference(scheme, tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize("scheme", PRESETS)
def test_quantization_config_matches_llm_compressor(tmp_path: Path, scheme: str) -> None:
    save_hf(tmp_path / "source", *llama(scheme not in WIDE, torch.bfloat16))
    reference(scheme, tmp_path / "source", tmp_path / "wanted")
    ckptctl.convert(tmp_path / "source", tmp_path / "found", to="hf", quantize=scheme)
    wanted, found = (_config(tmp_path / name) for name in ("wanted", "found"))
    assert {**found, "ignore": set(found["ignore"])} == {**wanted, "ignore": set(wanted["ignore"])}


def _config(folder: Path) -> dict[str, Any]:
    """Return what compressed-tensors understands of a configuration."""
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert said["version"] == "0.20.1" and said["transform_config"] == {}
    known = load("compressed_tensors.quantization").QuantizationConfig
    read = known.model_validate(said).model_dump()
    (group,) = read.pop("config_groups").values()
    return {**read, "group": group}


def logits(folder: Path, **options: Any) -> torch.Tensor:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.bfloat16, **options
    )
    model, info = loaded
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        found: torch.Tensor = model.float().eval()(torch.arange(24).view(2, 12)).logits
    return found


SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 97,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
CONFIGS = {"llama": LlamaConfig(**SIZES), "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS)}
LOADED = [
    *((scheme, "llama") for scheme in SCHEMES),
    # Of experts it stacks the scales of groups as if they were of rows (MXFP8), leaves out the
    # global one (NVFP4), and reads integers only if they are packed.
    *(
        (scheme, "qwen3_moe")
        for scheme in SCHEMES
        if scheme not in ("int8-channel", "mxfp8", "nvfp4")
    ),
]


@pytest.fixture
def found_by_transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let transformers see what lies in a folder of its own."""
    load("compressed_tensors")
    monkeypatch.syspath_prepend(str(FOLDER))
    import_utils.is_compressed_tensors_available.cache_clear()
    yield
    import_utils.is_compressed_tensors_available.cache_clear()


@pytest.mark.usefixtures("found_by_transformers")
@pytest.mark.parametrize(("scheme", "family"), LOADED)
def test_quantized_output_keeps_near_logits_in_transformers(
    tmp_path: Path, scheme: str, family: str
) -> None:
    """Its logits are near those of the plain model, and further off the fewer bits there are."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]).bfloat16()
    model.save_pretrained(tmp_path / "plain")
    ckptctl.convert(tmp_path / "plain", tmp_path / "out", to="hf", quantize=scheme)
    blocks = FineGrainedFP8Config if scheme == "fp8-block" else CompressedTensorsConfig
    found = logits(tmp_path / "out", quantization_config=blocks(dequantize=True))
    wanted = logits(tmp_path / "plain")
    off = float((found - wanted).norm() / wanted.norm())
    assert 0.002 < off < (0.35 if "4" in scheme else 0.08)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("gemma4_text.moe", "fp8-channel"),
        ("gemma4_text.moe", "int8-channel"),
        ("mistral4", "fp8-channel"),
        ("mistral4", "nvfp4"),
    ],
)
def test_split_stacks_of_experts_match_llm_compressor(
    tmp_path: Path, name: str, scheme: str
) -> None:
    """Their only names for experts are those of the stacks, which both split."""
    golden, source = Golden.read(name), tmp_path / "source"
    dense = ["*.self_attn.*", "*.mlp.*_proj.weight"]
    state: State = {}
    for seed, (key, (_, shape)) in enumerate(golden.tensors.items()):
        state[key] = torch.ones(shape, dtype=torch.bfloat16)
        if ".experts." in key:
            matrix = hard(math.prod(shape[:-1]), shape[-1], torch.bfloat16, seed)
            state[key] = matrix.view(*shape)
    save_hf(source, state, {**golden.config, "torch_dtype": "bfloat16"})
    ckptctl.convert(source, tmp_path / "out", to="hf", quantize=scheme, quantize_not=dense)
    ignore = [key.removesuffix(".weight") for key in state if ".experts." not in key]
    load("llmcompressor").model_free_ptq(
        source, tmp_path / "wanted", scheme=PRESETS[scheme], ignore=ignore, device="cpu"
    )
    found, wanted = (load_file(tmp_path / one / "model.safetensors") for one in ("out", "wanted"))
    differing = {
        key for key, one in wanted.items() if digest({key: one}) != digest({key: found[key]})
    }
    if scheme == "nvfp4":
        # Gate and up share a global scale, as in oneshot (``FUSED_LAYER_NAMES``) and vLLM, but
        # model_free_ptq knows only those of dense layers.
        differing = {key for key in differing if "gate_proj" not in key and "up_proj" not in key}
    assert found.keys() == wanted.keys() and not differing


@pytest.mark.parametrize("scheme", ["fp8-channel", "mxfp4", "int8-channel"])
def test_quantized_experts_of_gpt_oss_match_llm_compressor(tmp_path: Path, scheme: str) -> None:
    """Layout ``llm-compressor`` is what its separated experts have before they are quantized."""
    golden, source = Golden.read("gpt_oss"), tmp_path / "source"
    state: State = {
        key: hard(math.prod(shape[:-1]), shape[-1], torch.bfloat16, seed).view(*shape)
        if math.prod(shape[:-1]) > 8
        else torch.ones(shape, dtype=torch.bfloat16)
        for seed, (key, (_, shape)) in enumerate(golden.tensors.items())
    }
    save_hf(source, state, {**golden.config, "torch_dtype": "bfloat16"})
    layout: Any = {"to": "hf", "to_layout": "llm-compressor"}
    ckptctl.convert(source, tmp_path / "separate", **layout)
    ckptctl.convert(source, tmp_path / "out", quantize=scheme, **layout)
    ignore = ["lm_head", "re:.*embed_tokens", "re:.*router"]
    load("llmcompressor").model_free_ptq(
        tmp_path / "separate", tmp_path / "wanted", scheme=PRESETS[scheme], ignore=ignore,
        device="cpu",
    )  # fmt: skip
    found, wanted = (load_file(tmp_path / one / "model.safetensors") for one in ("out", "wanted"))
    assert any("experts.0.up_proj.weight_scale" in key for key in found)
    assert found.keys() == wanted.keys()
    assert not [
        key for key, one in wanted.items() if digest({key: one}) != digest({key: found[key]})
    ]


def separate_experts(tmp_path: Path, name: str) -> tuple[Path, State, list[str]]:
    """Return a model with stacks ``[experts, in, out]``, its tensors by expert, and dense weights.

    The names by expert are those of llm-compressor's model.
    """
    golden, source = Golden.read(name), tmp_path / "source"
    shapes = {key: shape for key, (_, shape) in golden.tensors.items()}
    save_hf(
        source, {k: torch.zeros(s, dtype=torch.bfloat16) for k, s in shapes.items()}, golden.config
    )
    published: Any = {"to": "torch", "to_layout": "hf"}
    ckptctl.convert(source, tmp_path / "published.pt", **published)
    state: State = torch.load(tmp_path / "published.pt", weights_only=True)
    for seed, (key, value) in enumerate(state.items()):
        state[key] = torch.ones_like(value)
        if ".experts." in key:
            matrix = hard(math.prod(value.shape[:-1]), value.shape[-1], value.dtype, seed)
            state[key] = matrix.view_as(value)
    shutil.rmtree(source)
    save_hf(source, state, {**golden.config, "torch_dtype": "bfloat16"})
    dense = ["*.self_attn.*", "*.mlp.*_proj.weight", "*feed_forward.*_proj.weight"]
    separate: State = {}
    for key, value in state.items():
        module, _, last = key.rpartition(".")
        if not module.endswith(".experts"):
            separate[key] = value
            continue
        layers = ["gate_proj", "up_proj"] if last == "gate_up_proj" else ["down_proj"]
        for number, expert in enumerate(value):
            for layer, columns in zip(layers, expert.chunk(len(layers), 1), strict=True):
                separate[f"{module}.{number}.{layer}.weight"] = columns.t().contiguous()
    return source, separate, [one for one in dense if any(fnmatchcase(k, one) for k in state)]


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "llama4_text"])
@pytest.mark.parametrize("scheme", ["fp8-channel", "int8-channel"])
def test_split_transposed_stacks_match_llm_compressor(
    tmp_path: Path, name: str, scheme: str
) -> None:
    """llm-compressor's model has linear layers with the names that are written."""
    source, separate, dense = separate_experts(tmp_path, name)
    ckptctl.convert(source, tmp_path / "out", to="hf", quantize=scheme, quantize_not=dense)
    config = {**Golden.read(name).config, "torch_dtype": "bfloat16"}
    save_hf(tmp_path / "separate", separate, config)
    ignore = [key.removesuffix(".weight") for key in separate if ".experts." not in key]
    load("llmcompressor").model_free_ptq(
        tmp_path / "separate", tmp_path / "wanted", scheme=PRESETS[scheme], ignore=ignore,
        device="cpu",
    )  # fmt: skip
    found, wanted = (load_file(tmp_path / one / "model.safetensors") for one in ("out", "wanted"))
    assert found.keys() == wanted.keys()
    assert not [
        key for key, one in wanted.items() if digest({key: one}) != digest({key: found[key]})
    ]


@pytest.mark.parametrize("name", ["granitemoe", "granitemoehybrid"])
def test_stacks_of_granite_match_llm_compressor_by_expert(tmp_path: Path, name: str) -> None:
    """The rows of a stack are quantized as those of a matrix; compressed-tensors reads the stack.

    vLLM divides both the stack and its scales ``[experts, out, 1]`` among the experts.
    """
    golden = Golden.read(name)
    config = {**golden.config, "torch_dtype": "bfloat16"}
    state: State = {
        key: hard(math.prod(shape[:-1]), shape[-1], torch.bfloat16, seed).view(*shape)
        if len(shape) == 3 and "_linear." in key
        else torch.ones(shape, dtype=torch.bfloat16)
        for seed, (key, (_, shape)) in enumerate(golden.tensors.items())
    }
    save_hf(tmp_path / "source", state, config)
    done = ckptctl.convert(tmp_path / "source", tmp_path / "out", to="hf", quantize="fp8-channel")
    assert any("vLLM reads these stacks" in note for note in done.all_notes)
    found = load_file(tmp_path / "out" / "model.safetensors")
    stacks = {key: one for key, one in state.items() if one.dim() == 3 and "_linear." in key}
    matrices = {
        f"{key.removesuffix('.weight')}.{number}.weight": expert.contiguous()
        for key, stack in stacks.items()
        for number, expert in enumerate(stack)
    }
    save_hf(tmp_path / "matrices", matrices, config)
    load("llmcompressor").model_free_ptq(
        tmp_path / "matrices", tmp_path / "wanted", scheme=PRESETS["fp8-channel"], ignore=[],
        device="cpu",
    )  # fmt: skip
    wanted = load_file(tmp_path / "wanted" / "model.safetensors")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    said = load("compressed_tensors.quantization").QuantizationConfig.model_validate(written)
    (group,) = said.config_groups.values()
    base = load("compressed_tensors.compressors").BaseCompressor
    reader = base.get_value_from_registry(written["format"])
    ckptctl.convert(tmp_path / "out", tmp_path / "plain", to="hf", dequantize="bf16")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for key, stack in stacks.items():
        module = key.removesuffix(".weight")
        parts = {part: found[f"{module}.{part}"] for part in ("weight", "weight_scale")}
        assert parts["weight_scale"].shape == (*stack.shape[:2], 1)
        for number in range(len(stack)):
            for part, value in parts.items():
                expected = wanted[f"{module}.{number}.{part}"]
                assert digest({"": value[number].contiguous()}) == digest({"": expected}), key
        assert torch.equal(reader.decompress(parts, group)["weight"], plain[key])


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "llama4_text"])
def test_split_transposed_stacks_in_blocks_match_transformers(tmp_path: Path, name: str) -> None:
    """Each expert is a linear layer to ``Fp8Quantize``, and compressed-tensors reads it."""
    source, separate, dense = separate_experts(tmp_path, name)
    options: Any = {"to": "hf", "quantize": "fp8-block", "quantize_not": dense}
    done = ckptctl.convert(source, tmp_path / "out", **options)
    assert any("transformers does not read stacks" in note for note in done.all_notes)
    found = load_file(tmp_path / "out" / "model.safetensors")
    experts = {key: one for key, one in separate.items() if ".experts." in key}
    others = {key: one for key, one in separate.items() if key not in experts}
    wanted = others | blocks(experts)
    assert found.keys() == wanted.keys()
    assert not [
        key for key, one in wanted.items() if digest({key: one}) != digest({key: found[key]})
    ]
    converters = load("compressed_tensors.entrypoints.convert.converters")
    reader = converters.FP8BlockDequantizer.from_pretrained(tmp_path / "out")
    read = reader.validate(dict(found))
    assert read.keys() == separate.keys()
    for key, value in experts.items():
        block = found[key.replace(".weight", ".weight_scale_inv")].max()
        assert torch.allclose(read[key], value, rtol=2**-4 + 2**-8, atol=float(block) * 2**-9), key
