"""Other people's models at tiny size, and how far two sets of logits are apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

TOLERANCE = 2e-5
WRONG = 0.1
"""A wrong mapping moves the logits of these random models by more than this."""


def tokens(length: int = 48) -> torch.Tensor:
    """Return ``[2, length]`` token ids below 128; long enough for the rotations to matter."""
    return torch.randint(0, 128, (2, length), generator=torch.Generator().manual_seed(3))


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the largest absolute difference."""
    return float((first - second).abs().max())


def transformers_logits(folder: Path) -> torch.Tensor:
    """Return fp32 logits of ``AutoModelForCausalLM.from_pretrained(folder)``.

    Raises:
        AssertionError: transformers reports missing, unexpected or mismatched keys.
    """
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    model, info = loaded
    problems = {kind: keys for kind, keys in info.items() if keys}
    assert not problems, problems
    with torch.no_grad():
        return torch.as_tensor(model.eval()(tokens()).logits)


def transformers_logits_of(
    state: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> torch.Tensor:
    """Return fp32 logits of a state dict under Hugging Face names, without any file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager"))
    model = model.float()
    weights = {name: value.float() for name, value in state.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = ["lm_head.weight"] if config["tie_word_embeddings"] else []
    assert (sorted(missing), unexpected) == (tied, []), (missing, unexpected)
    model.tie_weights()
    with torch.no_grad():
        return torch.as_tensor(model.eval()(tokens()).logits)


def torchtune_model(kind: str, config: Mapping[str, Any]) -> torch.nn.Module:
    """Return torchtune's model of that kind with the sizes of *config*."""
    from torchtune.models.llama2 import llama2
    from torchtune.models.llama3_1 import llama3_1
    from torchtune.models.llama3_2 import llama3_2

    sizes: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "embed_dim": config["hidden_size"],
        "max_seq_len": 1024,
        "intermediate_dim": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"],
    }
    if kind == "llama2":
        model: torch.nn.Module = llama2(**sizes, rope_base=config["rope_theta"])
        return model.eval()
    sizes |= {
        "rope_base": config["rope_theta"],
        "scale_factor": config["rope_scaling"]["factor"],
    }
    build = llama3_2 if kind == "llama3_2" else llama3_1
    model = build(**sizes)
    return model.eval()


def torchtune_logits(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return fp32 logits after a strict load of *state*."""
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=True)
    with torch.no_grad():
        return torch.as_tensor(model(tokens()).float())


def require_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Raise AssertionError unless both hold the same tensors under the same names."""
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
