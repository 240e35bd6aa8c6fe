"""What ranks saved each for itself with stock torch, loaded without any collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.dcp import distribute
from tests.gloo import run_on_ranks
from tests.integration.dcp_ranks import SHARDINGS
from tests.integration.loading_ranks import require_equal, wiped


def _full() -> dict[str, Any]:
    torch.manual_seed(3)
    return {"emb": torch.randn(37, 13), "bias": torch.randn(17), "count": torch.tensor(4)}


def _save(rank: int, world: int, folder: str) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    placed = distribute(_full(), (world,), "S0")
    state = {"model": placed, "mine": [rank]}
    save(state, checkpoint_id=folder, use_collectives=False)


def _load(rank: int, world: int, folder: str, saved_on: int) -> None:
    import torch.distributed as dist

    from ckptctl.distributed.loading import load as loading

    full = _full()
    for mesh, words in SHARDINGS[world]:
        placed = distribute(wiped(full), mesh, words)
        state: dict[str, Any] = {"model": placed, "mine": None}
        calls = _counted(dist)
        report = loading.load(state, folder, collectives=False)
        assert not calls, calls
        alone = world == saved_on and words == "S0"
        noted = any("only the files of rank" in note for note in report.notes)
        assert noted == alone, (words, report.notes)
        assert state["mine"] == [rank if rank < saved_on else 0]
        _restored(dist)
        require_equal(placed, full, words)


def _counted(dist: Any) -> list[str]:
    """Note every call of a collective from now on."""
    calls: list[str] = []

    def watched(name: str, own: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            calls.append(name)
            return own(*given, **named)

        return call

    for name in ("all_gather_object", "gather_object", "broadcast", "barrier", "all_reduce"):
        _OWN[name] = getattr(dist, name)
        setattr(dist, name, watched(name, _OWN[name]))
    return calls


_OWN: dict[str, Any] = {}


def _restored(dist: Any) -> None:
    for name, own in _OWN.items():
        setattr(dist, name, own)


@pytest.mark.slow
def test_stock_rank_local_saves_load_without_collectives(tmp_path: Path) -> None:
    run_on_ranks(_save, (2,), str(tmp_path / "saved"))
    run_on_ranks(_load, (1, 2, 3), str(tmp_path / "saved"), 2)
