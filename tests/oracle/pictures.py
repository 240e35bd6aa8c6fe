"""Pictures for tiny multimodal models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


def consistent_tiles(model: torch.nn.Module, vision: Any) -> None:
    """Derive mllama's embeddings of tiles from one table of places, as the real ones were.

    transformers keeps a row for each aspect ratio, Meta one for each place in a grid, which
    several ratios share.
    """
    tiles, ratios = vision.max_num_tiles, vision.supported_aspect_ratios
    with torch.no_grad():
        for name, rows in model.named_parameters():
            if "tile" not in name or not name.endswith("embedding.weight"):
                continue
            places = _noise(tiles, tiles, rows.shape[1] // tiles) * rows.std()
            rows.zero_()
            for index, (height, width) in enumerate(ratios, start=1):
                used = places[:height, :width].flatten()
                rows[index, : len(used)] = used


@contextmanager
def invisible_padding() -> Iterator[None]:
    """Let no token of mllama's vision tower see those that pad a tile to eight tokens.

    Meta and transformers mask them only against each other; torchtune has none.
    """
    from transformers.models.mllama import modeling_mllama

    name = "_prepare_aspect_ratio_attention_mask"
    original = getattr(modeling_mllama, name)

    def masked(*args: Any, **kwargs: Any) -> torch.Tensor:
        mask: torch.Tensor = original(*args, **kwargs).clone()
        length = kwargs["target_length"]
        columns = torch.arange(mask.shape[-1]) % length >= kwargs["num_patches"]
        mask[..., columns] = torch.finfo(mask.dtype).min
        return mask

    with mock.patch.object(modeling_mllama, name, masked):
        yield


def pictures(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Return the inputs of ``forward``: two sequences of text with one random picture each.

    Args:
        config: Of a model with a vision tower.
        ids: Tokens of text, ``[2, length]``; some of them become tokens of the picture.
    """
    return _BUILDERS[config.model_type](config, ids.clone())


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(11))


def _with_image_tokens(config: Any, ids: torch.Tensor, count: int, at: int = 2) -> torch.Tensor:
    ids[:, at : at + count] = getattr(config, "image_token_id", None) or config.image_token_index
    return ids


