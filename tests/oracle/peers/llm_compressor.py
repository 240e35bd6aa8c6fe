"""llm-compressor: models of transformers with a linear layer for each projection of an expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.oracle import hf_models
from tests.oracle.hf_models import State
from tests.oracle.models import tokens
from tests.oracle.quantizers import load

REQUIRES: tuple[str, ...] = ()
LAYOUT = "llm-compressor"


def _build(config: Any) -> torch.nn.Module:
    model: torch.nn.Module = hf_models.random_model(config)
    load("llmcompressor.modeling.moe.linearize").linearize_moe(model)
    return model.eval()


BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = {"gpt_oss": _build}


def logits(model: torch.nn.Module, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits after a strict load of *state*."""
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        return torch.as_tensor(model(tokens()).logits).float()
