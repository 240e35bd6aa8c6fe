"""What ranks do in the test of models of transformers that come from a Hub."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (  # the last two before ranks are forked, which share them
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaModel,
)

import ckptctl

TOKENS = torch.arange(24).view(2, 12)


def from_the_hub(rank: int, world: int, url: str, folder: str, headless: bool) -> None:
    """Load a sharded model straight from its repository; compare it with the whole one."""
    os.environ["HF_TOKEN"] = f"rank-{rank}"  # by which the server tells who asks
    automatic: Any = AutoModel if headless else AutoModelForCausalLM
    with torch.device("meta"):
        model = automatic.from_config(AutoConfig.from_pretrained(folder))
    inner = model if headless else model.model
    for layer in inner.layers:
        fully_shard(layer)
    fully_shard(model)
    report = ckptctl.load(model, url, strict="state" if headless else True)
    local = {id(one): one.to_local() for one in model.parameters() if isinstance(one, DTensor)}
    assert report.bytes_read == sum(one.nbytes for one in local.values())
    rotary = {"inv_freq", "original_inv_freq"}
    assert {name.rpartition(".")[2] for name in report.on_meta} == rotary, report.on_meta
    for name in report.on_meta:
        owner = model.get_submodule(name.rpartition(".")[0])
        if owner.inv_freq.is_meta:
            owner.to_empty(device="cpu", recurse=False)
            model._init_weights(owner)
    kind: Any = LlamaModel if headless else LlamaForCausalLM
    whole = kind.from_pretrained(folder, dtype=torch.float32)
    if not headless:
        one = model.lm_head.weight is model.model.embed_tokens.weight
        assert one == whole.config.tie_word_embeddings
    with torch.no_grad():
        mine, theirs = (one.eval()(TOKENS)[0] for one in (model, whole))
    torch.testing.assert_close(mine, theirs)
    print(f"rank {rank} read {report.bytes_read:,} bytes of tensors")
