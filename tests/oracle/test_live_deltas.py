"""``ckptctl.delta.apply_to`` on models of transformers, as they are and with vLLM's fused names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptctl import delta
from ckptctl.errors import RefusedError
from tests.oracle.models import tokens
from tests.oracle.test_adapters import transformers_model

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""What vLLM states as ``packed_modules_mapping`` of Llama and of Qwen 2."""


def trained(kind: str, folder: Path) -> tuple[Any, Any]:
    """Return a model as loaded, and the one that an optimizer made of it; both are saved."""
    import transformers

    transformers_model(kind, folder / "base").bfloat16().save_pretrained(folder / "base")
    old, new = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
        for _ in range(2)
    )
    optimizer = torch.optim.AdamW(new.parameters(), lr=1e-3)
    for _ in range(2):
        new(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
    new.save_pretrained(folder / "new")
    delta.make(folder / "base", folder / "new", folder / "delta")
    return old.eval(), new.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(tokens()).logits
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3"])
def test_live_model_has_the_logits_of_the_new_one(tmp_path: Path, kind: str) -> None:
    old, new = trained(kind, tmp_path)
    assert not torch.equal(logits(old), logits(new))
    delta.apply_to(dict(old.named_parameters()), tmp_path / "delta", check="all")
    assert torch.equal(logits(old), logits(new))
    with pytest.raises(RefusedError, match="already applied"):
        delta.apply_to(dict(old.named_parameters()), tmp_path / "delta")


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_fused_parameters_become_those_of_the_new_model(tmp_path: Path, kind: str) -> None:
    old, new = trained(kind, tmp_path)

    def fuse(model: Any) -> dict[str, torch.Tensor]:
        live = {name: value.detach().clone() for name, value in model.named_parameters()}
        for fused, parts in PACKED.items():
            for name in [name for name in live if f".{parts[0]}." in name]:
                rows = [live.pop(name.replace(parts[0], part)) for part in parts]
                live[name.replace(parts[0], fused)] = torch.cat(rows)
        return live

    live, expected = fuse(old), fuse(new)
    assert any("qkv_proj.bias" in name for name in live) == (kind == "qwen2")
    delta.apply_to(live, tmp_path / "delta", fused=PACKED, check="all")
    assert live.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(live[name], tensor), name
