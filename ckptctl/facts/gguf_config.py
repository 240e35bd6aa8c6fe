"""Build config.json from the metadata of a GGUF file.

Facts that llama.cpp hard-codes instead of storing them in the metadata are added: how Gemma scales
attention scores, and that Qwen 3's router normalizes the weights of the selected experts.

Sources: ``gguf/constants.py`` (0.19) for the keys; llama.cpp's ``llama-model.cpp`` and
``convert_hf_to_gguf.py``; transformers' ``integrations/ggml.py`` (5.23).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckptctl.catalog import TensorEntry
from ckptctl.facts.rope import read_gguf_rope
from ckptctl.numerics.quantization.ggml import BLOCK_TYPES
from ckptctl.planner.families.facts import FACTS, Fact, get_facts

ROPE_FACTORS = "rope_freqs.weight"
"""Name of the GGUF tensor that contains divisors of the rotary frequencies."""
MAX_FLOAT32 = 3.4e38
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """Description of a llama.cpp architecture in the terms of transformers.

    Attributes:
        model_type: ``model_type`` in config.json.
        class_name: transformers' class of the model with a language-model head.
        constant_keys: Keys and values that config.json always contains.
        facts: Facts in the GGUF metadata in addition to :data:`COMMON_FACTS`.
        special_layer_count: Number of layers of the model size whose attention scores are divided
            by the root of ``hidden_size / heads`` instead of the head dimension; 0 if config.json
            has no such key.
        needs_head_dim: Whether transformers' default head dimension is not ``hidden_size / heads``.
    """

    model_type: str
    class_name: str
    constant_keys: Mapping[str, object] = field(default_factory=dict)
    facts: tuple[Fact, ...] = ()
    special_layer_count: int = 0
    needs_head_dim: bool = False


COMMON_FACTS = get_facts(
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"),
    *("rope_theta", "vocab_size"),
)
TOKEN_FACTS = get_facts("bos_token_id", "eos_token_id", "pad_token_id")
SOFTCAP_FACTS = get_facts("attn_logit_softcapping", "final_logit_softcapping")
WINDOW_FACTS = get_facts("sliding_window")
SIZE_KEYS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps"),
)
"""Keys of config.json with sizes that determine the tensor shapes or the computation."""
OPTIONAL_KEYS = frozenset(
    {
        *("num_key_value_heads", "head_dim", "rope_theta", "vocab_size"),
        *(fact.config for fact in (*SOFTCAP_FACTS, *TOKEN_FACTS)),
    }
)
"""Facts that metadata may omit, because llama.cpp assumes a default or counts them."""
EMBEDDING_NAME = "token_embd.weight"
GEMMA_ACTIVATIONS = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM", {"hidden_act": "silu"}),
    "llama.experts": GgufArchitecture(
        "mixtral",
        "MixtralForCausalLM",
        {"hidden_act": "silu"},
        get_facts("num_experts_per_tok", "num_local_experts"),
    ),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM", {"hidden_act": "silu"}),
    "qwen3": GgufArchitecture(
        "qwen3", "Qwen3ForCausalLM", {"hidden_act": "silu"}, needs_head_dim=True
    ),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {"hidden_act": "silu", "norm_topk_prob": True, "decoder_sparse_step": 1},
        get_facts("num_experts_per_tok", "num_experts", "moe_intermediate_size"),
        needs_head_dim=True,
    ),
    "gemma": GgufArchitecture("gemma", "GemmaForCausalLM", GEMMA_ACTIVATIONS, needs_head_dim=True),
    "gemma2": GgufArchitecture(
        "gemma2",
        "Gemma2ForCausalLM",
        GEMMA_ACTIVATIONS,
        WINDOW_FACTS + SOFTCAP_FACTS,
        46,
        needs_head_dim=True,
    ),
    "gemma3": GgufArchitecture(
        "gemma3_text", "Gemma3ForCausalLM", GEMMA_ACTIVATIONS, WINDOW_FACTS, 62, needs_head_dim=True
    ),
}


def build_config_from_gguf(
    metadata: Mapping[str, object],
    array_lengths: Mapping[str, int],
    tensors: Mapping[str, TensorEntry],
    rope_factors: Sequence[float] | None,
) -> tuple[Json | None, tuple[str, ...]]:
    """Build config.json from the metadata of a GGUF file, with notes on the conversion.

    Args:
        metadata: Values by key, including short arrays of numbers.
        array_lengths: Lengths of all other arrays, by key.
        tensors: Tensors of the file, or of all files of the checkpoint.
        rope_factors: The elements of :data:`ROPE_FACTORS`, or None if that tensor is missing.

    Returns:
        The config and notes; the config is None if the architecture or a value is unsupported.
    """

    def without_config(why: str) -> tuple[None, tuple[str]]:
        return None, (f"{why}; config.json is not written",)

    name = str(metadata.get("general.architecture", ""))
    has_experts = metadata.get(f"{name}.expert_count")
    architecture = (
        ARCHITECTURES.get(f"{name}.experts") if has_experts else None
    )  # Mixtral is "llama"
    architecture = architecture or ARCHITECTURES.get(name)
    if architecture is None:
        return without_config(f"GGUF architecture `{name}` is not supported")
    values = {
        key.removeprefix(f"{name}."): _shorten_float(value) for key, value in metadata.items()
    }
    facts = (*COMMON_FACTS, *architecture.facts, *TOKEN_FACTS)
    config: Json = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        **architecture.constant_keys,
        **{fact.config: values[fact.gguf] for fact in facts if fact.gguf in values},
        "tie_word_embeddings": not _has_tensor(tensors, "output.weight"),
        "torch_dtype": _find_main_dtype(tensors),
    }
    if "vocab_size" not in config and "tokenizer.ggml.tokens" in array_lengths:
        config["vocab_size"] = array_lengths["tokenizer.ggml.tokens"]
    names = [fact.config for fact in facts]
    missing = [name for name in names if name not in config and name not in OPTIONAL_KEYS]
    if missing:
        return without_config(f"the GGUF file does not state `{missing[0]}`")
    config = {**_assume_values(config, architecture, tensors), **config}
    if architecture.special_layer_count:
        config["query_pre_attn_scalar"] = _compute_score_divisor(
            config, architecture.special_layer_count
        )
    invalid = [name for name in names if name in config and not _is_number(config[name])]
    if invalid:
        value = config[invalid[0]]
        why = "differs from layer to layer" if isinstance(value, list) else f"is {value!r}"
        return without_config(f"`{invalid[0]}` {why} in the GGUF file")
    scaling = read_gguf_rope(config, values, rope_factors)
    if scaling is None:
        return without_config("the scaling of rotary frequencies in the GGUF file is not supported")
    rope_fields = {"rope_scaling": scaling} if scaling else {}
    return {**config, **rope_fields}, ("config.json is generated from the GGUF metadata",)


def _assume_values(
    config: Json, architecture: GgufArchitecture, tensors: Mapping[str, TensorEntry]
) -> Json:
    """Return llama.cpp's defaults for values that metadata omits.

    transformers may have other defaults, so config.json must contain the values.
    """
    heads, size = config["num_attention_heads"], config["hidden_size"]
    assumed: Json = {"num_key_value_heads": heads, "rope_theta": FACTS["rope_theta"].default}
    if architecture.needs_head_dim and isinstance(size, int) and isinstance(heads, int) and heads:
        assumed["head_dim"] = size // heads
    rows = {entry.shape[0] for name, entry in tensors.items() if name.startswith(EMBEDDING_NAME)}
    if len(rows) == 1:
        assumed["vocab_size"] = rows.pop()
    return assumed


def select_sizes(config: Mapping[str, object]) -> Json:
    """Select only the sizes from a config.json built by :func:`build_config_from_gguf`."""
    return {word: config[word] for word in SIZE_KEYS if word in config}


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value)


def _shorten_float(value: object) -> object:
    """Shorten a float to the fewest digits that give the same float32.

    For example, 9.999999974752427e-07 becomes 1e-06. Other values are returned unchanged.
    """
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    digits = (float(f"{value:.{digit_count}g}") for digit_count in range(1, 10))
    return next(
        (candidate for candidate in digits if _pack_float(candidate) == _pack_float(value)), value
    )


def _pack_float(value: float) -> bytes:
    return struct.pack("<f", value) if abs(value) < MAX_FLOAT32 else struct.pack("<d", value)


def _has_tensor(tensors: Collection[str], name: str) -> bool:
    """Return whether *tensors* contain the tensor *name*, quantized or unquantized."""
    return name in tensors or any(
        f"{name}.{block.name}" in tensors for block in BLOCK_TYPES.values()
    )


def _find_main_dtype(tensors: Mapping[str, TensorEntry]) -> str:
    """Return the dtype with the most bytes, where quantized tensors count as bfloat16."""
    sizes: dict[str, int] = {}
    for entry in tensors.values():
        dtype = "bfloat16" if entry.dtype == "uint8" else entry.dtype
        sizes[dtype] = sizes.get(dtype, 0) + entry.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="bfloat16")


def _compute_score_divisor(config: Json, layers: int) -> object:
    """Return the number by whose square root Gemma divides attention scores.

    *layers* is the number of layers of the model size that does not use the head dimension.
    """
    size, heads = config.get("hidden_size"), config.get("num_attention_heads")
    is_special_size = config.get("num_hidden_layers") == layers
    if is_special_size and isinstance(size, int) and isinstance(heads, int) and heads:
        return size // heads
    return config.get("head_dim", 256)
