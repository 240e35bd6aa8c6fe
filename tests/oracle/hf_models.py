"""transformers' models at tiny size: made, saved, loaded strictly, run.

They are built from the configurations in :mod:`tests.oracle.tiny`. The layout ``hf`` is what
``save_pretrained`` writes; ``hf-v5`` is what ``model.state_dict()`` holds in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.llama4 import modeling_llama4

from tests.oracle import speech
from tests.oracle.models import tokens
from tests.oracle.pictures import consistent_tiles, invisible_padding

if not hasattr(modeling_llama4.MoeCausalLMOutputWithPast, "image_outputs"):
    # transformers 5.24 reads it from the language model's output, which lacks it.
    modeling_llama4.MoeCausalLMOutputWithPast.image_outputs = None

for configuration in (transformers.PreTrainedConfig, transformers.GenerationConfig):
    # transformers writes each into a message that is not shown, for longer than a tiny model loads.
    configuration.__repr__ = object.__repr__

State = dict[str, torch.Tensor]
SavedModel = Callable[[str], tuple[Any, Path, torch.Tensor]]
"""The fixture ``saved_model``."""

CLASSES = {
    "llama4_text": "Llama4ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
}
ONE_CENTRED = ("linear_attn", "visual.", "vision_encoder.", "vision_tower.", "vision_model.")
"""Parts of models with zero-centred norms whose own norms multiply with the weight."""
UNCONVERTED = [
    *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
    *("model.embed_tokens", "lm_head"),
]
"""Modules of gpt-oss that are not in MXFP4, as its ``config.json`` states them."""
BOUNDS = ("put_min", "put_max")
"""What the names of the numbers end with that a layer clips to."""
INITIALIZERS = ("kaiming_uniform_", "uniform_", "normal_", "ones_", "zeros_")
"""What modules of torch call for their parameters."""
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def class_of(config: Any) -> Any:
    """Return transformers' class for *config*: by ``architectures``, else its causal model."""
    if config.model_type == "step3p5":
        from tests.oracle.step3p5 import Step3p5ForCausalLM

        return Step3p5ForCausalLM
    if config.architectures:
        return getattr(transformers, config.architectures[0])
    if config.model_type in CLASSES:
        return getattr(transformers, CLASSES[config.model_type])
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    if getattr(config, "vision_config", None) is not None:
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def random_model(config: Any, seed: int = 0) -> Any:
    """Return the fp32 model of *config* in which every saved float is random."""
    torch.manual_seed(seed)
    model = class_of(config)._from_config(config, dtype=torch.float32, **EAGER).eval()
    randomize(model, has_zero_centred_norms(config), seed)
    if config.model_type == "mllama":
        consistent_tiles(model, config.vision_config)
    for name, value in model.state_dict().items():
        if name.endswith("tid2eid"):
            value.copy_(torch.randint(config.n_routed_experts, value.shape))
    return model


def build_on_meta(config: Any, **options: Any) -> Any:
    """Return the model of *config* without data, which is not initialized either."""
    ignored: Any = dict.fromkeys(INITIALIZERS, lambda tensor, *_, **__: tensor)
    with torch.device("meta"), mock.patch.multiple(torch.nn.init, **ignored):
        return class_of(config)._from_config(config, **options)


def randomize(model: torch.nn.Module, zero_centred: bool = False, seed: int = 0) -> None:
    """Fill every float of *model*'s state dict, norms around 1 and clearly apart.

    Args:
        model: Anybody's.
        zero_centred: The norms multiply with ``1 + weight``.
        seed: Same seed, same model.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in _saved_floats(model):
            centred = zero_centred and not any(part in name for part in ONE_CENTRED)
            value.copy_(_random(name, value.shape, generator, centred))


def has_zero_centred_norms(config: Any) -> bool:
    """Return whether the norms of *config*'s model multiply with ``1 + weight``."""
    kind = str(config.model_type)
    named = kind.startswith(
        ("gemma", "qwen3_next", "qwen3_5", "qwen4", "paligemma", "minimax_m3", "step3p")
    )
    return named and not kind.startswith(("gemma3n", "gemma4"))


