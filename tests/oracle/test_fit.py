"""The KV cache of ``inspect --fit`` against the tensors in transformers' caches after a forward.

transformers keeps one token less of a window than attention reads, because the current token is
added to it, and one column more of a convolution's state than vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl import families, formats
from ckptctl.conversion.recognition.model import recognize_model
from ckptctl.fit.sharding import Ranks
from ckptctl.verbs.inspection.fit import iterate_shares, solve_sizes
from tests.oracle.tiny import TINY, family_of

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle.hf_models import random_model

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

TOKENS = 47
"""More than the window of any tiny model, and one less than a group of compressed tokens."""
CONTEXTS = {"deepseek_v4.published": 127}
"""Other numbers of tokens, for models with larger groups."""
ITEMSIZE = 4
UNKNOWN = {"clip_text", "llama3_vision", "qwen3_omni_moe", "t5_encoder"}
"""Families whose cache is not supported, so that nothing is stated about it."""
LATENTS_IN_TRANSFORMERS = ("glm5_next", "hy_v4", "mistral_large4")
"""Families of which transformers caches latents. Of others, it caches keys and values."""
KEYS_ARE_VALUES = ("deepseek_v4",)
"""Families whose keys are also values, so that one copy is enough."""
COMPRESSED_TENSORS = ("compressed_kv", "buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate")
WITH_PADDING_CHANNEL = ("glm5_next",)
"""Families of which transformers caches, with each key of an indexer, whether it is padding."""
NGRAM_CONVOLUTION = ("qwen4_exp", "qwen4_exp_text"), 1
"""Families with a convolution of n-grams, and its number. Its state has no superfluous column."""


def iterate_tensors(layer: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
    for name, value in vars(layer).items():
        tensors = value if isinstance(value, dict) else {0: value}
        for number, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                yield name, number, tensor


def count_elements(cache: Any, family: str, *, without_keys: bool = False) -> int:
    """Count the elements in a cache of transformers, as vLLM would have them."""
    total = 0
    for layer in cache.layers:
        for name, number, tensor in iterate_tensors(layer):
            if not tensor.is_floating_point():
                continue  # tokens or their positions, which engines have anyway
            columns = tensor.shape[-1]
            if name == "values" and family in KEYS_ARE_VALUES:
                assert torch.equal(tensor, layer.keys)
            elif name in ("keys", "values"):
                tokens = tensor.shape[-2]
                window = getattr(layer, "sliding_window", None)
                assert tokens == (TOKENS if window is None else min(TOKENS, window - 1))
                kept = 0 if without_keys else min(TOKENS, window or TOKENS)
                total += tensor.numel() // tokens * kept
            elif name == "conv_states":
                is_ngram = family in NGRAM_CONVOLUTION[0] and number == NGRAM_CONVOLUTION[1]
                total += tensor.numel() // columns * (columns if is_ngram else columns - 1)
            elif name == "indexer_keys" and not without_keys:
                total += tensor.numel() // columns * (columns - (family in WITH_PADDING_CHANNEL))
            elif name in ("recurrent_states", "idx_keys", *COMPRESSED_TENSORS):
                total += tensor.numel()
            else:
                assert name.startswith("_") or (without_keys and "index" in name), name
    return total


def count_latents(model: Any, config: Any) -> int:
    """Count the bytes of latents. transformers caches keys and values of all heads instead."""
    text = config.get_text_config()
    names = [name for name, _ in model.named_modules()]
    layers = sum(bool(re.search(r"kv_a_proj_with_mqa(\.0|\.1)?$", name)) for name in names)
    indexers = sum(name.endswith("indexer.wk") for name in names)
    index_size: int = getattr(text, "index_head_dim", 0) if indexers else 0
    size: int = ITEMSIZE * (text.kv_lora_rank + text.qk_rope_head_dim)
    total: int = TOKENS * (layers * size + indexers * (index_size + ITEMSIZE))
    return total


@pytest.mark.parametrize("name", TINY)
def test_cache_equals_tensors_of_transformers(name: str, tmp_path: Path) -> None:
    config, context = TINY[name](), CONTEXTS.get(name, TOKENS)
    model = random_model(config)
    model.save_pretrained(tmp_path)
    fit = ckptctl.inspect(tmp_path, fit="1GB", context=context, kv_dtype="fp32").fit
    assert fit
    assert (fit.cache is None) == (family_of(name) in UNKNOWN), fit.unknown
    if fit.cache is None:
        assert any(reason.startswith("KV cache:") for reason in fit.unknown)
        return
    tokens = torch.arange(3, 3 + context)[None] % 59
    with torch.no_grad():
        output = model(input_ids=tokens, use_cache=True)
    if "past_key_values" not in output:
        pytest.skip("this model of the tests has no cache")
    family = family_of(name)
    has_latents = any(use.kind == "latent attention" for use in fit.cache)
    has_heads = has_latents and family not in LATENTS_IN_TRANSFORMERS
    expected = ITEMSIZE * count_elements(output.past_key_values, family, without_keys=has_heads)
    expected += count_latents(model, config) if has_heads else 0
    assert fit.request_bytes == expected


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3.no_q_lora"])
def test_latents_equal_tensors_of_mlx_lm(name: str, tmp_path: Path) -> None:
    """mlx-lm caches the latent and the rotary key, as vLLM does."""
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from tests.oracle.mlx_models import load

    model = random_model(TINY[name]())
    model.save_pretrained(tmp_path)
    fit = ckptctl.inspect(tmp_path, fit="1GB", context=TOKENS, kv_dtype="fp32").fit
    assert fit
    program = load(tmp_path)
    cache = make_prompt_cache(program)
    mx.eval(program(mx.array([list(range(3, 3 + TOKENS))]), cache=cache))
    elements = sum(
        tensor.shape[-1] * tensor.shape[1]
        for layer in cache
        for tensor in (layer.keys, layer.values)
    )
    assert fit.token_bytes == elements * ITEMSIZE


def test_states_of_lightning_attention_equal_those_of_mlx_lm(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from tests.oracle import mlx_models

    path = mlx_models.save("bailing_moe_linear", tmp_path / "model")
    fit = ckptctl.inspect(path, fit="1GB", context=TOKENS, kv_dtype="fp32").fit
    assert fit and fit.cache
    program = mlx_models.load(path)
    cache = make_prompt_cache(program)
    mx.eval(program(mx.array([list(range(3, 3 + TOKENS))]), cache=cache))
    sizes: list[int] = []
    for layer in cache:
        if hasattr(layer, "keys"):
            parts = (layer.keys, layer.values)
            sizes.append(sum(part.shape[1] * part.shape[3] * TOKENS for part in parts))
        else:
            sizes.append(layer[0].size)
    assert len(sizes) == sum(use.layers for use in fit.cache)
    assert fit.request_bytes == ITEMSIZE * sum(sizes)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen3_moe", "olmo2", "gemma"])
def test_cache_and_weights_equal_those_of_hf_mem(name: str, tmp_path: Path) -> None:
    """hf-mem assumes that all layers cache keys and values of all tokens."""
    kv_cache = pytest.importorskip("hf_mem.safetensors.kv_cache", reason="hf-mem is not installed")
    model = random_model(TINY[name]())
    model.save_pretrained(tmp_path)
    fit = ckptctl.inspect(tmp_path, fit="1GB", context=TOKENS, kv_dtype="fp32").fit
    assert fit
    config = json.loads((tmp_path / "config.json").read_text())
    expected = kv_cache.compute_safetensors_kv_cache_size(config, "F32", TOKENS)
    assert fit.request_bytes == expected
    assert fit.weights == sum(weight.nbytes for weight in model.parameters())


SPLIT_STYLES = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
FURTHER_STYLES = ("colwise_gather_output", "embedding_rowwise", "moe_tp_experts")
COUNTED_ON_EVERY_RANK = {
    "": "vision|audio|talker|code2wav|hyper_connection|indexer",
    "gemma": "[kv]_proj",  # the only key/value head is repeated
    "gemma4": "[kv]_proj",
    "gemma4_text": "[kv]_proj",
    "gemma4_unified": "[kv]_proj",  # full attention has one key/value head, which is repeated
    "glm5_next": "o_proj",
    "laguna": "g_proj",
    "mimo_v2_flash": "[kv]_proj",
}
"""Weights, by family, that ckptctl counts completely, although transformers splits them."""
OTHER_NAMES = ("inkling", "kimi_k25", "mistral_large4", "nemotron_h")
"""Families whose files have other names than transformers' plan."""


