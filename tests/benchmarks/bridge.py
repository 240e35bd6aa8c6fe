"""Megatron-Bridge's conversion on a CPU: ``python -m tests.benchmarks.bridge SRC DST``.

Megatron-Bridge 0.3.1 imports Transformer Engine, which needs CUDA, wherever it is to be used or
not. Stand-ins replace it and the families other than Llama (:mod:`tests.oracle.mcore_bridge`).
The layers are Megatron-Core's local ones. Bridge loads the weights, and ``dist_checkpointing`` of
Megatron-Core saves them, as Bridge's ``import_ckpt`` does on a GPU.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.oracle import mcore_bridge

FUSIONS = (
    *("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
    *("gradient_accumulation_fusion", "masked_softmax_fusion", "persist_layer_norm"),
)
KEPT = {"llama", "conversion", "common", "decorators", "hf_pretrained"}
ENGINE = "megatron.core.extensions.transformer_engine"


def convert(source: Path, target: Path) -> None:
    """Convert a Llama checkpoint of transformers to ``torch_dist``."""
    # A save calls both, with or without a GPU.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    state = import_module("megatron.core.parallel_state")
    store = import_module("torch.distributed").HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    state.initialize_model_parallel()
    bridge = _import_bridge().AutoBridge.from_hf_pretrained(str(source), torch_dtype=torch.bfloat16)
    provider = bridge.to_megatron_provider(load_weights=True)
    for name in FUSIONS:
        setattr(provider, name, False)
    provider.transformer_layer_spec = lambda _: specs.get_gpt_layer_local_spec(
        normalization="RMSNorm"
    )
    provider.use_cpu_initialization, provider.perform_initialization = True, False
    provider.bf16, provider.params_dtype = True, torch.bfloat16
    provider.finalize()
    (wrapped,) = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True
    )
    target.mkdir()
    import_module("megatron.core.dist_checkpointing").save(
        wrapped.module.sharded_state_dict(), str(target)
    )


def _import_bridge() -> Any:
    """Import the module of ``AutoBridge`` with the bridge of Llama only."""
    engine = import_module(ENGINE)
    found = find_spec("megatron.bridge")
    assert found is not None
    (root,) = (Path(place) for place in found.submodule_search_locations or ())
    folders = {path.parent.name for path in root.glob("models/*/__init__.py")}
    mcore_bridge.ABSENT = (
        *(name for name in mcore_bridge.ABSENT if name != "megatron.bridge.models"),
        *(f"megatron.bridge.models.{name}" for name in folders - KEPT),
    )
    mcore_bridge.stand_in()
    sys.modules[ENGINE] = engine
    models = ModuleType("megatron.bridge.models")
    models.__path__ = [str(root / "models")]
    sys.modules[models.__name__] = models
    import_module("megatron.bridge.models.llama.llama_bridge")
    return import_module("megatron.bridge.models.conversion.auto_bridge")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