def _saved_floats(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of the state dict that hold floats, tied ones once."""
    seen: set[int] = set()
    found = []
    for name, value in model.state_dict().items():
        if value.is_floating_point() and value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            found.append((name, value))
    return found


def _random(
    name: str, shape: torch.Size, generator: torch.Generator, zero_centred: bool
) -> torch.Tensor:
    values: torch.Tensor = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return values * 0.5
    if name.endswith(BOUNDS):
        return torch.as_tensor((values.abs() + 1.0) * (1.0 if name.endswith("max") else -1.0))
    if name.endswith("layer_scale.gamma"):  # of 81 blocks, whose differences add up
        return values * 0.05
    if len(shape) <= 1:
        is_scale = name.endswith(("weight", "scale", "scalar")) and not zero_centred
        return torch.as_tensor(values * 0.3 + float(is_scale))
    if name.startswith("code2wav.") or "timm_model." in name:  # which enlarge differences
        return torch.as_tensor(values * (0.7 / shape[1:].numel() ** 0.5))
    return torch.as_tensor(values * (1.2 / shape[-1] ** 0.5))


def save(model: Any, folder: Path) -> Path:
    """Write the layout ``hf``: safetensors and ``config.json``."""
    model.save_pretrained(folder)
    return folder


def save_with_mxfp4_experts(model: Any, parent: Path) -> Path:
    """Write gpt-oss as OpenAI publishes it, with random experts in MXFP4, to the folder ``hf``."""
    folder = save(model, parent / "hf")
    state = {
        name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()
    }
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        generator = torch.Generator().manual_seed(len(state))
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
        scales = torch.randint(120, 124, (experts, outputs, inputs // 32), generator=generator)
        state |= {f"{name}_blocks": blocks.byte(), f"{name}_scales": scales.byte()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": UNCONVERTED},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_memory(model: Any) -> State:
    """Return the layout ``hf-v5``: what a trainer hands to ``torch.save``."""
    return {name: value.detach() for name, value in model.state_dict().items()}


def logits(model: Any) -> torch.Tensor:
    """Return what the model says to :func:`tests.oracle.models.tokens`, in fp32.

    Logits where it has a head, else the pooled or the last hidden states. Models with a vision
    tower are asked about :func:`~tests.oracle.pictures.pictures` as well.
    """
    with torch.no_grad(), invisible_padding():
        if model.config.model_type == "qwen3_omni_moe":
            return speech.answers(model.eval(), inputs(model.config))
        out = model.eval()(**inputs(model.config))
    for name in ("logits", "text_embeds", "pooler_output", "last_hidden_state"):
        if getattr(out, name, None) is not None:
            return torch.as_tensor(out[name]).float()
    raise AssertionError(f"{type(model).__name__} returns {list(out)}")


def load_strict(folder: Path, config: Any = None) -> Any:
    """Return transformers' model of *folder* in fp32.

    Args:
        folder: Holds ``config.json`` and safetensors.
        config: Says which class; default: what the folder's ``config.json`` says.

    Raises:
        AssertionError: transformers reports missing, unexpected or mismatched keys.
    """
    wanted = config if config is not None else transformers.AutoConfig.from_pretrained(folder)
    model, info = class_of(wanted).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **EAGER
    )
    problems = {kind: keys for kind, keys in info.items() if keys}
    assert not problems, problems
    if wanted.model_type == "gemma3n":  # sums of its small layers depend on the weights' addresses
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model.eval()


def inputs(config: Any) -> dict[str, Any]:
    """Return the keyword arguments of ``forward`` for the model of *config*."""
    from tests.oracle.pictures import pictures

    ids = tokens()
    if config.model_type == "clip_text_model":
        ids = ids % 126
        ids[:, -1] = config.eos_token_id
    elif "LlamaForSequenceClassification" in (config.architectures or ()):
        ids = ids % config.pad_token_id
    given: dict[str, Any] = {"input_ids": ids}
    if config.model_type == "qwen3_omni_moe":
        thinker = config.thinker_config
        return speech.thinker_inputs(thinker, pictures(thinker, ids))
    if getattr(config, "vision_config", None) is not None:
        return pictures(config, ids)
    return given