@pytest.mark.parametrize("name", TINY)
def test_tensor_parallel_split_follows_plan_of_transformers(name: str, tmp_path: Path) -> None:
    model = random_model(TINY[name]())
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    if not plan:
        pytest.skip("the class has no plan")
    model.save_pretrained(tmp_path)
    shares = compute_shares(tmp_path)
    family = family_of(name)
    exceptions = "|".join(
        filter(None, (COUNTED_ON_EVERY_RANK[""], COUNTED_ON_EVERY_RANK.get(family)))
    )
    compared = 0
    for pattern, style in plan.items():
        if re.search(exceptions, pattern):
            continue
        tail = re.escape(pattern.partition("layers.")[2] or pattern).replace(r"\*", r"\d+")
        for key in shares:
            if re.search(exceptions, key) or not re.search(
                rf"(^|layers\.){tail}(\.weight|\.bias)?$", key
            ):
                continue
            is_row_bias = style == "rowwise" and key.endswith("bias")
            if style in (*SPLIT_STYLES, *FURTHER_STYLES) and not is_row_bias:
                assert shares[key] < 1, (key, style)
                compared += 1
            elif style.startswith("replicated"):
                assert shares[key] == 1, (key, style)
    assert compared or family in OTHER_NAMES


def compute_shares(path: Path) -> dict[str, Fraction]:
    """Compute the share of each weight on one of two ranks."""
    model = recognize_model(formats.open_checkpoint(path))
    family = families.family(model.model_type or "")
    layout = family.get_layout(model.layout or model.pairs[0][1])
    matched = model.match_keys(family, layout, model.tensors.keys())
    sizes = solve_sizes(family, layout, model, matched)
    shares = iterate_shares(family, model, matched, sizes, Ranks(2, 1))
    return {model.root + key: share.rank for _, _, key, share in shares}
