"""Weights and caches of published models, from headers with their real sizes.

Expected numbers are computed by hand from vLLM's formulas in ``v1/kv_cache_interface.py`` and
``layers/mamba/mamba_utils.py`` (commits 001cabc1be16 and 02d710837549, 2026), and from published
numbers of parameters.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import ckptctl
from ckptctl import families
from ckptctl.errors import UsageError
from ckptctl.fit.cache import SSM_DTYPE, State, get_state_dtype
from ckptctl.fit.sharding import find_split_axes
from ckptctl.verbs.inspection.inspect_options import Gpus, check_tokens, parse_gpus
from ckptctl.verbs.inspection.inspect_result import Fit
from tests.checkpoints.golden import Golden

Shapes = Mapping[str, tuple[int, ...]]
GIB = 1 << 30


def write_headers(
    folder: Path,
    shapes: Shapes,
    config: Mapping[str, Any],
    dtypes: Mapping[str, str] | None = None,
) -> Path:
    """Write a safetensors file whose data is a hole, with bf16 tensors unless *dtypes* has them."""
    header, end = {}, 0
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, "BF16")
        start, end = end, end + (2 if dtype == "BF16" else 1)
        for size in shape:
            end = start + (end - start) * size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def gqa(layers: int, d: int, f: int, heads: int, kv: int, e: int, v: int) -> dict[str, Any]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}
    for n in range(layers):
        layer = f"model.layers.{n}."
        shapes |= {
            f"{layer}self_attn.q_proj.weight": (heads * e, d),
            f"{layer}self_attn.k_proj.weight": (kv * e, d),
            f"{layer}self_attn.v_proj.weight": (kv * e, d),
            f"{layer}self_attn.o_proj.weight": (d, heads * e),
            f"{layer}mlp.gate_proj.weight": (f, d),
            f"{layer}mlp.up_proj.weight": (f, d),
            f"{layer}mlp.down_proj.weight": (d, f),
            f"{layer}input_layernorm.weight": (d,),
            f"{layer}post_attention_layernorm.weight": (d,),
        }
    return shapes | {"model.norm.weight": (d,), "lm_head.weight": (v, d)}


def sizes(layers: int, d: int, f: int, heads: int, kv: int, e: int, v: int) -> dict[str, Any]:
    return {
        "hidden_size": d,
        "intermediate_size": f,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_hidden_layers": layers,
        "head_dim": e,
        "vocab_size": v,
        "dtype": "bfloat16",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }


LLAMA_8B = dict(layers=32, d=4096, f=14336, heads=32, kv=8, e=128, v=128256)
LLAMA_CONFIG = {
    **sizes(**LLAMA_8B),
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_headers(tmp_path / "llama", gqa(**LLAMA_8B), LLAMA_CONFIG)


def compute(path: Path, fit: str, **options: Any) -> Fit:
    inspection = ckptctl.inspect(path, fit=fit, **options)
    assert inspection.fit
    return inspection.fit


def test_llama_3_8b_has_published_sizes(llama: Path) -> None:
    fit = compute(llama, "24GiB", context=8192)
    assert fit.weights == 2 * 8_030_261_248
    assert fit.token_bytes == 128 << 10  # 2 x 8 heads x 128 x 2 bytes x 32 layers
    assert fit.request_bytes == GIB
    assert fit.requests == 9  # (24 GiB - 14.96 GiB) / 1 GiB
    assert fit.fits
    free = 24 * GIB - fit.weights
    assert fit.max_context == free // (128 << 10)
    assert not fit.unknown


def test_damaged_model_is_never_said_to_fit(tmp_path: Path) -> None:
    shapes = gqa(**LLAMA_8B)
    for name in [name for name in shapes if "layers.31.mlp" in name]:
        del shapes[name]
    path = write_headers(tmp_path / "part", shapes, LLAMA_CONFIG)
    fit = compute(path, "24GiB", context=8192)
    assert (fit.fits, fit.requests, fit.max_context) == (None, None, None)
    assert any("damaged" in reason for reason in fit.unknown)
    assert compute(path, "8GiB", context=8192).fits is False


def test_tensor_parallel_size_splits_all_but_norms(llama: Path) -> None:
    norms = 2 * 65 * 4096
    for ranks in (2, 4, 8):
        fit = compute(llama, f"{ranks}x24GB")
        assert fit.stages[0].weights == (fit.weights - norms) // ranks + norms
        assert fit.stages[0].token_bytes == (128 << 10) // ranks
        assert fit.replicated == norms
        assert fit.requests == (24 * 10**9 - fit.stages[0].weights) // (131072 * 2**17 // ranks)


def test_key_value_heads_are_repeated_if_ranks_outnumber_them(llama: Path) -> None:
    fit = compute(llama, "16x24GB")
    keys = 2 * 32 * 2 * 1024 * 4096
    norms = 2 * 65 * 4096
    assert fit.stages[0].weights == (fit.weights - norms - keys) // 16 + norms + keys // 8
    assert fit.stages[0].token_bytes == (128 << 10) // 8


def test_pipeline_stages_have_layers_as_in_vllm(llama: Path) -> None:
    """``get_pp_indices`` gives remaining layers to the stages before the last one."""
    fit = compute(llama, "3x24GB", pp=3)
    assert [stage.layers for stage in fit.stages] == [11, 11, 10]
    layer = (fit.weights - 2 * 2 * 128256 * 4096 - 2 * 4096) // 32
    assert [stage.weights for stage in fit.stages] == [
        11 * layer + 2 * 128256 * 4096,
        11 * layer,
        10 * layer + 2 * 128256 * 4096 + 2 * 4096,
    ]
    assert [stage.token_bytes for stage in fit.stages] == [11 << 12, 11 << 12, 10 << 12]


def test_copies_multiply_requests(llama: Path) -> None:
    one, two = compute(llama, "2x24GB"), compute(llama, "4x24GB", tp=2)
    assert (one.dp, two.dp) == (1, 2)
    assert one.requests and two.requests == 2 * one.requests


def test_fp8_halves_the_cache(llama: Path) -> None:
    assert compute(llama, "24GB", kv_dtype="fp8").token_bytes == 64 << 10


def test_heads_that_cannot_be_divided_are_unknown(llama: Path) -> None:
    fit = compute(llama, "3x24GB")
    assert fit.stages[0].weights is None
    assert fit.fits is None
    assert any("cannot be divided" in reason for reason in fit.unknown)


def test_weights_that_exceed_the_memory_do_not_fit(llama: Path) -> None:
    fit = compute(llama, "16GB")
    assert fit.fits is False
    assert fit.requests == 0


def test_too_little_room_for_a_request_does_not_fit(llama: Path) -> None:
    fit = compute(llama, "17GB", context="128k")
    assert fit.fits is False
    assert fit.max_context == (17 * 10**9 - fit.weights) // (128 << 10)


def test_padded_embedding_of_tied_model_is_on_first_and_last_stage(tmp_path: Path) -> None:
    shapes = gqa(**LLAMA_8B)
    del shapes["lm_head.weight"]
    config = {**LLAMA_CONFIG, "tie_word_embeddings": True}
    fit = compute(write_headers(tmp_path / "tied", shapes, config), "2x24GB", pp=2)
    embedding, norm = 2 * 128256 * 4096, 2 * 4096
    assert fit.stages[0].weights == fit.stages[1].weights - norm  # type: ignore[operator]
    assert sum(stage.weights or 0 for stage in fit.stages) == fit.weights + embedding


def with_norms(shapes: dict[str, Any], layers: int, e: int) -> dict[str, Any]:
    for n in range(layers):
        layer = f"model.layers.{n}."
        shapes[f"{layer}pre_feedforward_layernorm.weight"] = shapes[
            f"{layer}input_layernorm.weight"
        ]
        shapes[f"{layer}post_feedforward_layernorm.weight"] = shapes[
            f"{layer}input_layernorm.weight"
        ]
        if e:
            shapes[f"{layer}self_attn.q_norm.weight"] = (e,)
            shapes[f"{layer}self_attn.k_norm.weight"] = (e,)
    return shapes


GEMMA_3_4B = dict(layers=34, d=2560, f=10240, heads=8, kv=4, e=256, v=262208)
GEMMA_CONFIG = {
    **sizes(**GEMMA_3_4B),
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "tie_word_embeddings": True,
    "sliding_window": 1024,
}


@pytest.mark.parametrize(
    "pattern",
    [
        {"sliding_window_pattern": 6},
        {},  # the family's pattern
        {
            "layer_types": [
                "full_attention" if (n + 1) % 6 == 0 else "sliding_attention" for n in range(34)
            ]
        },
    ],
)
def test_window_limits_cache_of_gemma_3(tmp_path: Path, pattern: dict[str, Any]) -> None:
    shapes = with_norms(gqa(**GEMMA_3_4B), 34, 256)
    del shapes["lm_head.weight"]
    path = write_headers(tmp_path / "gemma", shapes, {**GEMMA_CONFIG, **pattern})
    fit = compute(path, "24GB", context="32k")
    token = 2 * 4 * 256 * 2
    assert fit.cache
    uses = {use.kind: use for use in fit.cache}
    assert uses["full attention"].layers == 5
    assert uses["full attention"].nbytes == 5 * 32768 * token
    assert uses["sliding window"].layers == 29
    assert uses["sliding window"].nbytes == 29 * 1024 * token
    assert fit.request_bytes == (5 * 32768 + 29 * 1024) * token
    assert compute(path, "24GB", context=100).request_bytes == 34 * 100 * token


def test_window_of_unknown_layers_is_unknown(tmp_path: Path) -> None:
    config = {**LLAMA_CONFIG, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    shapes = gqa(**LLAMA_8B)
    for n in range(32):
        for name, rows in (("q", 4096), ("k", 1024), ("v", 1024)):
            shapes[f"model.layers.{n}.self_attn.{name}_proj.bias"] = (rows,)
    path = write_headers(tmp_path / "qwen", shapes, {**config, "sliding_window": 4096})
    fit = compute(path, "24GB")
    assert (fit.cache, fit.requests, fit.fits) == (None, None, None)
    assert any("not the layers that have the window" in reason for reason in fit.unknown)
    config |= {"sliding_window": 4096, "use_sliding_window": False}
    fit = compute(write_headers(tmp_path / "qwen", shapes, config), "24GB")
    assert fit.token_bytes == 128 << 10


def test_unsupported_layer_type_is_unknown(tmp_path: Path) -> None:
    config = {**LLAMA_CONFIG, "layer_types": ["hyena"] * 32}
    fit = compute(write_headers(tmp_path / "llama", gqa(**LLAMA_8B), config), "24GB")
    assert fit.cache is None
    assert any("`hyena`" in reason for reason in fit.unknown)
    assert fit.stages[0].weights == fit.weights


def deepseek(family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tensors and config.json of DeepSeek-V3, or V3.2, with its 61 layers, all dense."""
    d, f, heads, ql, kl, rope, nope, vd, v = 7168, 18432, 128, 1536, 512, 64, 128, 128, 129280
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}
    for n in range(61):
        layer = f"model.layers.{n}."
        attention = f"{layer}self_attn."
        shapes |= {
            f"{attention}q_a_proj.weight": (ql, d),
            f"{attention}q_a_layernorm.weight": (ql,),
            f"{attention}q_b_proj.weight": (heads * (nope + rope), ql),
            f"{attention}kv_a_proj_with_mqa.weight": (kl + rope, d),
            f"{attention}kv_a_layernorm.weight": (kl,),
            f"{attention}kv_b_proj.weight": (heads * (nope + vd), kl),
            f"{attention}o_proj.weight": (d, heads * vd),
            f"{layer}mlp.gate_proj.weight": (f, d),
            f"{layer}mlp.up_proj.weight": (f, d),
            f"{layer}mlp.down_proj.weight": (d, f),
            f"{layer}input_layernorm.weight": (d,),
            f"{layer}post_attention_layernorm.weight": (d,),
        }
        if family == "deepseek_v32":
            shapes |= {
                f"{attention}indexer.wq_b.weight": (64 * 128, ql),
                f"{attention}indexer.wk.weight": (128, d),
                f"{attention}indexer.k_norm.weight": (128,),
                f"{attention}indexer.k_norm.bias": (128,),
                f"{attention}indexer.weights_proj.weight": (64, d),
            }
    shapes |= {"model.norm.weight": (d,), "lm_head.weight": (v, d)}
    config = {
        "model_type": family,
        "hidden_size": d,
        "intermediate_size": f,
        "moe_intermediate_size": 2048,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 61,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "q_lora_rank": ql,
        "kv_lora_rank": kl,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": vd,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "vocab_size": v,
        "max_position_embeddings": 163840,
        "torch_dtype": "bfloat16",
        "num_nextn_predict_layers": 0,
    }
    return shapes, config


