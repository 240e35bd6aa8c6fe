"""transformers' ``save_pretrained(distributed_checkpoint=True)`` on two ranks: the live weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptctl
from tests.checkpoints import differences, load_any_reference
from tests.gloo import run_on_ranks

pytestmark = pytest.mark.oracle

JOBS = pytest.importorskip(
    "tests.oracle.trainers.jobs.transformers_shards",
    reason="transformers 5.24 or newer writes it",
    exc_type=ImportError,
)
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "fsdp": ({}, {"fsdp_size": 2}),
    "fsdp_tied": ({"tie_word_embeddings": True}, {"fsdp_size": 2}),
    "tensor_parallel": ({"vocab_size": 34}, {"tp_size": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_distributed_save_converts_to_the_live_weights(case: str, tmp_path: Path) -> None:
    changes, sizes = CASES[case]
    model = JOBS.save_model(tmp_path / "model", **changes)
    run_on_ranks(f"{JOBS.__name__}:save", [2], str(model), str(tmp_path), sizes)
    source = tmp_path / "ckpt"
    found = ckptctl.verify(source, ranks=2)
    assert found.complete and ckptctl.inspect(source).format == "hf-rank-shards"
    ckptctl.convert(source, tmp_path / "out", to="hf")
    live = load_any_reference(tmp_path / "expected.safetensors")
    written = load_any_reference(tmp_path / "out")
    if case == "fsdp_tied":
        live.pop("lm_head.weight")
        written.pop("lm_head.weight", None)
    assert not differences(written, live)
    assert not differences(written, load_any_reference(model))