def _mllama(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    side = config.vision_config.image_size
    ids[:, 2] = config.image_token_index
    return {
        "input_ids": ids,
        "pixel_values": _noise(2, 1, 4, 3, side, side),
        "aspect_ratio_ids": torch.tensor([[4], [6]]),  # 1 x 4 and 2 x 2 tiles
        "aspect_ratio_mask": torch.ones(2, 1, 4, dtype=torch.long),
        "cross_attention_mask": torch.ones(2, ids.shape[1], 1, 4, dtype=torch.long),
    }


def _llama4(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    vision = config.vision_config
    side = vision.image_size
    count = int((side // vision.patch_size) ** 2 * vision.pixel_shuffle_ratio**2)
    return {
        "input_ids": _with_image_tokens(config, ids, count),
        "pixel_values": _noise(2, 3, side, side),
    }


def _gemma3(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    side = config.vision_config.image_size
    ids = _with_image_tokens(config, ids, config.mm_tokens_per_image)
    return {
        "input_ids": ids,
        "pixel_values": _noise(2, 3, side, side),
        "token_type_ids": (ids == config.image_token_id).long(),
    }


def _pixtral(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    vision = config.vision_config
    merge = getattr(config, "spatial_merge_size", 1)
    height, width = 2 * vision.patch_size * merge, 3 * vision.patch_size * merge
    return {
        "input_ids": _with_image_tokens(config, ids, 6),
        "pixel_values": _noise(2, 3, height, width),
        "image_sizes": torch.tensor([[height, width]] * 2),
    }


def _squares(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Return square pictures of 4 x 4 patches, which some models merge by four."""
    kind, side = config.model_type, 16
    merge = {"internvl": 2, "idefics3": 2, "smolvlm": 2}.get(kind, 1)
    count = 16 // merge**2
    shape: tuple[int, ...] = (3, side, side)
    found: dict[str, Any] = {}
    if kind in ("idefics3", "smolvlm"):
        shape = (1, *shape)
    if kind in ("llava_next", "llava_onevision"):  # one tile, in rows of five, after the picture
        count, shape = count + 4 * 5, (2, *shape)
        found["image_sizes"] = torch.tensor([[side, side]] * 2)
    if kind == "paligemma":  # all tokens of a prompt see each other, the first are the picture's
        found["token_type_ids"] = torch.zeros_like(ids)
    ids = _with_image_tokens(config, ids, count, at=0 if kind == "paligemma" else 2)
    return {"input_ids": ids, "pixel_values": _noise(2, *shape), **found}


def _llava(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    has_pixtral = config.vision_config.model_type == "pixtral"
    return (_pixtral if has_pixtral else _squares)(config, ids)


def _in_patches(
    config: Any, ids: torch.Tensor, grid: tuple[int, int], *patch: int
) -> dict[str, Any]:
    """Return two pictures of *grid* patches by rows and columns, four to a token."""
    rows, columns = grid
    return {
        "input_ids": _with_image_tokens(config, ids, rows * columns // 4),
        "pixel_values": _noise(2 * rows * columns, *patch),
        "image_grid_thw": torch.tensor([[1, rows, columns]] * 2),
    }


def _kimi(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    side = config.vision_config.patch_size
    return _in_patches(config, ids, (4, 6), 3, side, side)


def _muse(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Square pictures: of others torchtitan 0.3.0 takes the positions by columns."""
    vision = config.vision_config
    return _in_patches(config, ids, (6, 6), vision.patch_temporal * 3 * vision.patch_size**2)


def _inkling(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Return two pictures of one patch each, which is a token, and two frames of sound."""
    vision, audio = config.vision_config, config.audio_config
    ids[:, 20:22] = config.audio_token_id
    shape = (vision.temporal_patch_size, vision.patch_size, vision.patch_size, 3)
    return {
        "input_ids": _with_image_tokens(config, ids, 1),
        "pixel_values": _noise(2, *shape),
        "audio_input_ids": torch.arange(4 * audio.n_mel_bins).reshape(4, -1) % audio.mel_vocab_size,
    }


def _qwen(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Two pictures of 4 x 6 patches, of which each four are merged into a token.

    The token that announces a picture is where mlx-vlm looks for one.
    """
    vision = config.vision_config
    across = 2 if config.model_type.startswith("glm") else 3  # mlx-vlm interpolates otherwise
    rows, columns = 2 * vision.spatial_merge_size, across * vision.spatial_merge_size
    channels = getattr(vision, "in_channels", 3)
    size = channels * vision.temporal_patch_size * vision.patch_size**2
    ids = _with_image_tokens(config, ids, 2 * across, at=3)
    starts = ("vision_start_token_id", "image_start_token_id")
    ids[:, 2] = next(getattr(config, name) for name in starts if hasattr(config, name))
    return {
        "input_ids": ids,
        "pixel_values": _noise(2 * rows * columns, size),
        "image_grid_thw": torch.tensor([[1, rows, columns]] * 2),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }


def _gemma4(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Patches of 4 rows and 6 columns; 16 frames of sound where the model hears."""
    vision, audio = config.vision_config, config.audio_config
    across, down = torch.meshgrid(torch.arange(6), torch.arange(4), indexing="xy")
    places = torch.stack([across.flatten(), down.flatten()], -1).expand(2, -1, -1)
    merge = vision.pooling_kernel_size
    given = {
        "input_ids": _with_image_tokens(config, ids, 24 // merge**2),
        "pixel_values": _noise(2, 24, 3 * vision.patch_size**2),
        "image_position_ids": places,
    }
    if audio is not None:
        ids[:, 20:24] = config.audio_token_id
        given["input_features"] = _noise(2, 16, audio.subsampling_conv_channels[0])
        given["input_features_mask"] = torch.ones(2, 16, dtype=torch.bool)
    return given | {"mm_token_type_ids": (ids == config.image_token_id).long()}


def _gemma4_unified(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Six large patches in two rows, four frames of sound."""
    across, down = torch.meshgrid(torch.arange(3), torch.arange(2), indexing="xy")
    ids[:, 20:24] = config.audio_token_id
    return {
        "input_ids": _with_image_tokens(config, ids, 6),
        "pixel_values": _noise(2, 6, 3 * config.vision_config.model_patch_size**2),
        "image_position_ids": torch.stack([across.flatten(), down.flatten()], -1).expand(2, -1, -1),
        "input_features": _noise(2, 4, config.audio_config.audio_embed_dim),
        "input_features_mask": torch.ones(2, 4, dtype=torch.bool),
        "mm_token_type_ids": (ids == config.image_token_id).long(),
    }


def _gemma3n(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Two pictures of four tokens, 32 frames of sound, and other tokens of both vocabularies.

    Models with keys in all layers are for mlx-vlm, and get no pictures: small differences of its
    vision tower from timm's become large ones in the 84 blocks. ``test_gemma3n.py`` compares it.
    """
    ids[:, 10], ids[:, 12] = config.image_token_id + 1, config.audio_token_id + 1
    ids[:, 20 : 20 + config.audio_soft_tokens_per_image] = config.audio_token_id
    given = {
        "input_ids": ids,
        "input_features": _noise(2, 32, config.audio_config.input_feat_size),
        "input_features_mask": torch.ones(2, 32, dtype=torch.bool),
    }
    if config.text_config.num_kv_shared_layers:
        _with_image_tokens(config, ids, config.vision_soft_tokens_per_image)
        given["pixel_values"] = _noise(2, 3, 64, 64)
    return given


def _ernie(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Two pictures of 4 x 6 patches, of which each four are merged into a token.

    The token that announces a picture is where mlx-vlm looks for one.
    """
    vision = config.vision_config
    ids[:, 1] = config.image_start_token_id
    given = _in_patches(config, ids, (4, 6), vision.in_channels * vision.patch_size**2)
    kinds = (given["input_ids"] == config.image_token_id).int()
    return given | {"mm_token_type_ids": kinds, "moe_mm_token_type_ids": kinds}


def _minimax(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Two pictures of 4 x 6 patches, of which each four are merged into a token."""
    vision = config.vision_config
    return _in_patches(config, ids, (4, 6), 3 * vision.temporal_patch_size * vision.patch_size**2)


def _step(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Square pictures, whose patches two convolutions merge, by four in each direction."""
    vision = config.vision_config
    count = (vision.image_size // vision.patch_size // 4) ** 2
    return {
        "input_ids": _with_image_tokens(config, ids, count),
        "pixel_values": _noise(2, 3, vision.image_size, vision.image_size),
    }


_BUILDERS = {
    "ernie4_5_vl_moe": _ernie,
    "mllama": _mllama,
    "llama4": _llama4,
    "gemma3": _gemma3,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4_unified,
    "mistral3": _pixtral,
    "mistral_large4": _pixtral,
    "llava": _llava,
    "llava_next": _squares,
    "llava_onevision": _squares,
    "paligemma": _squares,
    "internvl": _squares,
    "idefics3": _squares,
    "smolvlm": _squares,
    "kimi_k25": _kimi,
    "inkling_mm_model": _inkling,
    "muse_glimmer": _muse,
    "muse_spark": _muse,
    "minimax_m3_vl": _minimax,
    "step3p7": _step,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen4_exp": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "qwen3_omni_moe_thinker": _qwen,
    "glm4v": _qwen,
    "glm4v_moe": _qwen,
    "glm5_next": _qwen,
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
}