def test_latent_of_deepseek_v3_is_on_every_rank(tmp_path: Path) -> None:
    """MLAAttentionSpec: one head of 512 + 64 elements."""
    path = write_headers(tmp_path / "model", *deepseek("deepseek_v3"))
    fit = compute(path, "8x141GB", context=4096)
    assert fit.token_bytes == 61 * 576 * 2 == 70_272
    assert fit.stages[0].token_bytes == 70_272
    assert compute(path, "8x141GB", kv_dtype="fp8").token_bytes == 61 * 576
    attention = 1536 * 7168 + 576 * 7168
    split = 192 * 128 * 1536 + 256 * 128 * 512 + 7168 * 128 * 128 + 3 * 18432 * 7168
    norms = 61 * (1536 + 512 + 2 * 7168) + 7168
    vocabulary = 2 * 129280 * 7168
    assert fit.stages[0].weights == 2 * (61 * attention + norms) + (61 * split + vocabulary) // 4


def test_indexer_of_deepseek_v32_caches_fp8_keys(tmp_path: Path) -> None:
    """DeepseekV32IndexerCache: 128 + 128 // 128 * 4 bytes; ``fp8_ds_mla``: 656 bytes."""
    path = write_headers(tmp_path / "model", *deepseek("deepseek_v32"))
    assert compute(path, "8x141GB").token_bytes == 61 * (576 * 2 + 132)
    assert compute(path, "8x141GB", kv_dtype="fp8").token_bytes == 61 * (656 + 132)


