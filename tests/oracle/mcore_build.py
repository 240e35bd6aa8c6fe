"""Megatron-Core's GPT model on the CPU, without Transformer Engine, Apex and CUDA.

Only ranks import this module. What stands in for CUDA holds no parameters. Modules of our own are a
norm whose weight is added to one, which Apex has, and OLMoE's norms and the scale of Mistral's
queries, which Megatron-Bridge adds.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from queue import Queue
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models import backends
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import dot_product_attention, multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from tests.oracle import mcore_mamba
from tests.oracle.mcore_models import VOCABULARY, Ranks, Recipe, padded

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "quick_gelu": quick_gelu,
    "squared_relu": squared_relu,
    "gelu": partial(torch.nn.functional.gelu, approximate="tanh"),
}
INPUT, DELTA, FED, LATENT_NORMS = (
    {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    {"input_layernorm.": "self_attention.in_proj.layer_norm_"},
    {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    },
)
"""Where Transformer Engine's specification fuses a norm with the linear layer behind it."""
NORMS = "LNImpl", "WrappedTorchNorm"
"""What the modules of specifications call the class of a norm."""


class ZeroCentredNorm(torch.nn.Module):
    """LayerNorm or RMSNorm whose weight is added to one."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size))
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.empty(hidden_size))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Norm over the last dimension."""
        shape, weight = self.weight.shape, self.weight + 1
        if not hasattr(self, "bias"):
            return torch.nn.functional.rms_norm(value, shape, weight, self.eps)
        return torch.nn.functional.layer_norm(value, shape, weight, self.bias, self.eps)


class DeltaNets(LocalSpecProvider):  # type: ignore[misc]
    """Parts of gated delta nets, of which there is no local specification."""

    def column_parallel_layer_norm_linear(self) -> type:
        """Return the layer that takes what the layer's own norm makes of its input."""
        linear: type = ColumnParallelLinear
        return linear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """Return the norm of what they put out."""
        return ZeroCentredNorm


class Duplicated(torch.nn.Linear):
    """Linear layer of an indexer, which every tensor-parallel rank has whole."""

    def __init__(self, size: int, out: int, **_: Any) -> None:
        super().__init__(size, out, bias=False)

    def forward(self, value: torch.Tensor) -> Any:
        """Return no bias beside the product, as layers of Megatron-Core do."""
        return super().forward(value), None


class Indexers(LocalSpecProvider):  # type: ignore[misc]
    """Parts of sparse attention, of which there is no local specification."""

    def linear(self) -> type:
        """Return the linear layer of the indexer."""
        return Duplicated


def _l2_norm(value: torch.Tensor) -> torch.Tensor:
    return value * torch.rsqrt(value.square().sum(-1, keepdim=True) + 1e-6)


