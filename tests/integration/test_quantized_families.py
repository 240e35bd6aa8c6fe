"""Float8 weights of DeepSeek-V3 and their scales, from file to file."""

import pytest
import torch
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

import ckptctl
from ckptctl.errors import MappingError, UsageError
from ckptctl.families import family
from tests.checkpoints import load_any_reference, save_hf, tiny_llama
from tests.checkpoints.golden import Golden
from tests.contract.tables import tiny
from tests.unit.planner.families.test_declarations import natively

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SCALE = "_scale_inv"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
GOLDEN = Golden.read("deepseek_v3")
CONFIG = {
    **GOLDEN.config,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(4)
    state = {}
    for name, (_, shape) in GOLDEN.tensors.items():
        state[name] = torch.randn(shape, dtype=torch.bfloat16)
        if name == BIAS:
            state[name] = torch.randn(shape)
        elif "proj" in name:
            state[name] = state[name].to(torch.float8_e4m3fn)
            state[name + SCALE] = torch.rand(*(-(-size // 128) for size in shape)) + 0.1
    save_hf(tmp_path / "source", state, CONFIG, shards=2)
    return tmp_path / "source"


def test_quantized_deepseek_layout_roundtrip_keeps_every_byte(tmp_path, source):
    ckptctl.convert(source, tmp_path / "native.pt", to="torch", to_layout="deepseek")
    before, after = load_any_reference(source), load_any_reference(tmp_path / "native.pt")
    assert after.keys() == {natively(name) for name in before}
    for name, value in before.items():
        found = after[natively(name)]
        assert found.dtype == value.dtype
        assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
    ckptctl.convert(tmp_path / "native.pt", tmp_path / "back", to="hf", assets=source)
    back = load_any_reference(tmp_path / "back")
    assert back.keys() == before.keys()
    assert all(
        torch.equal(v.view(torch.uint8), before[k].view(torch.uint8)) for k, v in back.items()
    )


def test_dequantized_experts_are_stacked_and_bias_stays_fp32(tmp_path, source):
    out = tmp_path / "titan.pt"
    ckptctl.convert(source, out, to="torch", to_layout="torchtitan@0.3", dequantize="bf16")
    found = load_any_reference(out)
    names = [
        f"model.layers.1.mlp.experts.{x}.up_proj.weight" for x in range(CONFIG["n_routed_experts"])
    ]
    plain = {name: torch.zeros(GOLDEN.tensors[name][1], dtype=torch.bfloat16) for name in names}
    reader = QuantizedHuggingFaceStorageReader(str(source), target_dtype=torch.bfloat16)
    load(plain, storage_reader=reader)
    stacked = found["layers.1.moe.routed_experts.inner_experts.w3_EFD"]
    assert torch.equal(stacked, torch.stack([plain[name] for name in names]))
    assert found["layers.1.moe.expert_bias_E"].dtype == torch.float32
    assert {value.dtype for value in found.values()} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("layout", ["deepseek", "hf"])
def test_inspect_recognizes_converted_quantized_checkpoint(tmp_path, source, layout):
    ckptctl.convert(source, tmp_path / "out", to="hf", to_layout=layout)
    found = ckptctl.inspect(tmp_path / "out")
    assert (found.model_type, found.layout, found.dequantizable) == ("deepseek_v3", layout, True)


@pytest.mark.parametrize("to", ["hf", "dcp", "torch"])
def test_inspect_recognizes_quantized_gpt_oss_experts(tmp_path, to):
    state = {
        name: torch.zeros(
            shape, dtype=torch.uint8 if "_blocks" in name or "_scales" in name else None
        )
        for name, shape in tiny(family("gpt_oss"), "hf").items()
    }
    packed = [name for name in state if name.endswith((".gate_up_proj", ".down_proj"))]
    for name in packed:
        experts, _, rows = state.pop(name).shape
        state[f"{name}_blocks"] = torch.zeros(experts, rows, 2, 16, dtype=torch.uint8)
        state[f"{name}_scales"] = torch.zeros(experts, rows, 2, dtype=torch.uint8)
    names = family("gpt_oss").sizes.items()
    sizes = {name: family("gpt_oss").tiny[axis] for axis, (name, _) in names if name}
    save_hf(tmp_path / "in", state, {"model_type": "gpt_oss", **sizes})
    out = tmp_path / ("out.pt" if to == "torch" else "out")
    ckptctl.convert(tmp_path / "in", out, to=to, to_layout="openai", model_type="gpt_oss")
    found = ckptctl.inspect(out)
    assert (found.model_type, found.layout) == ("gpt_oss", "openai")
    assert found.quantized and found.dequantizable


@pytest.mark.parametrize(
    ("scale", "says"), [("_scale_inv", "dequantize"), ("_scale", "compressed-tensors")]
)
def test_unknown_scales_are_an_error_not_skipped(tmp_path, scale, says):
    state, config = tiny_llama("llama3")
    for key in [name for name in state if "proj" in name]:
        state[key] = state[key].to(torch.float8_e4m3fn)
        state[key + scale] = torch.ones(1, 1)
    save_hf(tmp_path / "in", state, config)
    with pytest.raises(MappingError) as caught:
        ckptctl.convert(tmp_path / "in", tmp_path / "out", to="meta")
    assert says in caught.value.hint and "exclude" not in caught.value.hint


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (MappingError, {"to": "torch", "to_layout": "torchtitan@0.3"}),
        (MappingError, {"to": "torch", "to_layout": "hf-v5", "exclude": ["*" + SCALE]}),
        (MappingError, {"to": "hf", "exclude": ["*" + SCALE]}),
        (UsageError, {"to": "hf", "dtype": "bf16"}),
        (UsageError, {"to": "torch", "to_layout": "deepseek", "dtype": "fp32"}),
    ],
)
def test_separating_weights_from_scales_is_refused(tmp_path, source, error, options):
    with pytest.raises(error) as caught:
        ckptctl.convert(source, tmp_path / "out", **options)
    assert "dequantize='bf16'" in str(getattr(caught.value, "hint", ""))
    assert not (tmp_path / "out").exists()
