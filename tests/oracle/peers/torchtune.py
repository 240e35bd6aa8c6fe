"""torchtune 0.6.1.

Known differences that are the peer's, not the mapping's: Gemma 2 caps hidden states where it
should cap logits (off here), ``mistral()`` has no ``head_dim``, CLIP and T5 take exactly
``max_seq_len`` tokens, T5 has the exact GELU where T5 1.1 has its tanh approximation (mended here).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.oracle.hf_models import State, inputs
from tests.oracle.models import torchtune_model
from tests.oracle.shims import torchvision

REQUIRES: tuple[str, ...] = ("torchtune",)
LAYOUT = "torchtune"


def _sizes(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "embed_dim": config.hidden_size,
        "max_seq_len": 1024,
        "intermediate_dim": config.intermediate_size,
        "norm_eps": config.rms_norm_eps,
    }


def _theta(config: Any) -> float:
    return float(config.rope_parameters["rope_theta"])


def _llama(kind: str) -> Any:
    def build(config: Any) -> torch.nn.Module:
        rotary = {"rope_theta": _theta(config), "rope_scaling": config.rope_parameters}
        return torchtune_model(kind, config.to_dict() | rotary)

    return build


def _mistral(config: Any) -> torch.nn.Module:
    from torchtune.models.mistral import mistral

    model: torch.nn.Module = mistral(**_sizes(config), rope_base=_theta(config))
    return model


def _gemma(config: Any) -> torch.nn.Module:
    from torchtune.models.gemma import gemma

    model: torch.nn.Module = gemma(
        **_sizes(config), head_dim=config.head_dim, rope_base=_theta(config)
    )
    return model


def _gemma2(config: Any) -> torch.nn.Module:
    from torchtune.models.gemma2 import gemma2

    model: Any = gemma2(
        **_sizes(config),
        head_dim=config.head_dim,
        rope_base=_theta(config),
        hidden_capping_value=config.attn_logit_softcapping,
        sliding_window_size=config.sliding_window,
        query_pre_attn_scalar=config.query_pre_attn_scalar,
    )
    model.norm.logit_capping = torch.nn.Identity()
    return model  # type: ignore[no-any-return]


def _qwen2(config: Any) -> torch.nn.Module:
    from torchtune.models.qwen2 import qwen2

    model: torch.nn.Module = qwen2(
        **_sizes(config),
        rope_base=_theta(config),
        tie_word_embeddings=config.tie_word_embeddings,
    )
    return model


def _phi3(config: Any) -> torch.nn.Module:
    from torchtune.models.phi3 import phi3

    model: torch.nn.Module = phi3(**_sizes(config), rope_base=_theta(config))
    return model


def _reward(config: Any) -> torch.nn.Module:
    from torchtune.models.llama2 import llama2_classifier

    model: torch.nn.Module = llama2_classifier(num_classes=config.num_labels, **_sizes(config))
    return model


def _clip_text(config: Any) -> torch.nn.Module:
    with torchvision():
        from torchtune.models.clip._component_builders import clip_text_encoder
    model: Any = clip_text_encoder(
        embed_dim=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        max_seq_len=config.max_position_embeddings,
        norm_eps=config.layer_norm_eps,
    )
    model.eot_token = config.eos_token_id
    return model  # type: ignore[no-any-return]


def _t5_encoder(config: Any) -> torch.nn.Module:
    from torchtune.models.t5 import t5_encoder

    model: Any = t5_encoder(
        embed_dim=config.d_model,
        mlp_dim=config.d_ff,
        num_heads=config.num_heads,
        head_dim=config.d_kv,
        num_layers=config.num_layers,
        rel_pos_num_buckets=config.relative_attention_num_buckets,
        rel_pos_max_dist=config.relative_attention_max_distance,
        vocab_size=config.vocab_size,
        norm_eps=config.layer_norm_epsilon,
        max_seq_len=48,
    )
    for layer in model.layers:
        layer.mlp.activation = torch.nn.GELU(approximate="tanh")
    return model  # type: ignore[no-any-return]


def _llama3_vision(config: Any) -> torch.nn.Module:
    with torchvision():
        from torchtune.models.llama3_2_vision._component_builders import (
            llama3_2_vision_decoder,
            llama3_2_vision_encoder,
        )
        from torchtune.modules.model_fusion import DeepFusionModel
    text, vision = config.text_config, config.vision_config
    cross = len(text.cross_attention_layers)
    own = text.num_hidden_layers - cross
    encoder = llama3_2_vision_encoder(
        patch_size=vision.patch_size,
        num_heads=vision.attention_heads,
        clip_embed_dim=vision.hidden_size,
        clip_num_layers=vision.num_hidden_layers,
        # transformers 5.23 counts what leaves a layer, Meta and torchtune what enters it.
        clip_hidden_states=[index + 1 for index in vision.intermediate_layers_indices],
        num_layers_projection=vision.num_global_layers,
        decoder_embed_dim=text.hidden_size,
        tile_size=vision.image_size,
        max_num_tiles=vision.max_num_tiles,
    )
    decoder = llama3_2_vision_decoder(
        vocab_size=text.vocab_size,
        num_layers=own,
        fusion_interval=own // cross,
        num_special_tokens=8,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        embed_dim=text.hidden_size,
        max_seq_len=1024,
        encoder_max_seq_len=1024,
        rope_base=_theta(text),
        intermediate_dim=text.intermediate_size,
    )
    _set_eps(decoder, text.rms_norm_eps)
    model: torch.nn.Module = DeepFusionModel(decoder, encoder)
    return model


def _set_eps(model: torch.nn.Module, eps: float) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "eps", None), float):
            module.eps = eps  # type: ignore[assignment]


BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "llama2": _llama("llama2"),
    "llama3": _llama("llama3"),
    "llama3_2": _llama("llama3_2"),
    "mistral.7b": _mistral,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "qwen2": _qwen2,
    "qwen2.tied": _qwen2,
    "phi3": _phi3,
    "reward": _reward,
    "clip_text": _clip_text,
    "t5_encoder": _t5_encoder,
    "llama3_vision": _llama3_vision,
}


def logits(model: torch.nn.Module, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits after a strict load of *state*."""
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=True)
    model.eval()
    given = inputs(config)
    with torch.no_grad():
        if config.model_type == "mllama":
            ratios = torch.tensor([[[1, 4]], [[2, 2]]])
            pictures = {"images": given["pixel_values"], "aspect_ratio": ratios}
            return torch.as_tensor(model(given["input_ids"], encoder_input=pictures)).float()
        out = torch.as_tensor(model(given["input_ids"])).float()
    if config.model_type == "gemma2":
        cap = config.final_logit_softcapping
        return torch.as_tensor(cap * torch.tanh(out / cap))
    if "LlamaForSequenceClassification" in (config.architectures or ()):
        return out[:, -1]
    return out
