"""transformers' ``save_pretrained(distributed_checkpoint=True)``, and the live weights.

``python -m tests.oracle.trainers.jobs.transformers_shards`` writes the sample in ``tests/data``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

SAMPLE = Path(__file__).parents[3] / "data" / "hf-rank-shards" / "transformers"
SIZES = {
    "vocab_size": 33,  # the ranks' shards have different sizes
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_model(folder: Path, **changes: Any) -> Path:
    """Write a Llama with random weights for the ranks to load."""
    torch.manual_seed(34)
    config: Any = LlamaConfig(**SIZES | changes)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (parameter.ndim == 1))
    model.save_pretrained(folder)
    return folder


def save(rank: int, world: int, model: str, folder: str, sizes: dict[str, int]) -> None:
    """Load *model* on all ranks, and let transformers save their shards."""
    loaded: Any = AutoModelForCausalLM
    live = loaded.from_pretrained(model, distributed_config=DistributedConfig(**sizes))
    assert any(isinstance(one, DTensor) for one in live.parameters())
    live.save_pretrained(Path(folder) / "ckpt", distributed_checkpoint=True)
    full = {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in live.state_dict().items()
    }
    if rank == 0:
        save_file(full, Path(folder) / "expected.safetensors")


if __name__ == "__main__":
    import tempfile

    from tests.gloo import run_on_ranks

    shutil.rmtree(SAMPLE, ignore_errors=True)
    SAMPLE.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        source = save_model(Path(folder) / "model")
        job = "tests.oracle.trainers.jobs.transformers_shards:save"
        run_on_ranks(job, [2], str(source), str(SAMPLE), {"fsdp_size": 2})
    for file in SAMPLE.rglob("*.*"):
        file.chmod(0o644)
