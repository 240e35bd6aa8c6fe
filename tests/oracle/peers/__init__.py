"""Other people's models at tiny size, one module for each package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tests.oracle.hf_models import State
from tests.oracle.peers import (
    deepseek,
    llm_compressor,
    meta,
    mistral,
    mlx,
    mlx_vlm,
    olmo,
    olmo_core,
    openai,
    torchtitan,
    torchtitan_0_2,
    torchtitan_qwen,
    torchtitan_seeing,
    torchtune,
)


class Peer(Protocol):
    """What each module of this package has.

    Attributes:
        LAYOUT: The layout of its state dict.
        REQUIRES: What must be importable.
        BUILDERS: Key of ``TINY`` → function from transformers' config to the peer's model.
    """

    LAYOUT: str
    REQUIRES: tuple[str, ...]
    BUILDERS: dict[str, Callable[[Any], torch.nn.Module]]

    def logits(self, model: Any, state: State, config: Any) -> torch.Tensor:
        """Return fp32 logits after a strict load of *state*."""


PEERS: tuple[Peer, ...] = (
    torchtune,
    torchtitan,
    torchtitan_seeing,
    torchtitan_qwen,
    torchtitan_0_2,
    mistral,
    openai,
    deepseek,
    meta,
    olmo,
    olmo_core,
    mlx,
    mlx_vlm,
    llm_compressor,
)


def missing(peer: Peer) -> list[str]:
    """Return what *peer* needs and is not installed."""
    return [name for name in peer.REQUIRES if importlib.util.find_spec(name) is None]


def state_of(peer: Peer, model: torch.nn.Module, config: Any) -> State:
    """Return the state dict as *peer* saves it.

    torchtitan keeps a balancing bias for each expert, whatever the model; where transformers has
    none, it is what training starts with: zero.
    """
    save = getattr(peer, "state", None)
    state: State = save(model) if save else dict(model.state_dict())
    if not hasattr(getattr(config, "text_config", config), "topk_group"):
        for name in state:
            if name.endswith(("expert_bias", "expert_bias_E")):
                state[name] = torch.zeros_like(state[name])
    return {name: value.clone() for name, value in state.items()}