def qwen3_next() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tensors and config.json of Qwen3-Next-80B-A3B with 4 of 48 layers, 8 experts each."""
    d, lk, lh, ld, le, heads, kv, e, m, x, v = 2048, 16, 32, 128, 128, 16, 2, 256, 512, 8, 151936
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}
    for n in range(4):
        layer = f"model.layers.{n}."
        if n == 3:
            shapes |= {
                f"{layer}self_attn.q_proj.weight": (2 * heads * e, d),
                f"{layer}self_attn.k_proj.weight": (kv * e, d),
                f"{layer}self_attn.v_proj.weight": (kv * e, d),
                f"{layer}self_attn.o_proj.weight": (d, heads * e),
                f"{layer}self_attn.q_norm.weight": (e,),
                f"{layer}self_attn.k_norm.weight": (e,),
            }
        else:
            shapes |= {
                f"{layer}linear_attn.in_proj_qkvz.weight": (2 * lk * ld + 2 * lh * le, d),
                f"{layer}linear_attn.in_proj_ba.weight": (2 * lh, d),
                f"{layer}linear_attn.conv1d.weight": (2 * lk * ld + lh * le, 1, 4),
                f"{layer}linear_attn.dt_bias": (lh,),
                f"{layer}linear_attn.A_log": (lh,),
                f"{layer}linear_attn.norm.weight": (le,),
                f"{layer}linear_attn.out_proj.weight": (d, lh * le),
            }
        shapes |= {
            f"{layer}input_layernorm.weight": (d,),
            f"{layer}post_attention_layernorm.weight": (d,),
            f"{layer}mlp.gate.weight": (x, d),
            f"{layer}mlp.shared_expert.gate_proj.weight": (m, d),
            f"{layer}mlp.shared_expert.up_proj.weight": (m, d),
            f"{layer}mlp.shared_expert.down_proj.weight": (d, m),
            f"{layer}mlp.shared_expert_gate.weight": (1, d),
        }
        for number in range(x):
            expert = f"{layer}mlp.experts.{number}."
            shapes |= {
                f"{expert}gate_proj.weight": (m, d),
                f"{expert}up_proj.weight": (m, d),
                f"{expert}down_proj.weight": (d, m),
            }
    shapes |= {"model.norm.weight": (d,), "lm_head.weight": (v, d)}
    config = {
        **sizes(4, d, 5120, heads, kv, e, v),
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "full_attention_interval": 4,
        "linear_num_key_heads": lk,
        "linear_num_value_heads": lh,
        "linear_key_head_dim": ld,
        "linear_value_head_dim": le,
        "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": m,
        "shared_expert_intermediate_size": m,
        "num_experts": x,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return shapes, config


CONV = (2 * 16 * 128 + 32 * 128) * 3 * 2
RECURRENT = 32 * 128 * 128


@pytest.mark.parametrize(
    ("stated", "itemsize"),
    [({}, 2), ({"mamba_ssm_dtype": "float32"}, 4), ({"mamba_ssm_dtype": "auto"}, 2)],
)
def test_states_of_qwen3_next_do_not_grow(
    tmp_path: Path, stated: dict[str, str], itemsize: int
) -> None:
    """``gated_delta_net_state_shape`` and the dtype of ``--mamba-ssm-cache-dtype auto``."""
    shapes, config = qwen3_next()
    path = write_headers(tmp_path / "model", shapes, {**config, **stated})
    state = 3 * (CONV + RECURRENT * itemsize)
    token = 2 * 2 * 256 * 2
    for context in (1, 4096):
        assert compute(path, "24GB", context=context).request_bytes == state + context * token
    fit = compute(path, "2x24GB", context=4096, kv_dtype="fp8")
    assert fit.stages[0].request_bytes == state // 2 + 4096 * token // 4


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"model_type": "nemotron_h"}, "float32"),
        ({"model_type": "nemotron_h", "mamba_ssm_cache_dtype": "float16"}, "float16"),
        ({"model_type": "jamba"}, "bfloat16"),
    ],
)
def test_states_of_nemotron_h_are_float32_by_default(config: dict[str, str], dtype: str) -> None:
    """vLLM's ``NemotronHForCausalLMConfig`` reads ``mamba_ssm_cache_dtype`` of config.json."""
    assert get_state_dtype(State(1, dtype=SSM_DTYPE), "bfloat16", config) == dtype


