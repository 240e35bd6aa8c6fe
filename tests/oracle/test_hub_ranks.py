"""Models of ``AutoModel.from_config`` under FSDP2, filled on 8 ranks straight from a Hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests import hub_server
from tests.gloo import run_on_ranks
from tests.hub_server import Hub

WORLD = 8
BLOCK = 256 << 10
"""What is read of a remote file at once."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served, server = hub_server.start()
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    yield served
    server.shutdown()
    server.server_close()


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["untied", "tied", "headless"])
def test_ranks_download_only_their_own_bytes(hub: Hub, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=kind == "tied",
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model", max_shard_size="60MB")
    hub.add("org/model", tmp_path / "model")
    run_on_ranks(
        "tests.oracle.hub_ranks:from_the_hub",
        [WORLD],
        "hf://org/model",
        str(tmp_path / "model"),
        kind == "headless",
        timeout=500,
    )
    total = sum(one.nbytes for one in model.parameters())
    if kind == "headless":
        total -= model.lm_head.weight.nbytes
    tensors = len(list(model.parameters()))
    for rank in range(WORLD):
        sent = hub.sent_to[f"Bearer rank-{rank}"]
        assert total / WORLD <= sent <= total / WORLD + 2 * BLOCK * tensors, (rank, sent, total)
    assert sum(hub.sent_to.values()) < 2 * total, "one copy for all of them, and headers"
