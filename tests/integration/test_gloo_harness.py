"""The multi-rank reader must pass what stock torch wrote and catch what is wrong with it."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import pytest
import torch

from tests.checkpoints import (
    dtype_matrix,
    load_any_reference,
    save_dcp,
    save_dcp_ranks,
    tiny_llama,
    training_state,
)
from tests.checkpoints.readers import differences, flatten
from tests.gloo import RankFailure, run_on_ranks
from tests.integration.dcp_ranks import check_on_ranks


@pytest.mark.slow
def test_stock_outputs_load_on_every_world(tmp_path: Path) -> None:
    model, _ = tiny_llama(layers=1)
    uneven = {"w": torch.arange(7 * 5.0).reshape(7, 5), "v": torch.arange(3), "s": torch.tensor(2)}
    state = training_state({"w": uneven["w"]})
    matrix = dtype_matrix("safetensors.torch")
    check_on_ranks(
        [
            (save_dcp_ranks(tmp_path / "two", model, 2, "S1"), model),
            (save_dcp_ranks(tmp_path / "mesh", uneven, 4, "S0,S1", mesh=(2, 2)), uneven),
            (save_dcp(tmp_path / "training", state), flatten(state)),
            (save_dcp(tmp_path / "dtypes", matrix), matrix),
        ]
    )


def test_sharding_by_name_matches_dcp_metadata(tmp_path: Path) -> None:
    model, _ = tiny_llama()
    folder = save_dcp_ranks(
        tmp_path / "x", model, 3, {"*norm*": "R", "*down_proj*": "S1", "*": "S0"}
    )
    entries = pickle.loads((folder / ".metadata").read_bytes()).state_dict_metadata
    down = entries["model.layers.0.mlp.down_proj.weight"].chunks
    assert [tuple(chunk.sizes) for chunk in down] == [(64, 75), (64, 75), (64, 74)]
    assert len(entries["model.norm.weight"].chunks) == 1
    assert not differences(load_any_reference(folder), model)


def test_rank_check_catches_wrong_values(tmp_path: Path) -> None:
    model, _ = tiny_llama()
    folder = save_dcp(tmp_path / "x", model)
    wrong = {**model, "model.norm.weight": model["model.norm.weight"].flip(0)}
    with pytest.raises(RankFailure, match=r"model\.norm\.weight: other bytes"):
        check_on_ranks([(folder, wrong)], [1])


@pytest.mark.slow
def test_rank_check_catches_missing_chunks(tmp_path: Path) -> None:
    model, _ = tiny_llama()
    folder = save_dcp_ranks(tmp_path / "x", model, 2, "S0")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["lm_head.weight"].chunks.pop()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RankFailure, match=r"lm_head\.weight: other bytes"):
        check_on_ranks([(folder, model)], [2])


def asleep(rank: int, _: int) -> None:
    if rank:
        time.sleep(60)


@pytest.mark.slow
def test_stuck_rank_failure_shows_its_stack() -> None:
    with pytest.raises(RankFailure, match="asleep"):
        run_on_ranks(asleep, [2], timeout=6)
