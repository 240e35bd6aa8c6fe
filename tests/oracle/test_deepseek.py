"""DeepSeek-V3: layers that predict further tokens, float8 weights and their scales."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import MappingError
from tests.oracle.models import TOLERANCE, distance
from tests.oracle.tiny import TINY

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.hf_models import State
from tests.oracle.peers import deepseek, missing, torchtitan
from tests.oracle.shims import triton

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
LAST, NEXT = "model.layers.2.", "model.layers.3."
REPEATED = {
    f"{NEXT}embed_tokens.weight": "model.embed_tokens.weight",
    f"{NEXT}shared_head.head.weight": "lm_head.weight",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """DeepSeek-V3 as on the Hub: a layer more, with the embedding and the head once again."""
    path = hf_models.save(hf_models.random_model(TINY["deepseek_v3"]()), tmp_path / "hf")
    state = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    for name in [key for key in state if key.startswith(LAST)]:
        shape = state[name].shape
        state[name.replace(LAST, NEXT)] = torch.randn(shape, generator=generator)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        state[f"{NEXT}{name}.weight"] = torch.randn(64, generator=generator)
    state[f"{NEXT}eh_proj.weight"] = torch.randn(64, 128, generator=generator)
    state |= {copy: state[kept].clone() for copy, kept in REPEATED.items()}
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return path


def by_torchtitan(state: State) -> State:
    """Return what torchtitan's own converter makes of *state*."""
    with triton():
        from torchtitan.models.common import ComplexRoPE
        from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
    rope = ComplexRoPE.Config(dim=8, max_seq_len=64, theta=10000.0)
    attention = SimpleNamespace(q_lora_rank=40, rope=rope)
    layer = SimpleNamespace(attention=attention, moe=SimpleNamespace(num_experts=8))
    config = SimpleNamespace(layers=[layer] * 3, mtp_layers=[layer])
    found: State = DeepSeekV3StateDictAdapter(config, None).from_hf(state)
    return found


def require_torchtitan() -> None:
    if missing(torchtitan):
        pytest.skip(f"not installed: {', '.join(missing(torchtitan))}")


def test_mtp_layers_match_torchtitan_conversion(tmp_path: Path, folder: Path) -> None:
    require_torchtitan()
    state = load_file(folder / "model.safetensors")
    theirs = by_torchtitan({k: v for k, v in state.items() if k not in REPEATED})
    ckptctl.convert(folder, tmp_path / "ours.pt", to="torch", to_layout="torchtitan@0.3")
    ours: State = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert "mtp_layers.0.moe.expert_bias_E" in ours
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_torchtitan_round_trip_drops_only_repeated_tensors(tmp_path: Path, folder: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    ckptctl.convert(folder, there, to="dcp", to_layout="torchtitan@0.3")
    ckptctl.convert(there, back, to="hf", model_type="deepseek_v3", assets=folder)
    before, after = (load_file(path / "model.safetensors") for path in (folder, back))
    assert before.keys() - after.keys() == REPEATED.keys()
    assert all(torch.equal(value, before[key]) for key, value in after.items())


def test_differing_repeated_mtp_embedding_is_refused(tmp_path: Path, folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state[f"{NEXT}embed_tokens.weight"][3, 5] += 1
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MappingError, match="embed_tokens"):
        ckptctl.convert(folder, tmp_path / "o.pt", to="torch", to_layout="torchtitan@0.3")
    assert not (tmp_path / "o.pt").exists()


def test_native_model_without_mtp_layers_keeps_logits(tmp_path: Path, folder: Path) -> None:
    expected = hf_models.logits(hf_models.random_model(TINY["deepseek_v3"]()))
    out = tmp_path / "native.pt"
    ckptctl.convert(folder, out, to="torch", to_layout="deepseek", exclude=[f"{NEXT}*"])
    state: State = torch.load(out, weights_only=True)
    config = TINY["deepseek_v3"]()
    found = deepseek.logits(deepseek.Transformer(config), state, config)
    assert distance(found, expected) < TOLERANCE
    wrong = {k: torch.zeros_like(v) if k.endswith("gate.bias") else v for k, v in state.items()}
    assert distance(deepseek.logits(deepseek.Transformer(config), wrong, config), expected) > 0.05