def test_expert_parallel_size_distributes_experts(tmp_path: Path) -> None:
    path = write_headers(tmp_path / "model", *qwen3_next())
    experts = 4 * 8 * 3 * 512 * 2048 * 2
    split, spread = compute(path, "2x24GB"), compute(path, "2x24GB", ep=2)
    assert split.experts == spread.experts == experts
    assert split.stages[0].weights == spread.stages[0].weights
    copies = compute(path, "2x24GB", tp=1, ep=2)
    assert copies.stages[0].weights == copies.weights - experts // 2
    assert copies.dp == 2
    lone = compute(path, "4x24GB", tp=1, ep=4)
    assert lone.stages[0].weights == lone.weights - experts * 3 // 4


def test_blocks_of_gpt_oss_are_divided_and_padded(tmp_path: Path) -> None:
    """vLLM's ``models/gpt_oss.py`` gives each rank ``cdiv(90, 8)`` blocks of 32 elements."""
    d, experts, layers = 2880, 128, 2
    shapes: dict[str, Any] = {"model.embed_tokens.weight": (201088, d)}
    for n in range(layers):
        attention, moe = f"model.layers.{n}.self_attn.", f"model.layers.{n}.mlp."
        shapes[f"{attention}sinks"] = (64,)
        for name, rows in (("q", 4096), ("k", 512), ("v", 512)):
            shapes[f"{attention}{name}_proj.weight"] = (rows, d)
            shapes[f"{attention}{name}_proj.bias"] = (rows,)
        shapes[f"{attention}o_proj.weight"] = (d, 4096)
        shapes[f"{attention}o_proj.bias"] = (d,)
        shapes[f"{moe}router.weight"] = (experts, d)
        shapes[f"{moe}router.bias"] = (experts,)
        for name, rows in (("gate_up", 2 * d), ("down", d)):
            shapes[f"{moe}experts.{name}_proj_blocks"] = (experts, rows, 90, 16)
            shapes[f"{moe}experts.{name}_proj_scales"] = (experts, rows, 90)
            shapes[f"{moe}experts.{name}_proj_bias"] = (experts, rows)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{n}.{name}.weight"] = (d,)
    shapes |= {"model.norm.weight": (d,), "lm_head.weight": (201088, d)}
    config = {
        **sizes(layers, d, d, 64, 8, 64, 201088),
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": experts,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "quantization_config": {"quant_method": "mxfp4"},
    }
    packed = {name: "U8" for name in shapes if name.endswith(("_blocks", "_scales"))}
    fit = compute(write_headers(tmp_path / "oss", shapes, config, packed), "8x80GB")
    heads = 2 * (4096 * d + 2 * 512 * d + d * 4096 + 4096 + 1024 + 64)
    replicated = 2 * (experts * d + experts + 3 * d + experts * d)
    divided = experts * 3 * d * 90 * 17 + 2 * experts * 2 * d
    layer = heads // 8 + replicated + divided * 12 // 90
    assert fit.stages[0].weights == layers * layer + 2 * 2 * 201088 * d // 8 + 2 * d
    assert fit.replicated == layers * replicated + 2 * d


