"""mlx-lm 0.32 on MLX's CPU backend: its models, in fp32, uncompiled.

A name of ``TINY`` in :data:`BUILDERS` is all that a further model needs: mlx-lm finds the class by
``model_type``. It is given config.json as transformers 4 spelled it, as published models have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.oracle.hf_models import State
from tests.oracle.models import tokens

REQUIRES: tuple[str, ...] = ("mlx", "mlx_lm")
LAYOUT = "mlx"


class Model(torch.nn.Module):
    """A model of mlx-lm, with tensors of torch in the place of its parameters.

    Attributes:
        model: mlx-lm's.
    """

    def __init__(self, model: Any) -> None:
        from mlx.utils import tree_flatten

        super().__init__()
        self.model = model
        self._state = {name: _torch(value) for name, value in tree_flatten(model.parameters())}

    def state_dict(self, *args: Any, **options: Any) -> State:
        """Return the parameters as mlx-lm saves them; who changes them changes the model."""
        return self._state


def spelled_as_before(config: Any) -> dict[str, Any]:
    """Return config.json of transformers' *config* as transformers 4 wrote it."""
    found: dict[str, Any] = config.to_dict()
    for other, name in config.attribute_map.items():
        found.setdefault(other, found.get(name))
    for name in config.sub_configs:
        if found.get(name):
            found[name] = spelled_as_before(getattr(config, name))
    rope = found.pop("rope_parameters", None) or {}
    if "sliding_attention" in rope:
        found["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    found |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    scaled = rope.get("rope_type", "default") != "default"
    return found | {"rope_scaling": dict(rope) if scaled else None}


def build(config: Any) -> torch.nn.Module:
    """Return mlx-lm's model of transformers' *config*, its weights whatever they are."""
    import mlx.core as mx
    from mlx_lm import utils

    mx.disable_compile()
    mx.set_default_device(mx.cpu)
    wanted = spelled_as_before(config)
    kind, arguments = utils._get_classes(wanted)
    model = kind(arguments.from_dict(wanted))
    model.eval()
    return Model(model)


BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = dict.fromkeys(
    ("llama3", "qwen3_moe", "qwen3_moe.mixed"), build
)


def logits(model: Any, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits after a strict load of *state*.

    Raises:
        AssertionError: mlx-lm would change what it has saved itself, names or elements.
    """
    import mlx.core as mx

    weights = {name: _mlx(value) for name, value in state.items()}
    if hasattr(model.model, "sanitize"):
        cleaned = model.model.sanitize(dict(weights))
        assert cleaned.keys() == weights.keys()
        assert all(mx.array_equal(value, weights[name]) for name, value in cleaned.items())
    model.model.load_weights(list(weights.items()), strict=True)
    return _torch(model.model(mx.array(tokens().numpy())))


def _torch(value: Any) -> torch.Tensor:
    import mlx.core as mx
    import numpy as np

    return torch.from_numpy(np.array(value.astype(mx.float32)))


def _mlx(value: torch.Tensor) -> Any:
    import mlx.core as mx

    return mx.array(value.float().contiguous().numpy())
