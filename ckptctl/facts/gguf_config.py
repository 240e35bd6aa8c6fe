"""Build config.json from the metadata of a GGUF file.

Facts that llama.cpp has in its code instead of the metadata are here too: how Gemma scales
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
from ckptctl.facts.rope import rope_of_gguf
from ckptctl.numerics.quantization.ggml import BLOCKS
from ckptctl.planner.families.facts import FACTS, Fact, get_facts

FACTORS = "rope_freqs.weight"
"""The tensor of divisors of the rotary frequencies."""
LARGEST = 3.4e38
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A llama.cpp architecture in transformers' terms.

    Attributes:
        model_type: ``model_type`` in config.json.
        class_name: Class of the model with a head.
        always: Keys that its config.json always has.
        facts: Facts in its metadata in addition to :data:`KEYS`.
        scores: Number of layers of the model size whose attention scores are divided by the root
            of ``hidden_size / heads`` instead of the head dimension; 0 if config.json has no such
            key.
        head_dim: Whether transformers' default head dimension is not ``hidden_size / heads``.
    """

    model_type: str
    class_name: str
    always: Mapping[str, object] = field(default_factory=dict)
    facts: tuple[Fact, ...] = ()
    scores: int = 0
    head_dim: bool = False


KEYS = get_facts(
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"),
    *("rope_theta", "vocab_size"),
)
TOKENS = get_facts("bos_token_id", "eos_token_id", "pad_token_id")
CAPS = get_facts("attn_logit_softcapping", "final_logit_softcapping")
WINDOW = get_facts("sliding_window")
SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps"),
)
"""Keys of config.json for the sizes that determine the tensors and what they compute."""
ASSUMED = frozenset(
    {
        *("num_key_value_heads", "head_dim", "rope_theta", "vocab_size"),
        *(fact.config for fact in (*CAPS, *TOKENS)),
    }
)
"""Facts that may be missing, because llama.cpp assumes or counts them."""
EMBEDDING = "token_embd.weight"
GEMMA = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", {"hidden_act": "silu"}),
    "llama.experts": Architecture(
        "mixtral",
        "MixtralForCausalLM",
        {"hidden_act": "silu"},
        get_facts("num_experts_per_tok", "num_local_experts"),
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", {"hidden_act": "silu"}),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {"hidden_act": "silu"}, head_dim=True),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {"hidden_act": "silu", "norm_topk_prob": True, "decoder_sparse_step": 1},
        get_facts("num_experts_per_tok", "num_experts", "moe_intermediate_size"),
        head_dim=True,
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", GEMMA, head_dim=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", GEMMA, WINDOW + CAPS, 46, head_dim=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", GEMMA, WINDOW, 62, head_dim=True),
}


def described(
    metadata: Mapping[str, object],
    counts: Mapping[str, int],
    tensors: Mapping[str, TensorEntry],
    factors: Sequence[float] | None,
) -> tuple[Json | None, tuple[str, ...]]:
    """Build config.json from a file's metadata, with the notes on it.

    Args:
        metadata: Values by key, including short arrays of numbers.
        counts: The length of each other array.
        tensors: Tensors of the file, or of all files of the checkpoint.
        factors: The elements of :data:`FACTORS`, or None if that tensor is missing.

    Returns:
        The config and notes; the config is None if the architecture or a value is unsupported.
    """

    def refused(why: str) -> tuple[None, tuple[str]]:
        return None, (f"{why}; config.json is not written",)

    name = str(metadata.get("general.architecture", ""))
    has_experts = metadata.get(f"{name}.expert_count")
    known = ARCHITECTURES.get(f"{name}.experts") if has_experts else None  # Mixtral is "llama"
    known = known or ARCHITECTURES.get(name)
    if known is None:
        return refused(f"GGUF architecture `{name}` is not supported")
    said = {key.removeprefix(f"{name}."): _shown(value) for key, value in metadata.items()}
    stated = (*KEYS, *known.facts, *TOKENS)
    config: Json = {
        "architectures": [known.class_name],
        "model_type": known.model_type,
        **known.always,
        **{fact.config: said[fact.gguf] for fact in stated if fact.gguf in said},
        "tie_word_embeddings": not _has(tensors, "output.weight"),
        "torch_dtype": _dtype(tensors),
    }
    if "vocab_size" not in config and "tokenizer.ggml.tokens" in counts:
        config["vocab_size"] = counts["tokenizer.ggml.tokens"]
    names = [fact.config for fact in stated]
    silent = [name for name in names if name not in config and name not in ASSUMED]
    if silent:
        return refused(f"the GGUF file does not state `{silent[0]}`")
    config = {**_assumed(config, known, tensors), **config}
    if known.scores:
        config["query_pre_attn_scalar"] = _scores(config, known.scores)
    strange = [name for name in names if name in config and not _is_number(config[name])]
    if strange:
        value = config[strange[0]]
        why = "differs from layer to layer" if isinstance(value, list) else f"is {value!r}"
        return refused(f"`{strange[0]}` {why} in the GGUF file")
    scaling = rope_of_gguf(config, said, factors)
    if scaling is None:
        return refused("the scaling of rotary frequencies in the GGUF file is not supported")
    more = {"rope_scaling": scaling} if scaling else {}
    return {**config, **more}, ("config.json is generated from the GGUF metadata",)


def _assumed(config: Json, known: Architecture, tensors: Mapping[str, TensorEntry]) -> Json:
    """Return values that llama.cpp assumes if they are missing, where transformers may not."""
    heads, size = config["num_attention_heads"], config["hidden_size"]
    found: Json = {"num_key_value_heads": heads, "rope_theta": FACTS["rope_theta"].default}
    if known.head_dim and isinstance(size, int) and isinstance(heads, int) and heads:
        found["head_dim"] = size // heads
    rows = {one.shape[0] for name, one in tensors.items() if name.startswith(EMBEDDING)}
    if len(rows) == 1:
        found["vocab_size"] = rows.pop()
    return found


def sizes_of(config: Mapping[str, object]) -> Json:
    """Return only the sizes of a config.json built by :func:`described`."""
    return {word: config[word] for word in SIZES if word in config}


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value)


def _shown(value: object) -> object:
    """Return the shortest decimal of a float32: 1e-06 instead of 9.999999974752427e-07."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    digits = (float(f"{value:.{count}g}") for count in range(1, 10))
    return next((one for one in digits if _rounded(one) == _rounded(value)), value)


def _rounded(value: float) -> bytes:
    return struct.pack("<f", value) if abs(value) < LARGEST else struct.pack("<d", value)


def _has(tensors: Collection[str], name: str) -> bool:
    """Return whether a tensor is present, quantized or not."""
    return name in tensors or any(f"{name}.{block.name}" in tensors for block in BLOCKS.values())


def _dtype(tensors: Mapping[str, TensorEntry]) -> str:
    """Return the dtype of most elements, where quantized ones count as bfloat16."""
    sizes: dict[str, int] = {}
    for one in tensors.values():
        kind = "bfloat16" if one.dtype == "uint8" else one.dtype
        sizes[kind] = sizes.get(kind, 0) + one.nbytes
    return max(sizes, key=lambda kind: sizes[kind], default="bfloat16")


def _scores(config: Json, layers: int) -> object:
    """Return the number whose root divides Gemma's attention scores."""
    size, heads = config.get("hidden_size"), config.get("num_attention_heads")
    largest = config.get("num_hidden_layers") == layers
    if largest and isinstance(size, int) and isinstance(heads, int) and heads:
        return size // heads
    return config.get("head_dim", 256)
