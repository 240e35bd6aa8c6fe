"""torchtitan 0.3.0: Qwen 3.5 with pictures, its delta nets token by token, experts in fp32.

Its merger of patches has the approximated GELU where transformers has the exact one: that one is
put in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.oracle import hf_models
from tests.oracle.hf_models import State
from tests.oracle.peers.torchtitan import BACKENDS, MOE_BACKENDS, REQUIRES, eager_model
from tests.oracle.shims import fla, full_precision, triton

__all__ = ["BUILDERS", "LAYOUT", "REQUIRES", "logits"]

LAYOUT = "torchtitan@0.3"


def _vision(config: Any, qwen: Any) -> Any:
    vision = config.vision_config
    return qwen._qwen35_vision_encoder_config(
        dim=vision.hidden_size,
        ffn_dim=vision.intermediate_size,
        num_layers=vision.depth,
        num_heads=vision.num_heads,
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        spatial_merge_size=vision.spatial_merge_size,
        out_hidden_size=vision.out_hidden_size,
        num_position_embeddings=vision.num_position_embeddings,
    )


def _layers(text: Any, qwen: Any) -> Any:
    rope = text.rope_parameters
    rotary = int(text.head_dim * rope["partial_rotary_factor"])
    common = {
        "n_layers": text.num_hidden_layers,
        "dim": text.hidden_size,
        "n_heads": text.num_attention_heads,
        "n_kv_heads": text.num_key_value_heads,
        "head_dim": text.head_dim,
        "rotary_dim": rotary,
        "rope": qwen.MRoPE.Config(
            dim=rotary,
            max_seq_len=1024,
            theta=rope["rope_theta"],
            mrope_section=rope["mrope_section"],
        ),
        "n_key_heads": text.linear_num_key_heads,
        "n_value_heads": text.linear_num_value_heads,
        "key_head_dim": text.linear_key_head_dim,
        "value_head_dim": text.linear_value_head_dim,
    }
    if hasattr(text, "num_experts"):
        return qwen._build_qwen35_moe_layers(
            **common,
            moe_hidden_dim=text.moe_intermediate_size,
            num_experts=text.num_experts,
            top_k=text.num_experts_per_tok,
            shared_expert_hidden_dim=text.shared_expert_intermediate_size,
            **MOE_BACKENDS,
        )
    return qwen._build_qwen35_layers(**common, hidden_dim=text.intermediate_size, **BACKENDS)


def _model(config: Any) -> Any:
    with triton(), fla():
        from torch.nn.attention.flex_attention import create_block_mask
        from torchtitan.models import qwen3_5 as qwen
        from torchtitan.models.qwen3_5 import vision_encoder
    text = config.text_config
    layers = _layers(text, qwen)
    for layer in layers:
        if layer.delta_net is not None:
            for part in (layer.delta_net.conv_q, layer.delta_net.conv_k, layer.delta_net.conv_v):
                part.kernel_size = text.linear_conv_kernel_dim
            layer.delta_net.conv_kernel_size = text.linear_conv_kernel_dim
    model: Any = eager_model(
        text,
        qwen.Qwen35Model,
        layers,
        norm=qwen._offset_norm(text.hidden_size),
        vision_encoder=_vision(config, qwen),
    )
    vision_encoder.compiled_create_block_mask = create_block_mask
    model.vision_encoder.merger.act_fn = torch.nn.GELU()
    return model


BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "qwen3_5": _model,
    "qwen3_5.tied": _model,
    "qwen3_5_moe": _model,
}


def logits(model: torch.nn.Module, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits after a strict load of *state*, of one picture after the other.

    Without offsets of documents its delta nets take a batch for one sequence.
    """
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=True)
    given = hf_models.inputs(config)
    ids, grids = given["input_ids"], given["image_grid_thw"]
    special = {"image_id": config.image_token_id, "video_id": config.video_token_id}
    merge = config.vision_config.spatial_merge_size
    found = []
    with torch.no_grad(), full_precision(), _without_meshes():
        for one, pixels, grid in zip(
            ids, given["pixel_values"].chunk(len(ids)), grids, strict=True
        ):
            positions = torch.arange(len(one))[None]
            masks = super(type(model), model).get_attention_masks(positions)  # type: ignore[misc]
            said = model(
                one[None],
                pixel_values=pixels[None],
                grid_thw=grid[None],
                positions=positions,
                mrope_positions=_positions(one == config.image_token_id, grid // merge)[None],
                attention_masks={"quadratic_attention": masks, "deltanet": None},
                special_tokens=special,
            )
            found.append(said[0])
    return torch.stack(found).float()


@contextmanager
def _without_meshes() -> Iterator[None]:
    """Let the model run without being told which ranks hold what."""
    from torchtitan.distributed import utils

    before = utils.get_spmd_backend()
    utils.set_spmd_backend("default")
    try:
        yield
    finally:
        utils.set_spmd_backend(before)


def _positions(pictured: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Return the place of each token in time, height and width, ``[tokens, 3]``.

    Text has the same in all three; behind a picture it goes on where that ends at the latest.
    """
    start, (_, rows, columns) = int(pictured.int().argmax()), grid.tolist()
    before = torch.arange(start)[:, None].expand(-1, 3)
    inside = torch.cartesian_prod(torch.zeros(1).long(), torch.arange(rows), torch.arange(columns))
    rest = len(pictured) - start - rows * columns
    after = torch.arange(rest)[:, None].expand(-1, 3) + start + max(rows, columns)
    return torch.cat([before, inside + start, after])
