"""mlx-vlm 0.7.10 on MLX's CPU backend: models with their towers, in fp32, uncompiled.

It is given config.json as published models have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch

from tests.oracle import hf_models, speech
from tests.oracle.hf_models import State
from tests.oracle.peers import mlx
from tests.oracle.tiny import mobilenet

REQUIRES: tuple[str, ...] = ("mlx", "mlx_vlm")
LAYOUT = "mlx"


GIVEN = (
    *("image_grid_thw", "image_position_ids", "image_sizes"),
    *("input_features", "input_features_mask"),
)
"""What is passed on as transformers is given it."""

PUBLISHED = {"indexed_attention": "full_attention"}
"""Kinds of layers that transformers renames when it reads published models."""

ONE_PICTURE = ("glm4v", "glm4v_moe", "internvl", "llava", "paligemma")
"""Models that mlx-vlm gives all pictures of a batch to each of its sequences."""


def spelled(config: Any) -> dict[str, Any]:
    """Return config.json of transformers' *config* as published models have it."""
    found = mlx.spelled_as_before(config) | not_stated(config)
    if config.model_type == "qwen3_omni_moe":
        for name in ("thinker_config", "talker_config"):
            text = found[name]["text_config"]
            sections = getattr(config, name).text_config.rope_parameters["mrope_section"]
            text["rope_scaling"] = {"type": "default", "mrope_section": sections}
        return found
    if config.model_type == "ernie4_5_vl_moe":
        return _ernie(found)
    if config.model_type.startswith("qwen"):
        text, vision = found["text_config"], found["vision_config"]
        vision["model_type"] = vision["model_type"].removesuffix("_vision")
        sections = config.text_config.rope_parameters["mrope_section"]
        text["rope_scaling"] = {"type": "default", "mrope_section": sections}
    if config.model_type in ("qwen2_vl", "qwen2_5_vl"):
        return {**found, **text, "model_type": found["model_type"]}
    return found


