"""GGUF files of tiny models: names of the package gguf, values as llama.cpp's converter makes them.

``convert_hf_to_gguf.py`` is no package. What it does to values is two lines of this module, which
transformers' reader of GGUF confirms: :func:`permuted`, and 1 that is added to Gemma's norms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.oracle import hf_models
from tests.oracle.hf_models import State

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
NUMBERS = {"F32": np.float32, "F16": np.float16}
NAMES = (
    *("llama2", "llama3", "llama3_2", "falcon3", "mistral", "mixtral", "qwen2", "qwen2.tied"),
    *("qwen3", "qwen3.tied", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
)
UNREAD = ("mistral", "mixtral", "gemma")
"""Of these transformers reads no GGUF files."""


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of queries or keys as llama.cpp has them (``LlamaModel.permute``)."""
    parts = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def tensors(model: Any, folder: Path) -> State:
    """Return transformers' *model* under GGUF's names, fp32."""
    import gguf

    config = model.config
    arch = ARCHITECTURES[config.model_type]
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[arch], config.num_hidden_layers)
    found: State = {}
    for key, value in stacked(saved(folder)).items():
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name, key
        array = value.float().numpy()
        if arch == "llama" and "attn_q." in name:
            array = permuted(array, config.num_attention_heads)
        elif arch == "llama" and "attn_k." in name:
            array = permuted(array, config.num_key_value_heads)
        elif arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        found[name] = torch.from_numpy(np.ascontiguousarray(array))
    return found


def saved(folder: Path) -> State:
    """Return the tensors of a folder of safetensors."""
    from safetensors.torch import load_file

    state: State = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    return state


def stacked(state: State) -> State:
    """Return *state* with the experts of a layer as one tensor."""
    found: State = {}
    lists: dict[str, dict[int, torch.Tensor]] = {}
    for key, value in state.items():
        before, _, after = key.partition(".experts.")
        number, _, rest = after.partition(".")
        if number.isdigit():
            lists.setdefault(f"{before}.experts.{rest}", {})[int(number)] = value
        else:
            found[key] = value
    return found | {
        key: torch.stack([parts[n] for n in sorted(parts)]) for key, parts in lists.items()
    }


def write(path: Path, model: Any, state: State, kind: str = "F32") -> Path:
    """Write a GGUF file with the package's writer.

    Norms, biases and rows that are no whole blocks stay fp32.
    """
    import gguf

    config = model.config
    number = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type])
    describe(writer, config)
    for name, value in state.items():
        array = value.numpy()
        whole = value.shape[-1] % gguf.GGML_QUANT_SIZES[number][0] == 0
        if value.ndim > 1 and whole and kind not in NUMBERS:
            writer.add_tensor(name, gguf.quantize(array, number), raw_dtype=number)
        else:
            plain = NUMBERS.get(kind, np.float32) if value.ndim > 1 else np.float32
            writer.add_tensor(name, array.astype(plain))
    if getattr(config, "rope_parameters", {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama3_factors(config: Any) -> np.ndarray:
    """Return what transformers divides the rotary frequencies of Llama 3.1 by."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    dim = config.head_dim
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    factors: np.ndarray = (plain / scaled).numpy()
    return factors


def describe(writer: Any, config: Any) -> None:
    """Write the metadata of a model."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_name("tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("qwen3_moe", "mixtral"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def logits(path: Path, config: Any) -> torch.Tensor:
    """Return what transformers computes of the tensors in the file itself.

    *config* is the model's: transformers does not read all of the metadata.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=config, dtype=torch.float32, **hf_models.EAGER
    )
    return hf_models.logits(model)