class ScaledProducts(DotProductAttention):  # type: ignore[misc]
    """Attention whose queries grow with their position, as in Llama 4.

    Megatron-Bridge has the same for Transformer Engine (``MinistralTEDotProductAttention``).
    """

    def forward(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Scale queries by their position, if the configuration says so."""
        beta = getattr(self.config, "llama_4_scaling_beta", 0.0)
        if beta:
            places = torch.arange(query.shape[0]) // self.config.llama_4_scaling_length
            query = query * (1 + beta * torch.log1p(places)).view(-1, 1, 1, 1)
        found: torch.Tensor = super().forward(query, *args, **kwargs)
        return found


class LatentProducts(ScaledProducts):
    """Attention whose values have a width of their own, as Transformer Engine's takes it."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("k_channels", "v_channels"):
            kwargs.pop(name, None)
        super().__init__(config, *args, **kwargs)
        self.hidden_size_per_partition = self.num_attention_heads_per_partition * config.v_head_dim


class WholeNorms(SelfAttention):  # type: ignore[misc]
    """Attention whose queries and keys are normed over all heads."""

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        heads = (config.num_attention_heads, config.num_query_groups)
        self.q_layernorm, self.k_layernorm = (
            submodules.q_layernorm(
                config=config, hidden_size=count * config.kv_channels, eps=config.layernorm_epsilon
            )
            for count in heads
        )

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Norm after the split by heads instead of within it."""
        norms = self.q_layernorm, self.k_layernorm
        self.q_layernorm = self.k_layernorm = None
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        self.q_layernorm, self.k_layernorm = norms
        return _normed(query, norms[0]), _normed(key, norms[1]), value


def _normed(heads: torch.Tensor, norm: Any) -> torch.Tensor:
    """Norm over the heads of all tensor-parallel ranks."""
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(heads) for _ in range(group.size())]
    dist.all_gather(parts, heads.contiguous(), group=group)
    whole = torch.cat(parts, dim=2)
    normed: torch.Tensor = norm(whole.flatten(2)).view_as(whole)
    own: torch.Tensor = normed.chunk(group.size(), dim=2)[group.rank()]
    return own.contiguous()


@cache
def without_cuda() -> None:
    """Let modules that ask for CUDA be built and run without it."""
    ones = torch.ones
    warnings.simplefilter("ignore")
    torch._dynamo.config.disable = True  # small functions would be compiled
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore
    torch.ones = lambda *size, device=None, **options: ones(*size, **options)
    dot_product_attention.tensor_parallel.get_cuda_rng_tracker = mcore_mamba.NoTracker
    multi_latent_attention.HAVE_TE = False
    moe_utils.te_general_gemm = None
    for name in [name for name in sys.modules if name.startswith(gated_delta_net.__name__)]:
        delta: Any = sys.modules[name]  # a package since Megatron-Core 0.19
        delta.HAVE_FLA = True
        delta.l2norm = _l2_norm
        delta.chunk_gated_delta_rule = gated_delta_net.torch_chunk_gated_delta_rule
        delta.get_cuda_rng_tracker = mcore_mamba.NoTracker
    filesystem_async._results_queue = Queue()  # or every rank starts a process of its own


def build(recipe: Recipe, ranks: Ranks) -> GPTModel:
    """Return this rank's stage of the model, its values of no account.

    Args:
        recipe: What the model is.
        ranks: Their product is the world size.
    """
    without_cuda()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=ranks.tensor,
        pipeline_model_parallel_size=ranks.pipeline,
        expert_model_parallel_size=ranks.expert,
        expert_tensor_parallel_size=recipe.options.get("expert_tensor_parallel_size"),
    )
    config = _config(recipe, ranks)
    if recipe.pattern:
        hybrid = mcore_mamba.build(config, recipe.pattern, **_arguments(recipe, ranks))
        return hybrid.eval()
    norm = ZeroCentredNorm if config.layernorm_zero_centered_gamma else WrappedTorchNorm
    places = [(holder, name) for holder in (backends, specs) for name in NORMS]
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(mock.patch.object(*place, norm))
        spec = _specification(recipe, config)
        further = specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        model = GPTModel(
            config,
            spec,
            mtp_block_spec=further,
            **_arguments(recipe, ranks),
        )
    return model.eval()


def _arguments(recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    return {
        "vocab_size": padded(VOCABULARY, ranks.tensor),
        "max_sequence_length": 4096,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "parallel_output": False,
        **recipe.model,
    }


def _config(recipe: Recipe, ranks: Ranks) -> TransformerConfig:
    options = dict(recipe.options)
    options["activation_func"] = ACTIVATIONS[options["activation_func"]]
    kind = MLATransformerConfig if recipe.latent else TransformerConfig
    config = kind(
        **options,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=ranks.tensor,
        pipeline_model_parallel_size=ranks.pipeline,
        expert_model_parallel_size=ranks.expert,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        deterministic_mode=True,  # convolutions and delta nets of torch
    )
    for name, value in recipe.extra.items():
        setattr(config, name, value)
    return config


def _specification(recipe: Recipe, config: TransformerConfig) -> Any:
    """Return the local specification, its norms under the names of Transformer Engine's."""
    sparse = config.experimental_attention_variant == "dsa"
    with mock.patch.object(config, "experimental_attention_variant", None):  # put in below
        spec = specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization
        )
    first = get_transformer_layer_offset(config)
    linear = variants.get_linear_attention_pattern(config)[first:]
    spec.layer_specs = [
        _with_delta_net(layer, config) if one else layer
        for layer, one in zip(spec.layer_specs, linear, strict=False)
    ]
    for layer in spec.layer_specs:
        if sparse:
            attention = variants.get_dsa_module_spec_for_backend(config, Indexers())
            for name in ("linear_q_down_proj", "linear_kv_down_proj"):
                setattr(attention.submodules, name, ColumnParallelLinear)
            layer.submodules.self_attention = attention
    for layer in spec.layer_specs:
        attention, mlp = layer.submodules.self_attention, layer.submodules.mlp
        if "llama_4_scaling_beta" in recipe.extra:
            attention.submodules.core_attention = ScaledProducts
        if recipe.latent and not sparse:
            attention.submodules.core_attention = LatentProducts
        if recipe.whole_norms:
            attention.module = WholeNorms
        if not recipe.local:
            delta = attention.module is gated_delta_net.GatedDeltaNet
            names = dict(LATENT_NORMS if recipe.latent else DELTA if delta else INPUT)
            names = {} if sparse else names
            if _module_class(mlp) is not MoELayer:
                names |= FED
            layer.submodules.sharded_state_dict_keys_map = names
    return spec


def _module_class(part: Any) -> Any:
    """Return the class of the module that *part* of a specification builds.

    Since Megatron-Core 0.17, feed-forward parts are partial calls of a class method.
    """
    if not isinstance(part, partial):
        return part.module
    return getattr(part.func, "__self__", part.func)


def _with_delta_net(layer: Any, config: TransformerConfig) -> Any:
    attention = variants.get_gated_delta_net_module_spec(config, DeltaNets())
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))


class _Named:
    """What a specification is made of, by the names of the methods that provide it."""

    def __getattr__(self, name: str) -> Any:
        found = (name, None) if name == "grouped_mlp_modules" else name
        return lambda *_, **__: found


def norms_of_transformer_engine(config: TransformerConfig) -> list[set[str]]:
    """Return the names of each layer's norms in Transformer Engine's specification.

    A linear layer that norms its input has the norm as ``layer_norm_weight``.
    """
    with (
        mock.patch.object(specs, "TESpecProvider", _Named, create=True),
        mock.patch.object(variants, "TESpecProvider", _Named, create=True),
        mock.patch.object(config, "transformer_impl", "transformer_engine"),
    ):
        return [set(_norms("", layer.submodules)) for layer in _layers(config)]


def _layers(config: TransformerConfig) -> list[Any]:
    if config.experimental_attention_variant:
        make = variants.get_transformer_block_with_experimental_attention_variant_spec
        layers: list[Any] = make(config).layer_specs
        return layers
    routed = variants.get_moe_layer_pattern(config)
    return [
        specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts if one else None,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
        )
        for one in routed
    ]


def _norms(prefix: str, submodules: Any) -> Iterator[str]:
    for name, part in vars(submodules).items():
        options = part.keywords if isinstance(part, partial) else {}
        inner = options.get("submodules", getattr(part, "submodules", None))
        if part == "column_parallel_layer_norm_linear":
            yield f"{prefix}{name}.layer_norm_weight"
        elif part == "layer_norm":
            yield f"{prefix}{name}.weight"
        elif inner is not None:
            yield from _norms(f"{prefix}{name}.", inner)