def _ernie(found: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of ERNIE 4.5 VL, with one level for all but the tower."""
    text: dict[str, Any] = found.pop("text_config")
    vision = found["vision_config"]
    sparse = [i for i, kind in enumerate(text["mlp_layer_types"]) if kind == "sparse"]
    vision["embed_dim"] = vision["hidden_size"]
    vision["mlp_ratio"] = vision["intermediate_size"] / vision["hidden_size"]
    stated = {
        "model_type": "ernie4_5_moe_vl",
        "moe_num_experts": [text["moe_num_experts"]] * 2,
        "moe_layer_start_index": [sparse[0]] * 2,
        "moe_layer_end_index": [sparse[-1]] * 2,
        "pixel_hidden_size": vision["hidden_size"],
        "im_patch_id": found["image_token_id"],
    }
    config: dict[str, Any] = text | found | stated
    return config


def not_stated(config: Any) -> dict[str, Any]:
    """Return what published models do not state and mlx-vlm takes a default for."""
    nothing = {"pad_token_id": -1}  # whose embeddings it takes for zero
    if config.model_type == "paligemma":
        return nothing
    if config.model_type == "deepseek_v4":
        rates = [config.compress_rates.get(kind, 0) for kind in config.layer_types]
        return {
            "compress_ratios": rates,
            "num_hash_layers": config.mlp_layer_types.count("hash_moe"),
        }
    if config.model_type == "step3p7":
        found = mlx.spelled_as_before(config)
        return {name: found[name] for name in config.sub_configs}
    if config.model_type.startswith("glm4v"):
        sections = config.text_config.rope_parameters["mrope_section"]
        scaling = {"type": "default", "mrope_section": sections}
        stated = {"use_qk_norm": False, "rope_scaling": scaling}
        text = mlx.spelled_as_before(config)["text_config"] | stated
        return {"vision_start_token_id": config.image_start_token_id, "text_config": text}
    if config.model_type in ("glm5_next", "qwen4_exp"):
        kinds = [PUBLISHED.get(kind, kind) for kind in config.text_config.layer_types]
        text = mlx.spelled_as_before(config)["text_config"] | {"layer_types": kinds}
        return {"text_config": text}
    if config.model_type != "gemma3":
        return {}
    stated = {"mm_tokens_per_image": config.mm_tokens_per_image}
    text = mlx.spelled_as_before(config)["text_config"] | stated
    text["rope_global_base_freq"] = text["rope_theta"]
    sizes = {name: text[name] for name in ("hidden_size", "vocab_size")}
    return {**sizes, **nothing, "text_config": text}


def built(config: Any) -> Any:
    """Return mlx-vlm's model of transformers' *config*, its weights whatever they are."""
    import mlx.core as mx
    from mlx_vlm import utils

    mx.disable_compile()
    mx.set_default_device(mx.cpu)
    wanted = spelled(config)
    kind, _ = utils.get_model_and_args(config=wanted, model_path=None)
    told = kind.ModelConfig.from_dict(wanted)
    told = utils.update_module_configs(told, kind, wanted, ["text", "vision", "audio"])
    with _small_mobilenet() if config.model_type == "gemma3n" else nullcontext():
        return with_its_gelus(kind.Model(told), config)


@contextmanager
def _small_mobilenet() -> Iterator[None]:
    """Let Gemma 3n be built with the blocks of :mod:`tests.oracle.tiny.mobilenet`, as in timm.

    mlx-vlm pads convolutions of keys and values otherwise, and takes the exact GELU.
    """
    import mlx.nn as nn
    from mlx_vlm.models.gemma3n import vision

    adapter, attention = vision.MobileNetV5MultiScaleFusionAdapter, vision.MultiQueryAttention2d

    def block(text: str) -> Any:
        numbers = {part[0]: float(part[1:]) for part in text.split("_")[1:]}
        whole = {name: int(value) for name, value in numbers.items()}
        if text.startswith("er"):
            return vision._er(whole["k"], whole["c"], whole["s"], numbers["e"])
        if text.startswith("mqa"):
            return vision._mmqa(whole["h"], whole["d"], whole.get("v", 1))
        return vision._uir(whole["a"], whole["k"], whole["c"], whole["s"], numbers["e"])

    def padded_attention(*dims: Any, **given: Any) -> Any:
        found = attention(*dims, **given)
        for part in (found.key, found.value):
            if "down_conv" in part:
                reduce = part.down_conv
                reduce.kernel_size, reduce.dilation = reduce.weight.shape[1:3], (1, 1)
                reduce.__class__, reduce.padding = vision.Conv2dSame, (0, 0)
        return found

    stages = [[block(text) for text in stage] for stage in mobilenet.STAGES]
    channels = [stage[-1].filters for stage in stages[-2:]]
    size = {"out_chs": mobilenet.FEATURES, "output_resolution": (mobilenet.SIDE,) * 2}
    with (
        mock.patch.object(vision, "gemma3n_mobilenet_def", lambda: stages),
        mock.patch.object(
            vision,
            "MobileNetV5MultiScaleFusionAdapter",
            lambda **given: adapter(**given | size | {"in_chs": channels}),
        ),
        mock.patch.object(vision, "MultiQueryAttention2d", padded_attention),
        mock.patch.object(nn, "GELU", partial(nn.GELU, approx="tanh")),
    ):
        yield


def with_its_gelus(model: Any, config: Any) -> Any:
    """Return *model*, each GELU of its tower with a tanh where transformers' has one."""
    import mlx.nn as nn

    model.eval()
    if config.model_type == "gemma3n":  # some epsilons are larger than timm's
        for module in model.vision_tower.modules():
            if type(module).__name__ == "RMSNormAct2d":
                module.eps = 1e-6
    if config.model_type == "qwen3_omni_moe":
        for block in model.thinker.vision_tower.blocks:
            block.mlp.act_fn = nn.GELU(approx="tanh")
        if model.has_talker:
            _trim_both_ends(model.code2wav)
    if config.model_type == "qwen3_vl_moe":  # mlx-vlm has it the other way round
        tower = model.vision_tower
        for block in tower.blocks:
            block.mlp.act_fn = nn.GELU(approx="tanh")
        for merger in (tower.merger, *tower.deepstack_merger_list):
            merger.act_fn = nn.GELU()
    return model


def _trim_both_ends(decoder: Any) -> None:
    """Trim what transposed convolutions compute at both ends, as transformers 5.24 does."""
    for module in decoder.modules():
        if hasattr(module, "right_pad"):
            module.left_pad = module.right_pad


def build(config: Any) -> torch.nn.Module:
    """Return the parameters of mlx-vlm's model of transformers' *config*."""
    model = mlx.Model(built(config), tied=False)
    state = model.state_dict()
    if getattr(config, "tie_word_embeddings", False) and "language_model.lm_head.weight" in state:
        state["language_model.lm_head.weight"] = state["language_model.model.embed_tokens.weight"]
    return model


NAMES = (
    *("internvl.qwen3", "llava", "llava_onevision"),
    *("paligemma", "paligemma.gemma2"),
    *(
        "idefics3",
        "glm4v",
        "glm4v_moe",
        "glm5_next",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_vl.tied",
        "qwen3_vl_moe",
        "qwen3_omni_moe",
        "qwen3_omni_moe.thinker",
    ),
    *("qwen3_5", "qwen3_5.tied", "qwen3_5_moe", "qwen4_exp", "gemma3"),
    *("gemma3n.unshared", "gemma4.large", "gemma4.bins", "mistral3", "ministral3_vision"),
    *("minimax_m3_vl.alike", "step3p7", "ernie4_5_vl_moe"),
    "deepseek_v4.published",
)
BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = dict.fromkeys(NAMES, build)


def logits(model: Any, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits of text and pictures after a strict load of *state*."""
    run = built(config)
    run.load_weights([(name, mlx._mlx(value)) for name, value in state.items()], strict=True)
    return answers(run, config)


def answers(run: Any, config: Any) -> torch.Tensor:
    """Return what a model of mlx-vlm says to the pictures that transformers is asked about."""
    import mlx.core as mx

    given = hf_models.inputs(config)
    ids, pixels = given.pop("input_ids"), given.pop("pixel_values", None)
    more = {name: mx.array(value.numpy()) for name, value in given.items() if name in GIVEN}
    if config.model_type == "gemma3":
        return _gemma3(run, ids, pixels)
    if config.model_type == "gemma3n":
        _scale_embeddings(run)
        return mlx._torch(run(mx.array(ids.numpy()), None, mask=None, **more).logits)
    if config.model_type == "qwen3_omni_moe":
        return _spoken(run, ids, pixels, given)
    if config.model_type == "deepseek_v4":  # it masks compressed tokens only with a cache
        return mlx._torch(run(mx.array(ids.numpy()), cache=run.make_cache()).logits)
    if config.model_type in ONE_PICTURE:
        each = zip(ids.split(1), pixels.chunk(len(ids)), strict=True)
        mask = mx.ones((1, ids.shape[1])) if config.model_type == "paligemma" else None
        more = {name: value[:1] for name, value in more.items()}  # pictures have one size
        calls = (run(mx.array(i.numpy()), mlx._mlx(p), mask=mask, **more) for i, p in each)
        return torch.cat([mlx._torch(call.logits) for call in calls])
    return mlx._torch(run(mx.array(ids.numpy()), mlx._mlx(pixels), mask=None, **more).logits)


def _gemma3(run: Any, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """Return the logits, every token seeing those before it, and those of its own picture.

    mlx-vlm lets all tokens of a prompt with a picture see each other, in windows or not.
    """
    import mlx.core as mx
    from mlx_vlm.models.gemma3 import language

    pictured = mx.array((ids[0] == run.config.image_token_index).numpy())

    def masked(h: Any, cache: Any, window_size: int | None = None) -> Any:
        before = create(h, None, window_size, return_array=True)
        return before | (pictured[:, None] & pictured[None])

    tokens = mx.array(ids.numpy())
    seen = run.get_input_embeddings(tokens, mlx._mlx(pixels), mx.ones(ids.shape, dtype=mx.int32))
    create = language.create_attention_mask
    with mock.patch.object(language, "create_attention_mask", masked):
        return mlx._torch(run.language_model(tokens, seen.inputs_embeds).logits)


def _scale_embeddings(run: Any) -> None:
    """Scale the embeddings of Gemma 3n's text, which mlx-vlm does only without sound."""
    embed = run.language_model.model.embed_tokens

    class Scaled:
        as_linear = embed.as_linear

        def __call__(self, ids: Any) -> Any:
            return embed(ids) * run.config.text_config.hidden_size**0.5

    run.language_model.model.embed_tokens = Scaled()


def _spoken(run: Any, ids: torch.Tensor, pixels: torch.Tensor, given: Any) -> torch.Tensor:
    """Return what :func:`tests.oracle.speech.answers` returns."""
    import mlx.core as mx

    def array(value: torch.Tensor) -> Any:
        return mx.array(value.numpy())

    names = ("image_grid_thw", "input_features", "feature_attention_mask")
    more = {name: array(given[name]) for name in names}
    parts = [run.thinker(array(ids), array(pixels), mask=None, **more).logits]
    if run.has_talker:
        talker, predictor = run.talker, run.talker.code_predictor
        text, hidden, codes = map(array, speech.talker_inputs(talker.config))
        embeds = talker.text_projection(text) + talker.hidden_projection(hidden)
        parts.append(talker(inputs_embeds=embeds + talker.model.codec_embedding(codes))[0])
        for step, asked in enumerate(speech.predictor_inputs(predictor.config)):
            states, codes = map(array, asked)
            embeds = states + predictor.model.codec_embedding[step](codes)
            parts.append(predictor(inputs_embeds=embeds)[0])
        with mock.patch.object(mx, "clip", lambda values, *limits: values):
            sound = run.code2wav(array(speech.decoder_inputs(run.code2wav.config)))
        parts.append(sound)
    return speech.joined([mlx._torch(part) for part in parts])
