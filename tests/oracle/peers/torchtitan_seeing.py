"""torchtitan 0.3.0's models that see: Kimi K2.5 and Muse Glimmer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.oracle.hf_models import State, inputs
from tests.oracle.peers.torchtitan import BACKENDS, LAYOUT, MOE_BACKENDS, REQUIRES
from tests.oracle.shims import full_precision, titan_eager, triton

__all__ = ["BUILDERS", "LAYOUT", "REQUIRES", "logits"]


def _kimi(config: Any) -> torch.nn.Module:
    with triton():
        from torchtitan.models import kimi_k2_7 as kimi
        from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    text, vision = config.text_config, config.vision_config
    layers = kimi._build_kimi_layers(
        n_layers=text.num_hidden_layers,
        n_dense_layers=text.first_k_dense_replace,
        dim=text.hidden_size,
        n_heads=text.num_attention_heads,
        q_lora_rank=text.q_lora_rank,
        kv_lora_rank=text.kv_lora_rank,
        qk_nope_head_dim=text.qk_nope_head_dim,
        qk_rope_head_dim=text.qk_rope_head_dim,
        v_head_dim=text.v_head_dim,
        mscale=1.0,
        dense_hidden_dim=text.intermediate_size,
        moe_hidden_dim=text.moe_intermediate_size,
        num_experts=text.n_routed_experts,
        num_shared_experts=text.n_shared_experts,
        router_top_k=text.num_experts_per_tok,
        router_score_func="sigmoid",
        router_route_scale=text.routed_scaling_factor,
        router_route_norm=text.norm_topk_prob,
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(
            dim=text.qk_rope_head_dim,
            max_seq_len=1024,
            theta=float(text.rope_parameters["rope_theta"]),
        ),
        **MOE_BACKENDS,
    )
    encoder = kimi._vision_encoder_config(
        dim=vision.hidden_size,
        ffn_dim=vision.intermediate_size,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        patch_size=vision.patch_size,
        init_pos_emb_height=vision.pos_emb_height,
        init_pos_emb_width=vision.pos_emb_width,
        rope_theta=vision.rope_parameters["rope_theta"],
        text_hidden_size=text.hidden_size,
    )
    model = kimi.KimiK25Model.Config(
        vocab_size=text.vocab_size,
        dim=text.hidden_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=text.vocab_size, embedding_dim=text.hidden_size
        ),
        norm=RMSNorm.Config(normalized_shape=text.hidden_size),
        lm_head=Linear.Config(in_features=text.hidden_size, out_features=text.vocab_size),
        layers=layers,
        vision_encoder=encoder,
    ).build()
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.eps = text.rms_norm_eps
    return _eager(model)


def _muse(config: Any) -> torch.nn.Module:
    with triton():
        from torchtitan.models import muse_glimmer as muse
    text, vision = config.text_config, config.vision_config
    encoder = muse.muse_glimmer_vision_encoder_config(
        latent_dim=vision.hidden_size,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        mlp_ratio=vision.intermediate_size / vision.hidden_size,
        patch_size=vision.patch_size,
        patch_temporal=vision.patch_temporal,
        downsample_factor=vision.merge_size,
        pos_emb_grid_h=vision.pos_emb_height,
        pos_emb_grid_w=vision.pos_emb_width,
        rope_theta=vision.rope_parameters["rope_theta"],
    )
    adapter = muse.muse_glimmer_vision_adapter_config(
        input_dim=config.out_hidden_size, output_dim=config.projector_hidden_size
    )
    with mock.patch.multiple(
        muse,
        _FFN_DIM_MULTIPLIER=text.intermediate_size / text.hidden_size,
        _SCALE_QUERY_NUMERATOR=text.qk_scale_factor * text.head_dim**0.5,
    ):
        built = muse._muse_glimmer_config(
            dim=text.hidden_size,
            n_layers=text.num_hidden_layers,
            n_heads=text.num_attention_heads,
            n_kv_heads=text.num_key_value_heads,
            head_dim=text.head_dim,
            vocab_size=text.vocab_size,
            max_seq_len=1024,
            window_pattern=[text.sliding_window] * 3 + [0],
            output_multiplier=text.output_multiplier,
            vision_adapter_dim=config.projector_hidden_size,
            vision_encoder=encoder,
            vision_adapter=adapter,
            **BACKENDS,
        ).build()
    return _eager(built)


def _eager(model: Any) -> torch.nn.Module:
    """Return *model* with masks of pictures that are made without a compiler."""
    from torch.nn.attention.flex_attention import create_block_mask

    titan_eager()
    encoder = sys.modules[type(model.vision_encoder).__module__]
    encoder.compiled_create_block_mask = create_block_mask  # type: ignore[attr-defined]
    built: torch.nn.Module = model.eval()
    return built


BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "kimi_k25": _kimi,
    "muse_glimmer": _muse,
}


def logits(model: torch.nn.Module, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits of text and pictures after a strict load of *state*."""
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=True)
    given = inputs(config)
    ids, grids = given["input_ids"], given["image_grid_thw"]
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    masks = model.get_attention_masks(positions)  # type: ignore[operator]
    special = {"image_id": config.image_token_id, "video_id": config.image_token_id}
    with torch.no_grad(), full_precision(), _no_mesh():
        found = model(
            ids,
            positions=positions,
            attention_masks=masks,
            pixel_values=_by_picture(given["pixel_values"], config, len(grids)),
            grid_thw=grids,
            special_tokens=special,
        )
    return torch.as_tensor(found).float()


@contextmanager
def _no_mesh() -> Iterator[None]:
    """Let torchtitan state no placements of its inputs on a mesh that is not there."""
    from torchtitan.distributed import utils

    before = utils.get_spmd_backend()
    utils.set_spmd_backend("none")
    try:
        yield
    finally:
        utils.set_spmd_backend(before)


def _by_picture(patches: torch.Tensor, config: Any, pictures: int) -> torch.Tensor:
    """Return patches as torchtitan's loader hands them over: ``[pictures, patches, (c t h w)]``."""
    frames = getattr(config.vision_config, "patch_temporal", 1)
    side = config.vision_config.patch_size
    inner = patches.view(-1, frames, 3, side, side).transpose(1, 2)
    return inner.reshape(pictures, len(patches) // pictures, -1)
