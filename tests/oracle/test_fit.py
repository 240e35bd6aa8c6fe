"""The KV cache of ``inspect --fit`` against the tensors in transformers' caches after a forward.

transformers keeps one token less of a window than attention reads, because the current token is
added to it, and one column more of a convolution's state than vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from tests.oracle.hf_models import random_model
from tests.oracle.tiny import TINY, family_of

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

TOKENS = 40
"""More than the window of any tiny model."""
ITEMSIZE = 4
UNKNOWN = {
    *("clip_text", "deepseek_v4", "glm5_next", "hy_v4", "inkling", "llama3_vision"),
    *("minimax_m3", "minimax_m3_vl", "mistral_large4", "muse_spark", "qwen3_omni_moe"),
    *("qwen4_exp", "qwen4_exp_text", "t5_encoder"),
}
"""Families whose cache is not supported, so that nothing is stated about it."""


def iterate_tensors(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in vars(layer).items():
        for tensor in value.values() if isinstance(value, dict) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                yield name, tensor


def count_elements(cache: Any, *, without_keys: bool = False) -> int:
    """Count the elements in a cache of transformers, as vLLM would have them."""
    total = 0
    for layer in cache.layers:
        for name, tensor in iterate_tensors(layer):
            if name in ("keys", "values"):
                tokens = tensor.shape[-2]
                window = getattr(layer, "sliding_window", None)
                assert tokens == (TOKENS if window is None else min(TOKENS, window - 1))
                kept = 0 if without_keys else min(TOKENS, window or TOKENS)
                total += tensor.numel() // tokens * kept
            elif name == "conv_states":
                total += tensor.numel() // tensor.shape[-1] * (tensor.shape[-1] - 1)
            elif name == "recurrent_states":
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
    index_size = getattr(text, "index_head_dim", 0) if indexers else 0
    size = ITEMSIZE * (text.kv_lora_rank + text.qk_rope_head_dim)
    return TOKENS * (layers * size + indexers * (index_size + ITEMSIZE))


@pytest.mark.parametrize("name", TINY)
def test_cache_equals_tensors_of_transformers(name: str, tmp_path: Path) -> None:
    config = TINY[name]()
    model = random_model(config)
    model.save_pretrained(tmp_path)
    fit = ckptctl.inspect(tmp_path, fit="1GB", context=TOKENS, kv_dtype="fp32").fit
    assert fit
    assert (fit.cache is None) == (family_of(name) in UNKNOWN), fit.unknown
    if fit.cache is None:
        assert any(reason.startswith("KV cache:") for reason in fit.unknown)
        return
    tokens = torch.arange(3, 3 + TOKENS)[None] % 59
    with torch.no_grad():
        output = model(input_ids=tokens, use_cache=True)
    if "past_key_values" not in output:
        pytest.skip("this model of the tests has no cache")
    has_latents = any(use.kind == "latent attention" for use in fit.cache)
    expected = ITEMSIZE * count_elements(output.past_key_values, without_keys=has_latents)
    expected += count_latents(model, config) if has_latents else 0
    assert fit.request_bytes == expected