def test_matrices_of_experts_are_divided_in_all_families() -> None:
    generating_audio = {"qwen3_omni_moe"}  # its cache is unknown, too
    for name in set(families.list_model_types()) - generating_audio:
        family = families.family(name)
        for tensor in family.tensors.values():
            for leaf in tensor.leaves.values():
                is_expert = not family.expert_axes.isdisjoint(leaf.axes)
                if is_expert and len(leaf.axes) > 2 and not tensor.name.startswith("router"):
                    assert find_split_axes(family, tensor, leaf), (name, tensor.name)


def test_model_of_unknown_type_has_known_weights(tmp_path: Path) -> None:
    path = write_headers(tmp_path / "model", {"a.weight": (4, 4)}, {"model_type": "unheard"})
    fit = compute(path, "24GB")
    assert fit.weights == fit.stages[0].weights == 32
    assert (fit.cache, fit.fits) == (None, None)
    assert compute(path, "2x24GB").stages[0].weights is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_key_value_heads": 16}, "sizes of the model"),
        ({"num_hidden_layers": 33}, "config.json states 33 layers, but 32 are stored"),
        ({"sliding_window": "4096", "model_type": "mistral"}, "is not a positive number"),
    ],
)
def test_cache_of_contradicting_config_is_unknown(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = write_headers(tmp_path / "llama", gqa(**LLAMA_8B), {**LLAMA_CONFIG, **change})
    fit = compute(path, "24GB")
    assert (fit.token_bytes, fit.cache, fit.requests, fit.fits) == (None, None, None, None)
    assert any(reason in text for text in fit.unknown), fit.unknown
    assert not any("no cache" in text for text in fit.unknown)


def test_adapter_needs_its_base_model(tmp_path: Path) -> None:
    factors = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    shapes = {f"{factors}A.weight": (16, 4096), f"{factors}B.weight": (4096, 16)}
    path = write_headers(tmp_path / "adapter", shapes, LLAMA_CONFIG)
    (path / "model.safetensors").rename(path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj"]})
    )
    fit = compute(path, "24GB")
    assert (fit.stages[0].weights, fit.requests, fit.fits) == (None, None, None)
    assert any("is an adapter" in reason for reason in fit.unknown)


def test_missing_dtype_and_context_are_unknown(tmp_path: Path) -> None:
    config = {
        k: v for k, v in LLAMA_CONFIG.items() if k not in ("dtype", "max_position_embeddings")
    }
    path = write_headers(tmp_path / "llama", gqa(**LLAMA_8B), config)
    fit = compute(path, "24GB")
    assert (fit.kv_dtype, fit.context, fit.request_bytes) == (None, None, None)
    assert len(fit.unknown) == 2
    assert compute(path, "24GB", context=1, kv_dtype="bf16").request_bytes == 128 << 10


def test_cache_dtype_of_quantized_model_is_read(tmp_path: Path) -> None:
    scheme = {"num_bits": 8, "type": "float"}
    config = {**LLAMA_CONFIG, "quantization_config": {"kv_cache_scheme": scheme}}
    path = write_headers(tmp_path / "llama", gqa(**LLAMA_8B), config)
    assert compute(path, "24GB").kv_dtype == "float8_e4m3fn"


def write_fp8_llama(folder: Path, quantization: dict[str, Any] | None) -> Path:
    """Write two layers whose linear weights are fp8 with a scale for each row."""
    sizes_of_two = {**LLAMA_8B, "layers": 2}
    shapes = gqa(**sizes_of_two)
    dtypes = {name: "F8_E4M3" for name in shapes if name.endswith("_proj.weight")}
    shapes |= {f"{name}_scale": (shapes[name][0], 1) for name in dtypes}
    config = {**LLAMA_CONFIG, "num_hidden_layers": 2}
    config |= {"quantization_config": quantization} if quantization else {}
    return write_headers(folder, shapes, config, dtypes)


FP8_WEIGHTS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        }
    },
}


