"""mistral-inference 1.6.0, with torch's attention in place of xformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.oracle.hf_models import State, inputs
from tests.oracle.shims import bidirectional, xformers

REQUIRES: tuple[str, ...] = ("mistral_inference", "simple_parsing")
LAYOUT = "mistral"


def params(config: Any) -> dict[str, Any]:
    """Return ``params.json`` for *config*, of text or of text and pictures."""
    text = getattr(config, "text_config", config)
    found: dict[str, Any] = {
        "dim": text.hidden_size,
        "n_layers": text.num_hidden_layers,
        "head_dim": text.head_dim or text.hidden_size // text.num_attention_heads,
        "hidden_dim": text.intermediate_size,
        "n_heads": text.num_attention_heads,
        "n_kv_heads": text.num_key_value_heads,
        "norm_eps": text.rms_norm_eps,
        "vocab_size": text.vocab_size,
        "rope_theta": text.rope_parameters["rope_theta"],
    }
    if text.model_type == "mixtral":
        found["moe"] = {
            "num_experts": text.num_local_experts,
            "num_experts_per_tok": text.num_experts_per_tok,
        }
    if text is not config:
        found["vision_encoder"] = _vision(config)
    return found


def _vision(config: Any) -> dict[str, Any]:
    vision = config.vision_config
    found = {
        "hidden_size": vision.hidden_size,
        "num_channels": vision.num_channels,
        "image_size": vision.image_size,
        "patch_size": vision.patch_size,
        "intermediate_size": vision.intermediate_size,
        "num_hidden_layers": vision.num_hidden_layers,
        "num_attention_heads": vision.num_attention_heads,
        "rope_theta": vision.rope_parameters["rope_theta"],
        "image_token_id": config.image_token_index,
        "adapter_bias": config.multimodal_projector_bias,
    }
    if config.model_type == "mistral3":
        found |= {
            "spatial_merge_size": config.spatial_merge_size,
            "add_pre_mm_projector_layer_norm": True,
            "mm_projector_id": "patch_merge",
        }
    return found


def _build(config: Any) -> torch.nn.Module:
    xformers()
    from mistral_inference.args import TransformerArgs
    from mistral_inference.transformer import Transformer

    model: torch.nn.Module = Transformer(
        TransformerArgs.from_dict(params(config) | {"max_batch_size": 1})
    )
    return model.eval()


BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = dict.fromkeys(
    ("mistral", "mistral.7b", "mixtral", "ministral3.unscaled", "mistral3", "pixtral"), _build
)


def logits(model: torch.nn.Module, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits after a strict load of *state*, one sequence at a time."""
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=True)
    given = inputs(config)
    encoder: Any = getattr(model, "vision_encoder", None)
    rows = []
    with torch.no_grad():
        for index, ids in enumerate(given["input_ids"]):
            images = []
            if encoder is not None:
                images = [given["pixel_values"][index]]
                _see_everything(encoder)
            rows.append(model(ids, [len(ids)], images=images))
    return torch.stack(rows).float()


def _see_everything(encoder: Any) -> None:
    blocks = encoder.transformer
    if "forward" in vars(blocks):
        return
    causal = blocks.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with bidirectional():
            return causal(*args, **kwargs)

    blocks.forward = forward
