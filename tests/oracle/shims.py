"""Stand-ins that let other people's packages be imported and run without a GPU.

Each function puts modules into ``sys.modules`` and may be called twice. What is replaced is never
what is being compared: names and shapes of parameters and the arithmetic stay the package's own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch


class _Anything:
    """Stands for any class, function or decorator of a package that is not there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


def stub(*names: str) -> None:
    """Put empty modules of those names into ``sys.modules`` where they cannot be imported."""
    for name in names:
        if name in sys.modules or ("." not in name and importlib.util.find_spec(name)):
            continue
        module = _Stub(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module


@contextmanager
def stubbed(*names: str) -> Iterator[None]:
    """As :func:`stub`, until the block ends: for packages whose presence others ask about."""
    missing = [name for name in names if name not in sys.modules]
    stub(*names)
    try:
        yield
    finally:
        for name in missing:
            if isinstance(sys.modules.get(name), _Stub):
                del sys.modules[name]


def torchvision() -> Any:
    """Return a context in which torchtune's vision models can be imported."""
    return stubbed(
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    )


TORCHVISION = (
    "torchvision",
    "torchvision.datasets",
    "torchvision.models",
    "torchvision.models.feature_extraction",
    "torchvision.ops",
    "torchvision.ops.misc",
    "torchvision.transforms",
    "torchvision.transforms.functional",
)
"""Modules that timm imports and its models do not need."""


def timm() -> Any:
    """Return timm, which transformers then uses without torchvision; skip if it is not there."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("not installed: timm")
    with stubbed(*TORCHVISION):
        misc = sys.modules["torchvision.ops.misc"]
        if isinstance(misc, _Stub):
            vars(misc)["FrozenBatchNorm2d"] = type("FrozenBatchNorm2d", (torch.nn.Module,), {})
        package: Any = importlib.import_module("timm")
    package.layers.set_fused_attn(False)
    from transformers.models.gemma3n import configuration_gemma3n
    from transformers.models.timm_wrapper import modeling_timm_wrapper

    modeling: Any = modeling_timm_wrapper
    modeling.timm = package
    for module in (configuration_gemma3n, modeling):
        module.requires_backends = lambda *args: None
    return package


def triton() -> Any:
    """Return a context in which torchtitan can be imported."""
    # torch asks once whether triton is there, and should learn the truth.
    import torch._inductor.compile_fx
    import torch.utils._triton

    torch.utils._triton.has_triton_package()
    return stubbed("triton", "triton.language", "torch.utils.tensorboard")


FLA = (
    "fla",
    "fla.modules",
    "fla.modules.conv",
    "fla.modules.conv.triton",
    "fla.modules.conv.triton.ops",
    "fla.ops",
    "fla.ops.gated_delta_rule",
    "fla.ops.gated_delta_rule.chunk",
    "fla.ops.gated_delta_rule.fused_recurrent",
)


@contextmanager
def fla() -> Iterator[None]:
    """Let torchtitan's Qwen 3.5 be imported: its kernel for delta nets becomes a loop over tokens.

    Autograd functions have to be classes, as theirs are.
    """
    with stubbed(*FLA):
        for name, function in (
            ("fla.modules.conv.triton.ops", "CausalConv1dFunction"),
            ("fla.ops.gated_delta_rule.chunk", "ChunkGatedDeltaRuleFunction"),
            ("fla.ops.gated_delta_rule.fused_recurrent", "FusedRecurrentFunction"),
        ):
            setattr(sys.modules[name], function, type(function, (torch.autograd.Function,), {}))
        rule = sys.modules["fla.ops.gated_delta_rule"]
        rule.chunk_gated_delta_rule = _gated_delta_rule  # type: ignore[attr-defined]
        yield


def _gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return what a gated delta net says: Yang et al., "Gated Delta Networks", arXiv:2412.06464.

    Args:
        q: Queries ``[batch, tokens, heads, key dimension]``, keys likewise.
        v: Values ``[batch, tokens, heads, value dimension]``.
        decay: Logarithms ``[batch, tokens, heads]`` of what is left of the state.
        beta: How much of the state at a key is replaced, ``[batch, tokens, heads]``.
    """
    assert options.pop("use_qk_l2norm_in_kernel")
    assert not any(value is not None for value in options.values())
    normed = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = normed
    q = q / q.shape[-1] ** 0.5
    state = v.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])
    said = []
    for token in range(q.shape[1]):
        state = state * decay[:, token, :, None, None].exp()
        known = torch.einsum("bhk,bhkv->bhv", k[:, token], state)
        change = (v[:, token] - known) * beta[:, token, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, token], change)
        said.append(torch.einsum("bhk,bhkv->bhv", q[:, token], state))
    return torch.stack(said, 1), None


