"""Stacked experts in ``fp8-block`` beside transformers, which writes and reads them.

``Fp8Quantize`` is what it saves them by, ``FP8Experts`` the module that holds them, and
``Fp8Dequantize`` what makes them plain. It asks for a GPU before it holds any; the tests leave out
that question, and multiply plain weights where it would call a kernel.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl import families
from ckptctl.numerics.quantization.linear_weights import TensorRoles
from tests.checkpoints.golden import State
from tests.checkpoints.quantized import hard
from tests.oracle.models import distance
from tests.oracle.tiny import TINY, family_of

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from transformers import AutoModelForCausalLM, Gemma4TextConfig, MixtralConfig, Qwen3MoeConfig
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import FP8Experts, Fp8Quantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config

from tests.oracle import hf_models

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
FP8 = torch.float8_e4m3fn
QUANTIZER = Fp8Quantize(
    SimpleNamespace(
        quantization_config=SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    )
)
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 97,
}
CONFIGS = {
    "mixtral": MixtralConfig(
        **SIZES, intermediate_size=384, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES,
        intermediate_size=384,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
    ),
    "gemma4_text": Gemma4TextConfig(
        **SIZES | {"head_dim": 128},
        intermediate_size=384,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=128,
        global_head_dim=128,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        tie_word_embeddings=False,
    ),
}


def layout_of(family: str) -> str:
    """Return the layout in which experts are stacked as transformers holds them."""
    return "hf-v5" if "hf-v5" in families.family(family).layouts else "hf"


def quantized(tmp_path: Path, family: str, dtype: torch.dtype) -> tuple[State, State]:
    """Return the plain tensors of a model with weights that are hard, and what becomes of them."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[family]).to(dtype)
    for seed, (name, value) in enumerate(model.state_dict().items()):
        if name.endswith(("_proj", "_proj.weight")):
            *stack, rows, columns = value.shape
            numbers = hard(rows * (stack[0] if stack else 1), columns, dtype, seed)
            value.copy_(numbers.view(value.shape).clamp(-2, 2))
    model.save_pretrained(tmp_path / "plain")
    ckptctl.convert(
        *(tmp_path / "plain", tmp_path / "out"),
        to="hf",
        to_layout=layout_of(family),
        quantize="fp8-block",
    )
    return dict(model.state_dict()), load_file(tmp_path / "out" / "model.safetensors")


def bits(state: State) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {
        name: (one.dtype, tuple(one.shape), one.contiguous().view(torch.uint8).numpy().tobytes())
        for name, one in state.items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", CONFIGS)
def test_stacked_fp8_experts_are_bit_exact_both_ways(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    plain, found = quantized(tmp_path, family, dtype)
    stacks = [name for name, one in found.items() if one.dtype == FP8 and one.dim() == 3]
    assert len(stacks) == 2 * SIZES["num_hidden_layers"]
    for name in stacks:
        wanted = QUANTIZER._quantize_one(name, plain[name])
        assert bits({key: found[key] for key in wanted}) == bits(wanted)
    for how in (torch.bfloat16, torch.float32):
        short = {torch.bfloat16: "bf16", torch.float32: "fp32"}[how]
        back = tmp_path / short
        options: dict[str, Any] = {"to_layout": layout_of(family), "dequantize": short}
        ckptctl.convert(tmp_path / "out", back, to="hf", **options)
        again = load_file(back / "model.safetensors")
        for name in stacks:
            scales = found[f"{name}_scale_inv"]
            wanted = QUANTIZER.reverse_op._dequantize_one(found[name], scales, how)
            assert bits({name: again[name]}) == bits({name: wanted})


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(input: Any, weight: Any, scales: Any, _: Any, bias: Any, *__: Any) -> torch.Tensor:
        plain = QUANTIZER.reverse_op._dequantize_one(weight, scales, input.dtype)
        return torch.nn.functional.linear(input, plain, bias)

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", linear)


def loaded(folder: Path) -> Any:
    """Return the model of a folder, as its own config.json says, with nothing over or missing."""
    options: dict[str, Any] = {"output_loading_info": True, "experts_implementation": "eager"}
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(24).view(2, 12)).logits
    return found


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("family", CONFIGS)
def test_stacked_fp8_experts_load_in_transformers(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[family]).bfloat16()
    model.save_pretrained(tmp_path / "plain")
    layout: dict[str, Any] = {"to": "hf", "to_layout": layout_of(family)}
    ckptctl.convert(tmp_path / "plain", tmp_path / "out", **layout, quantize="fp8-block")
    ckptctl.convert(tmp_path / "out", tmp_path / "back", **layout, dequantize="fp32")
    held = loaded(tmp_path / "out")
    experts = [one for one in held.modules() if isinstance(one, FP8Experts)]
    assert len(experts) == SIZES["num_hidden_layers"]
    assert all(one.gate_up_proj.dtype == FP8 for one in experts)
    found, wanted = logits(held), logits(loaded(tmp_path / "back"))
    size = float(wanted.abs().max())
    assert distance(found, wanted) < 2e-5 * size
    assert distance(found, logits(loaded(tmp_path / "plain"))) > 1e-3 * size
    wrong = load_file(tmp_path / "out" / "model.safetensors")
    name = next(name for name in wrong if name.endswith("experts.down_proj_scale_inv"))
    wrong[name] = wrong[name].flip(0) * 1.5
    save_file(wrong, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    assert distance(logits(loaded(tmp_path / "out")), wanted) > 1e-3 * size


def stacks_of(name: str) -> dict[str, tuple[str, bool]]:
    """Return the stacks of experts of a model: what we take each for, and what transformers does.

    That is whether ``FP8Experts``, in place of the model's own module, holds them in that shape.
    """
    family = families.family(family_of(name))
    roles = TensorRoles(family, family.get_layout(layout_of(family.name)))
    model = hf_models.build_on_meta(TINY[name](), dtype=torch.bfloat16)
    before = {key: one.shape for key, one in model.state_dict().items()}
    every = {key: roles.get_role(key, shape) for key, shape in before.items()}
    kinds = ("experts", "transposed", "stacked")
    stacks = {key: role for key, role in every.items() if role in kinds}
    try:
        finegrained_fp8.replace_with_fp8_linear(model, None, FineGrainedFP8Config())
    except (AssertionError, AttributeError):
        # It has no such module for experts with biases, and none without `hidden_act`.
        return {key: (role, False) for key, role in stacks.items()}
    except TypeError:
        if family_of(name) != "ernie4_5_vl_moe":
            raise
        # It cannot build experts of two sizes.
        return {key: (role, False) for key, role in stacks.items()}
    after = {key: (one.shape, one.dtype) for key, one in model.state_dict().items()}
    return {
        key: (role, after.get(key) == (before[key], FP8) and f"{key}_scale_inv" in after)
        for key, role in stacks.items()
    }


@pytest.mark.parametrize("name", TINY)
def test_expert_stack_roles_match_transformers_fp8_experts(name: str) -> None:
    family = family_of(name)
    if family not in families.list_model_types():
        pytest.skip(f"no model type `{family}`")
    stacks = stacks_of(name)
    if not stacks:
        pytest.skip("no stacked experts")
    # DeepSeek-V4's table counts packed elements of FP4: no axis of it is the hidden size.
    # Inkling's table divides the rows of gate and up, so its stacks are only refused.
    if family not in ("deepseek_v4", "inkling"):
        assert all((role == "experts") == held for role, held in stacks.values()), stacks
