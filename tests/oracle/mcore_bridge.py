"""Megatron-Bridge where there is no GPU: imported with stand-ins for what it does not need.

It imports Transformer Engine, loggers and other models wherever they are to be used or not. The
modules that stand in for them have classes of every name, without parameters, which nobody calls.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from packaging.version import Version

ABSENT: tuple[str, ...] = (
    *("megatron.bridge.models", "megatron.bridge.recipes", "megatron.bridge.data"),
    *("torch.utils.tensorboard", "tensorboard", "wandb", "mlflow", "hydra", "modelopt"),
    *("transformer_engine", "nvidia_resiliency_ext", "nvdlfw_inspect", "emerging_optimizers"),
    *("flash_attn", "fla", "causal_conv1d", "mamba_ssm", "tilelang", "megatron_energon"),
    *("qwen_vl_utils", "timm", "open_clip"),
)


class _Anything(type):
    """A class with every attribute."""

    def __getattr__(cls, name: str) -> Any:
        return _named(name)


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _named(name)


def _named(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (torch.nn.Module,), {})


class _StandIns(MetaPathFinder, Loader):
    def __init__(self, absent: Sequence[str]) -> None:
        self.absent = absent

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        absent = any(f"{name}.".startswith(f"{one}.") for one in self.absent)
        return ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in() -> None:
    """Let modules of Bridge be imported, and nothing of it that they do not need."""
    if isinstance(sys.meta_path[0], _StandIns):
        return
    sys.modules["megatron.core.extensions.transformer_engine"] = None  # type: ignore[assignment]
    _empty_package("megatron.bridge")
    sys.meta_path.insert(0, _StandIns(ABSENT))


def stand_in_for_engine() -> None:
    """Let models of Bridge 0.6 be imported one by one, in a process that runs none of them."""
    for name in ("gpt_model", "experimental_attention_variant_module_specs"):
        import_module(f"megatron.core.models.gpt.{name}")  # which work without the engine
    vars(import_module("megatron.core.utils"))["_te_version"] = Version("0")
    _empty_package("megatron.bridge")
    _empty_package("megatron.bridge.models")
    sys.meta_path.insert(0, _StandIns([one for one in ABSENT if one != "megatron.bridge.models"]))


def _empty_package(name: str) -> None:
    """Let the modules of a package be imported without what the package itself imports."""
    found = find_spec(name)
    assert found is not None
    package = ModuleType(name)
    package.__path__ = list(found.submodule_search_locations or ())
    sys.modules[name] = package


def peft_of(file: Path) -> Any:
    """Return what Bridge makes of the section ``peft`` of a ``run_config.yaml``."""
    stated = dict(yaml.safe_load(file.read_text())["peft"])
    module, _, name = stated.pop("_target_").rpartition(".")
    stand_in()
    return getattr(import_module(module), name)(**stated)