_CAUSAL = [True]


def xformers() -> None:
    """Let mistral_inference be imported; its attention becomes torch's.

    Without a cache mistral_inference hands over no mask, for text and for pictures alike. Text is
    causal; see :func:`bidirectional`.
    """
    stub("xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias")
    module = sys.modules["xformers.ops.fmha"]
    if isinstance(module, _Stub):
        module.memory_efficient_attention = _attention  # type: ignore[attr-defined]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=_CAUSAL[0])
    return out.transpose(1, 2).contiguous()


@contextmanager
def bidirectional() -> Iterator[None]:
    """Let every token see every other one in mistral_inference: one picture at a time."""
    _CAUSAL[0] = False
    try:
        yield
    finally:
        _CAUSAL[0] = True


@contextmanager
def no_cuda() -> Iterator[None]:
    """Let ``tensor.cuda()`` be the tensor: llama_models puts its caches on the GPU."""
    with mock.patch.object(torch.Tensor, "cuda", lambda self: self):
        yield


@contextmanager
def full_precision() -> Iterator[None]:
    """Let ``tensor.bfloat16()`` be the tensor and grouped products loops of products.

    torchtitan casts to bf16 before ``torch._grouped_mm``, whatever the model's dtype.
    """
    with (
        mock.patch.object(torch.Tensor, "bfloat16", lambda self: self),
        mock.patch.object(torch, "_grouped_mm", _grouped_mm),
    ):
        yield


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    out = a.new_zeros(a.shape[0], b.shape[-1])
    for expert, (start, end) in enumerate(zip(starts, ends, strict=True)):
        out[start:end] = a[start:end] @ b[expert]
    return out


@contextmanager
def integer_histograms() -> Iterator[None]:
    """Let ``torch.histc`` count integers, as it does on a GPU: torchtitan 0.2 counts tokens."""
    histc = torch.histc

    def counted(values: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return histc(values.float(), **kwargs).to(values.dtype)

    with mock.patch.object(torch, "histc", counted):
        yield


def titan_eager() -> None:
    """Let torchtitan 0.3 attend without compiling a kernel."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torchtitan.models.common import attention

    attention.FlexAttention._compiled_flex_attn = flex_attention
    attention._compiled_create_block_mask = create_block_mask


@contextmanager
def another_torchtitan(folder: Path) -> Iterator[None]:
    """Let ``import torchtitan`` find the version in *folder* until the block ends."""
    own = _pop_torchtitan()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        _pop_torchtitan()
        sys.modules.update(own)


def _pop_torchtitan() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def one_rank() -> Iterator[None]:
    """Initialize fairscale's model parallelism with a single process."""
    import tempfile

    import torch.distributed as dist
    from fairscale.nn.model_parallel import initialize

    with tempfile.TemporaryDirectory() as folder:
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
            )
        with contextlib.redirect_stdout(io.StringIO()):
            initialize.initialize_model_parallel(1)
        try:
            yield
        finally:
            initialize.destroy_model_parallel()
            dist.destroy_process_group()