def test_cache_dtype_of_model_with_quantized_weights_is_read(tmp_path: Path) -> None:
    """Model types describe dequantized tensors, whose config.json states no quantization."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    path = write_fp8_llama(tmp_path / "fp8", {**FP8_WEIGHTS, "kv_cache_scheme": scheme})
    assert compute(path, "24GB").kv_dtype == "float8_e4m3fn"
    assert compute(path, "24GB").token_bytes == 2 * 2 * 1024
    path = write_fp8_llama(tmp_path / "plain", {**FP8_WEIGHTS, "kv_cache_scheme": None})
    assert compute(path, "24GB").kv_dtype == "bfloat16"
    scheme["type"] = "int"
    path = write_fp8_llama(tmp_path / "int", {**FP8_WEIGHTS, "kv_cache_scheme": scheme})
    fit = compute(path, "24GB")
    assert fit.kv_dtype is None
    assert any("unsupported dtype of the KV cache" in reason for reason in fit.unknown)


@pytest.mark.parametrize(("algorithm", "dtype"), [("FP8", "float8_e4m3fn"), (None, "bfloat16")])
def test_cache_dtype_of_modelopt_is_read(tmp_path: Path, algorithm: str | None, dtype: str) -> None:
    path = write_headers(tmp_path / "llama", gqa(**LLAMA_8B), LLAMA_CONFIG)
    content = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": algorithm}}
    (path / "hf_quant_config.json").write_text(json.dumps(content))
    assert compute(path, "24GB").kv_dtype == dtype


def test_gpus_are_parsed() -> None:
    assert parse_gpus("80GB") == Gpus(1, 80 * 10**9)
    assert parse_gpus("4x80GiB") == Gpus(4, 80 << 30)
    assert parse_gpus(" 4 X 1.5 TB") == Gpus(4, 15 * 10**11)


@pytest.mark.parametrize("text", ["80", "0x80GB", "x80GB", "4x", "many", "-1GB", ""])
def test_invalid_gpus_are_errors(text: str) -> None:
    with pytest.raises(UsageError):
        parse_gpus(text)


def test_error_of_invalid_gpus_shows_complete_value() -> None:
    with pytest.raises(UsageError, match=r"`4x80GBB` is not a size; write it like .*`4x80GB`"):
        parse_gpus("4x80GBB")


def test_tokens_are_parsed() -> None:
    assert check_tokens("32k") == 32768
    assert check_tokens("1M") == 1 << 20
    assert check_tokens(4096) == 4096


@pytest.mark.parametrize("value", ["0", "-1", "1.5k", "32kB", "", True, "999999999999M"])
def test_invalid_tokens_are_errors(value: Any) -> None:
    with pytest.raises(UsageError):
        check_tokens(value)


@pytest.mark.parametrize("options", [{"pp": 3}, {"tp": 3}, {"ep": 3}, {"pp": 2, "tp": 4}])
def test_indivisible_gpus_are_errors(llama: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cannot be divided"):
        ckptctl.inspect(llama, fit="4x24GB", **options)


def test_expert_parallel_size_of_dense_model_is_an_error(llama: Path) -> None:
    with pytest.raises(UsageError, match="has no experts to distribute"):
        ckptctl.inspect(llama, fit="4x24GB", ep=2)
    assert compute(llama, "4x24GB", ep=1).ep == 1


def test_states_of_every_rank_are_not_divided() -> None:
    """Convolutions of keys follow their heads, which are repeated; all others are replicated."""
    of_keys, of_hidden = State(0, 30, 2), State(0, 50)
    assert [of_keys.count_elements(ranks) for ranks in (1, 2, 4)] == [60, 30, 30]
    assert [of_hidden.count_elements(ranks) for ranks in (1, 2, 4)] == [50, 50, 50]


INDEXED_CONFIG = {
    **sizes(2, 64, 96, 8, 4, 16, 128),
    "model_type": "minimax_m3_vl_text",
    "architectures": ["MiniMaxM3VLForCausalLM"],
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "dense"],
    "dense_intermediate_size": 96,
    "index_n_heads": 2,
    "index_head_dim": 24,
}


def test_keys_of_indexer_are_on_every_rank_in_dtype_of_model(tmp_path: Path) -> None:
    shapes = gqa(2, 64, 96, 8, 4, 16, 128)
    for n in range(2):
        attention = f"model.layers.{n}.self_attn."
        shapes |= {f"{attention}q_norm.weight": (16,), f"{attention}k_norm.weight": (16,)}
        del shapes[f"model.layers.{n}.mlp.gate_proj.weight"]
        del shapes[f"model.layers.{n}.mlp.up_proj.weight"]
        shapes[f"model.layers.{n}.mlp.gate_up_proj.weight"] = (192, 64)
    shapes |= {
        "model.layers.1.self_attn.indexer.q_proj.weight": (48, 64),
        "model.layers.1.self_attn.indexer.q_norm.weight": (24,),
        "model.layers.1.self_attn.indexer.k_proj.weight": (24, 64),
        "model.layers.1.self_attn.indexer.k_norm.weight": (24,),
    }
    path = write_headers(tmp_path / "model", shapes, INDEXED_CONFIG)
    index, token = 24 * 2, 2 * 2 * 4 * 16
    assert compute(path, "24GB").token_bytes == token * 2 + index
    assert compute(path, "2x24GB").stages[0].token_bytes == token + index
    assert compute(path, "24GB", kv_dtype="fp8").token_bytes == token + index


@pytest.mark.parametrize("tokens", [1, 7, 8, 47, 1000])
def test_compressed_tokens_of_deepseek_v4_are_counted_by_group(tmp_path: Path, tokens: int) -> None:
    """One layer has a window only, two also compress by 4 with an indexer, and one by 8."""
    golden = Golden.read("deepseek_v4")
    width, index = golden.config["head_dim"], golden.config["index_head_dim"]
    path = golden.save(tmp_path / "model")
    fit = compute(path, "1GB", context=tokens, kv_dtype="fp32")
    window = 4 * width * min(tokens, golden.config["sliding_window"])
    entries = tokens // 4 * 2 * (width + index) + tokens // 8 * width
    overlapping = 2 * (3 * 4 + 4 * 2) * (width + index)  # open group, and half of the last one
    assert fit.request_bytes == 4 * (window + entries + overlapping + 7 * 2 * width)
    both = compute(path, "2x1GB", context=tokens, kv_dtype="fp32")
    assert both.stages[0].request_bytes == fit.request_bytes
    assert fit.max_context and fit.requests


def test_lightning_attention_has_states_and_fused_keys_have_few_heads(tmp_path: Path) -> None:
    """Of four layers, two have lightning attention; the others have two heads of keys."""
    golden = Golden.read("bailing_moe_linear")
    path = golden.save(tmp_path / "model")
    fit = compute(path, "1GB", context=10, kv_dtype="fp32")
    states, keys = 2 * 4 * 16 * 16, 2 * 2 * 2 * 24
    assert fit.request_bytes == 4 * (states + 10 * keys)
    assert compute(path, "2x1GB", context=10, kv_dtype="fp32").stages[0].request_bytes == 2 * (
        states + 10 * keys
    )
    assert compute(path, "4x1GB", context=10, kv_dtype="fp32").stages[0].request_bytes == (
        states + 2 * 10 * keys
    )


def test_layers_that_reuse_a_latent_cache_nothing(tmp_path: Path) -> None:
    golden = Golden.read("mistral_large4")
    fit = compute(golden.save(tmp_path / "model"), "1GB", context=10, kv_dtype="fp32")
    assert fit.cache and sum(use.layers for use in fit.cache) == 3
    assert golden.config["text_config"]["num_hidden_layers"] == 4


def test_options_require_fit(llama: Path) -> None:
    with pytest.raises(UsageError, match="requires"):
        ckptctl.inspect(llama, tp=2)
