"""``--quantize fp8-block`` of experts that are stacked in one tensor, and its way back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.errors import CkptError, MappingError, UsageError
from ckptctl.planner.layouts import LLM_COMPRESSOR
from tests.checkpoints import save_hf
from tests.checkpoints.golden import Golden, State, family_of
from tests.checkpoints.quantized import hard, numbers
from tests.integration.test_quantize import quantized, read, stated
from tests.sweeps import one_in

BLOCKS = "fp8-block"
E, D = 3, 256
MLP = "model.layers.0.mlp"
STACKS = (f"{MLP}.experts.gate_up_proj", f"{MLP}.experts.down_proj")


def sparse(folder: Path, width: int = 128) -> Path:
    """Write a Qwen3-MoE of one layer whose experts are *width* wide, each of them by itself."""
    shapes = {f"self_attn.{name}_proj": (D, D) for name in "qkvo"} | {"mlp.gate": (E, D)}
    for number in range(E):
        for name, shape in {"gate": (width, D), "up": (width, D), "down": (D, width)}.items():
            shapes[f"mlp.experts.{number}.{name}_proj"] = shape
    state: State = {
        f"model.layers.0.{name}.weight": hard(max(rows, 8), columns, torch.bfloat16, seed)[:rows]
        for seed, (name, (rows, columns)) in enumerate(shapes.items())
    }
    ones = {"self_attn.q_norm": 64, "self_attn.k_norm": 64}
    ones |= {"input_layernorm": D, "post_attention_layernorm": D}
    state |= {f"model.layers.0.{name}.weight": torch.ones(n) for name, n in ones.items()}
    state |= {"model.norm.weight": torch.ones(D), "lm_head.weight": torch.ones(97, D)}
    state["model.embed_tokens.weight"] = torch.ones(97, D)
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": D,
        "intermediate_size": 384,
        "moe_intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 97,
        "num_experts": E,
        "num_experts_per_tok": 2,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    state = {name: one.to(torch.bfloat16).contiguous() for name, one in state.items()}
    save_hf(folder, state, config)
    return folder


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    bits = found.dtype == wanted.dtype and found.shape == wanted.shape
    return bits and torch.equal(found.contiguous().view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("width", [128, 384])
def test_quantized_stacks_match_per_expert_quantization(tmp_path: Path, width: int) -> None:
    source = sparse(tmp_path / "source", width)
    apart = quantized(source, tmp_path / "apart", BLOCKS)
    found = quantized(source, tmp_path / "stacks", BLOCKS, to_layout="hf-v5")
    for suffix, dtype in (("", torch.float8_e4m3fn), ("_scale_inv", torch.float32)):
        for stack, names in zip(STACKS, (("gate", "up"), ("down",)), strict=True):
            each = [
                torch.cat(
                    [apart[f"{MLP}.experts.{x}.{name}_proj.weight{suffix}"] for name in names]
                )
                for x in range(E)
            ]
            assert found[stack + suffix].dtype == dtype
            assert same(found[stack + suffix], torch.stack(each))
    assert found.keys() >= {name + suffix for name in STACKS for suffix in ("", "_scale_inv")}
    ignored = stated(tmp_path / "stacks")["modules_to_not_convert"]
    assert set(ignored) == {"model.embed_tokens", "lm_head", f"{MLP}.gate"}


def test_quantizing_stacked_source_matches_per_expert_source(tmp_path: Path) -> None:
    source = sparse(tmp_path / "source")
    ckptctl.convert(source, tmp_path / "v5", to="hf", to_layout="hf-v5")
    found = quantized(tmp_path / "v5", tmp_path / "found", BLOCKS, to_layout="hf-v5")
    wanted = quantized(source, tmp_path / "wanted", BLOCKS, to_layout="hf-v5")
    assert found.keys() == wanted.keys()
    assert all(same(one, wanted[name]) for name, one in found.items())


@pytest.mark.parametrize("layout", ["hf", "hf-v5"])
def test_dequantized_stacks_match_dequantized_experts(tmp_path: Path, layout: str) -> None:
    source = sparse(tmp_path / "source")
    options: dict[str, Any] = {"to": "hf", "to_layout": layout, "dequantize": "bf16"}
    quantized(source, tmp_path / "apart", BLOCKS)
    quantized(source, tmp_path / "stacks", BLOCKS, to_layout="hf-v5")
    assert ckptctl.inspect(tmp_path / "stacks").dequantizable
    for name in ("apart", "stacks"):
        ckptctl.convert(tmp_path / name, tmp_path / f"{name}-plain", **options)
    found, wanted = read(tmp_path / "stacks-plain"), read(tmp_path / "apart-plain")
    assert found.keys() == wanted.keys()
    assert all(same(one, wanted[name]) for name, one in found.items())
    config = json.loads((tmp_path / "stacks-plain" / "config.json").read_text())
    assert "quantization_config" not in config


def test_quantizing_stacks_notes_reader_limitation(tmp_path: Path) -> None:
    source = sparse(tmp_path / "source")
    result = ckptctl.convert(source, tmp_path / "out", to="hf", to_layout="hf-v5", quantize=BLOCKS)
    (note,) = (one for one in result.all_notes if "ignores their scales" in one)
    assert STACKS[0] in note and "pass `to_layout='hf'` to write per-expert weights" in note
    assert {name for name in result.plan.quantized if "experts" in name} == set(STACKS)


@pytest.mark.parametrize("scheme", [BLOCKS, "fp8-channel"])
def test_stacks_without_defined_scheme_are_refused(tmp_path: Path, scheme: str) -> None:
    source = sparse(tmp_path / "source", width=64)
    with pytest.raises(MappingError, match="stacked experts") as caught:
        quantized(source, tmp_path / "out", scheme, to_layout="hf-v5")
    where = STACKS[1] if scheme == BLOCKS else STACKS[0]
    assert where in str(caught.value.where)
    assert ("128x128" if scheme == BLOCKS else "per-expert weights") in str(caught.value.why)
    assert not (tmp_path / "out").exists()
    found = quantized(
        source, tmp_path / "out", scheme, to_layout="hf-v5", quantize_not="*.experts.*"
    )
    assert found[STACKS[0]].dtype == torch.bfloat16


def test_quantizing_part_of_module_stacks_is_refused(tmp_path: Path) -> None:
    source = sparse(tmp_path / "source")
    with pytest.raises(UsageError, match="cannot quantize only") as caught:
        quantized(source, tmp_path / "out", BLOCKS, to_layout="hf-v5", quantize_not=STACKS[1])
    assert "belong to one module" in str(caught.value.why)


# ------------------------------------------------------------- families with stacks alone


def stacked_golden(folder: Path, name: str) -> Path:
    golden = Golden.read(name)
    save_hf(folder, numbers(golden), dict(golden.config))
    return folder


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("gemma4_text.moe", "fp8-channel"), ("mistral4", "fp8-channel"), ("mistral4", "nvfp4")],
)
def test_stacks_without_per_expert_layout_are_split(tmp_path: Path, name: str, scheme: str) -> None:
    source = stacked_golden(tmp_path / "source", name)
    plain = read(source)
    found = quantized(source, tmp_path / "out", scheme, quantize_not="*.self_attn.*")
    stacks = {key: one for key, one in plain.items() if ".experts." in key and one.dim() == 3}
    assert stacks and not stacks.keys() & found.keys()
    for key, stack in stacks.items():
        module, _, last = key.rpartition(".")
        layers = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for expert, matrix in enumerate(stack):
            rows = matrix.chunk(len(layers))
            for layer, weight in zip(layers, rows, strict=True):
                base = f"{module}.{expert}.{layer}.weight"
                if scheme == "nvfp4":
                    largest = matrix.abs().max()
                    shared = (448.0 * 6.0 / largest).float().view(1)
                    assert found[f"{base}_global_scale"].equal(shared)
                    assert found[f"{base}_packed"].shape == (len(weight), weight.shape[1] // 2)
                    continue
                scale = weight.abs().amax(1, keepdim=True) / 448
                codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                assert same(found[base], codes) and found[f"{base}_scale"].equal(scale)


def test_error_of_split_stack_covers_all_experts(tmp_path: Path) -> None:
    source = stacked_golden(tmp_path / "source", "gemma4_text.moe")
    result = ckptctl.convert(source, tmp_path / "out", to="hf", quantize="int8-channel")
    plain, found = read(source), read(tmp_path / "out")
    for key in (key for key, one in plain.items() if one.dim() == 3 and ".experts." in key):
        module, _, last = key.rpartition(".")
        layers = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        back = torch.stack(
            [
                torch.cat(
                    [
                        found[f"{module}.{expert}.{layer}.weight"].double()
                        * found[f"{module}.{expert}.{layer}.weight_scale"].double()
                        for layer in layers
                    ]
                )
                for expert in range(len(plain[key]))
            ]
        )
        off, said = back - plain[key].double(), result.rounding[key]
        assert said.max_abs == pytest.approx(float(off.abs().max()), rel=1e-4)
        rms = float(off.norm() / plain[key].double().norm())
        assert said.relative_rms == pytest.approx(rms, rel=1e-4)


SPLIT = (
    *("gemma4.text", "gemma4_text.moe", "hy_v4", "llama4", "llama4_text", "llama4_text.plain"),
    *("minimax_m3", "mistral4", "mistral4_vision", "qwen3_vl_moe"),
)
"""Golden models whose experts are stacked in every layout of transformers."""


@pytest.mark.parametrize("name", one_in(3, SPLIT))
def test_split_experts_have_layout_of_llm_compressor(tmp_path: Path, name: str) -> None:
    source = stacked_golden(tmp_path / "source", name)
    found = quantized(source, tmp_path / "out", "fp8-channel")
    summary = ckptctl.inspect(tmp_path / "out")
    assert (summary.model_type, summary.layout) == (family_of(name), LLM_COMPRESSOR)
    plan = ckptctl.plan_conversion(source, tmp_path / "planned", to="hf", quantize="fp8-channel")
    assert plan.to_layout == LLM_COMPRESSOR
    assert ckptctl.verify(tmp_path / "out").complete
    options: dict[str, Any] = {"to": "hf", "dequantize": "bf16", "verify": True}
    ckptctl.convert(tmp_path / "out", tmp_path / "back", **options)
    ckptctl.convert(source, tmp_path / "plain", to="hf", to_layout="hf")
    plain, back = read(tmp_path / "plain"), read(tmp_path / "back")
    assert back.keys() == plain.keys()
    stacks = [key for key, one in plain.items() if ".experts." in key and one.dim() == 3]
    assert stacks
    for key in stacks:
        module, _, last = key.rpartition(".")
        layers = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for expert, matrix in enumerate(back[key]):
            names = [f"{module}.{expert}.{layer}.weight" for layer in layers]
            each = [found[one].float() * found[f"{one}_scale"].float() for one in names]
            rows = torch.cat(each).to(torch.bfloat16)
            assert same(matrix, rows.t().contiguous() if is_transposed(name) else rows)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("hy_v4", "hf-fresh"), ("hy_v4", "hf-v5"), ("mistral4_vision", "hf-v5")],
)
def test_split_experts_without_known_names_are_refused(
    tmp_path: Path, name: str, layout: str
) -> None:
    source = stacked_golden(tmp_path / "source", name)
    with pytest.raises(MappingError, match="cannot quantize stacked experts") as refused:
        quantized(source, tmp_path / "out", "fp8-channel", to_layout=layout)
    assert "to_layout='llm-compressor'" in str(refused.value.hint)
    options: dict[str, Any] = {"to_layout": layout, "quantize_not": "*.experts.*"}
    quantized(source, tmp_path / "partly", "fp8-channel", **options)
    assert ckptctl.inspect(tmp_path / "partly").layout == layout


def is_transposed(name: str) -> bool:
    return family_of(name) in ("llama4", "llama4_text", "qwen3_vl_moe")


@pytest.mark.parametrize("name", one_in(3, SPLIT))
def test_missing_projection_of_split_expert_is_noticed(tmp_path: Path, name: str) -> None:
    found = quantized(stacked_golden(tmp_path / "source", name), tmp_path / "out", "fp8-channel")
    lost = next(key for key in found if key.endswith(".experts.1.up_proj.weight"))
    for key in (lost, f"{lost}_scale"):
        del found[key]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    damaged = save_hf(tmp_path / "damaged", found, config)
    assert not ckptctl.verify(damaged).complete
    with pytest.raises(CkptError, match=r"missing"):
        ckptctl.convert(damaged, tmp_path / "back", to="hf", dequantize="bf16")


@pytest.mark.parametrize("name", one_in(3, SPLIT))
def test_split_experts_match_layout_of_llm_compressor(tmp_path: Path, name: str) -> None:
    source = stacked_golden(tmp_path / "source", name)
    found = quantized(source, tmp_path / "out", "int8-channel")
    options: Any = {"to_layout": LLM_COMPRESSOR}
    wanted = quantized(source, tmp_path / "apart", "int8-channel", **options)
    assert found.keys() == wanted.keys()
    assert all(same(found[key], one) for key, one in wanted.items())
    settings = [stated(tmp_path / one) for one in ("out", "apart")]
    ignored = [sorted(one.pop("ignore")) for one in settings]
    assert ignored[0] == ignored[1] and settings[0] == settings[1]


@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text"])
def test_conversion_keeps_layout_of_quantized_experts(tmp_path: Path, name: str) -> None:
    source = stacked_golden(tmp_path / "source", name)
    layout: Any = {"to_layout": LLM_COMPRESSOR}
    found = quantized(source, tmp_path / "out", "fp8-channel", **layout)
    ckptctl.convert(tmp_path / "out", tmp_path / "copy", to="hf", verify=True)
    copied = read(tmp_path / "copy")
    assert copied.keys() == found.keys()
    assert all(same(one, found[key]) for key, one in copied.items())
    assert stated(tmp_path / "copy") == stated(tmp_path / "out")
    with pytest.raises(CkptError) as caught:
        ckptctl.convert(tmp_path / "out", tmp_path / "stacks", to="hf", to_layout="hf")
    assert "dequantize='bf16'" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["gpt_oss", "llama4"])
def test_conversion_stacks_unquantized_experts(tmp_path: Path, name: str) -> None:
    """Names such as those of sinks do not show that a model is quantized."""
    source = stacked_golden(tmp_path / "source", name)
    ckptctl.convert(source, tmp_path / "apart", to="hf", to_layout=LLM_COMPRESSOR)
    assert ckptctl.inspect(tmp_path / "apart").layout == LLM_COMPRESSOR
    ckptctl.convert(tmp_path / "apart", tmp_path / "back", to="hf", verify=True)
    plain, back = read(source), read(tmp_path / "back")
    assert back.keys() == plain.keys()
    assert all(same(one, plain[key]) for key, one in back.items())


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "int4"])
def test_copy_of_quantized_model_names_its_model_type(tmp_path: Path, scheme: str) -> None:
    """No layout has the names of its tensors; they are those of the weights that they store."""
    quantized(sparse(tmp_path / "source"), tmp_path / "packed", scheme)
    options: dict[str, Any] = {"to": "hf", "to_layout": "hf"}
    for model_type, origin in ((None, ""), ("qwen3_moe", " (from --model-type)")):
        options["model_type"] = model_type
        plan = ckptctl.plan_conversion(tmp_path / "packed", tmp_path / "out", **options)
        assert f" · qwen3_moe{origin} · keys unchanged · " in plan.statement
        assert plan.model_type == "qwen3_moe" and plan.notes == ()


def test_copy_of_quantized_model_keeps_layout_of_its_weights(tmp_path: Path) -> None:
    source = stacked_golden(tmp_path / "source", "mistral4")
    found = quantized(source, tmp_path / "packed", "nvfp4", quantize_not="*.self_attn.*")
    assert ckptctl.inspect(tmp_path / "packed").layout == LLM_COMPRESSOR
    for layout in (None, LLM_COMPRESSOR):
        target = tmp_path / f"copy-{layout}"
        ckptctl.convert(tmp_path / "packed", target, to="hf", to_layout=layout)
        assert read(target).keys() == found.keys()
    with pytest.raises(CkptError, match="the checkpoint is quantized") as caught:
        ckptctl.convert(tmp_path / "packed", tmp_path / "stacks", to="hf", to_layout="hf")
    assert "dequantize='bf16'" in str(caught.value.hint)


# ------------------------------------------------------------------------- damaged weights


def remove_tensors(folder: Path, target: Path, pattern: str) -> Path:
    state = {name: one for name, one in read(folder).items() if not re.search(pattern, name)}
    return save_hf(target, state, json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize(
    ("name", "scheme", "pattern"),
    [
        ("gemma4_text.moe", "fp8-channel", "weight_scale$"),
        ("gemma4_text.moe", "fp8-channel", r"layers\.2\.experts\.1\.up_proj\.weight_scale"),
        ("gemma4_text.moe", "fp8-channel", r"layers\.2\.experts\.1\.up_proj\.weight$"),
        ("mistral4", "int8-channel", "weight_scale$"),
        ("llama4_text", BLOCKS, r"\.experts\.1\."),
        ("llama4_text", BLOCKS, r"model\.norm"),
        ("llama3", BLOCKS, r"model\.norm"),
    ],
)
def test_damaged_quantized_model_is_refused_by_all_commands(
    tmp_path: Path, name: str, scheme: str, pattern: str
) -> None:
    quantized(stacked_golden(tmp_path / "source", name), tmp_path / "out", scheme)
    assert ckptctl.verify(tmp_path / "out").verdict == "complete"
    damaged = remove_tensors(tmp_path / "out", tmp_path / "damaged", pattern)
    assert ckptctl.verify(damaged).verdict == "damaged"
    assert ckptctl.inspect(damaged).verdict == "damaged"
    each: tuple[dict[str, Any], ...] = ({"to": "hf"}, {"to": "dcp"}, {"dequantize": "bf16"})
    for options in (*each, {"dtype": "bf16"}):
        with pytest.raises(CkptError):
            ckptctl.convert(damaged, tmp_path / "back", **{"to": "hf", **options})
    if pattern != "weight_scale$":
        ckptctl.convert(damaged, tmp_path / "part", to="hf", allow_missing=True)


def change_tensor(folder: Path, target: Path, key: str, value: torch.Tensor) -> Path:
    config = json.loads((folder / "config.json").read_text())
    return save_hf(target, {**read(folder), key: value}, config)


@pytest.mark.parametrize("scheme", [BLOCKS, "nvfp4", "int8-channel"])
def test_copy_of_quantized_model_with_conflicting_shapes_is_refused(
    tmp_path: Path, scheme: str
) -> None:
    """The names of scales are unknown to most families, whose tables have all other tensors."""
    found = quantized(sparse(tmp_path / "source"), tmp_path / "out", scheme)
    halved = found["lm_head.weight"][:48].clone()
    damaged = change_tensor(tmp_path / "out", tmp_path / "damaged", "lm_head.weight", halved)
    assert ckptctl.verify(damaged).verdict == "unknown"
    for options in ({"to": "dcp"}, {"to": "hf", "include": ["*_head*", "*embed*"]}):
        with pytest.raises(MappingError, match="the shapes of the tensors contradict each other"):
            ckptctl.plan_conversion(damaged, tmp_path / "copy", **options)
    ckptctl.plan_conversion(damaged, tmp_path / "copy", to="hf", exclude=["*_head*", "*embed*"])


def test_copy_of_mismatched_scales_gives_warning(tmp_path: Path) -> None:
    found = quantized(sparse(tmp_path / "source"), tmp_path / "out", BLOCKS)
    key = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    damaged = change_tensor(tmp_path / "out", tmp_path / "damaged", key, found[key][:1].clone())
    assert ckptctl.verify(damaged).verdict == "unknown"
    plan = ckptctl.plan_conversion(damaged, tmp_path / "copy", to="dcp")
    assert any(text.startswith(f"`{key}` does not fit") for text in plan.warnings)


def test_unknown_tensors_with_other_shapes_give_warning(tmp_path: Path) -> None:
    """The layer of an EAGLE-3 draft reads two hidden states; other tensors show that it is one."""
    golden = Golden.read("llama3")
    keys = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    wide = {key: (golden.tensors[key][0], [*golden.tensors[key][1]]) for key in keys}
    for _, shape in wide.values():
        shape[1] *= 2
    extra = {"model.fc.weight": ("bfloat16", [64, 192]), "model.d2t": ("int64", [32])}
    tensors = {**golden.tensors, **wide, **extra}
    source = Golden(golden.config, tensors, {}).save(tmp_path / "draft")
    report = ckptctl.verify(source)
    assert report.exit_code == 0
    shapes = "the shapes of the tensors contradict each other"
    assert [item.what for item in report.findings] == [shapes]
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="dcp")
    assert [text.partition(":")[0] for text in plan.warnings] == [shapes]


@pytest.mark.parametrize(("name", "scheme"), [("gemma4_text.moe", "fp8-channel")])
def test_quantizing_stacks_of_some_layers_is_refused(
    tmp_path: Path, name: str, scheme: str
) -> None:
    source = stacked_golden(tmp_path / "source", name)
    options: dict[str, Any] = {"quantize_not": "*layers.0.experts*"}
    with pytest.raises(UsageError, match="only some stacks") as refused:
        quantized(source, tmp_path / "out", scheme, **options)
    assert "to_layout='llm-compressor'" in str(refused.value.hint)
    quantized(source, tmp_path / "out", scheme, to_layout=LLM_COMPRESSOR, **options)
    assert ckptctl.verify(tmp_path / "out").verdict == "complete"
    with pytest.raises(UsageError, match="only some stacks"):
        quantized(
            stacked_golden(tmp_path / "llama4", "llama4_text"),
            tmp_path / "blocks",
            BLOCKS,
            quantize_not="*layers.1.*experts*",
        )
