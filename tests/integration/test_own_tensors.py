"""Small tensors of which every rank has its own are kept for each; stock torch reads all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl.errors import MappingError
from tests.gloo import run_on_ranks
from tests.integration import own_tensor_ranks
from tests.integration.own_tensor_ranks import state_of
from tests.integration.saving_ranks import stock_load


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("own")
    run_on_ranks(own_tensor_ranks.each_rank_gets_its_own, [2, 4], root)
    return root


@pytest.mark.slow
def test_stock_torch_loads_lowest_rank_under_plain_name(saved: Path) -> None:
    for folder in sorted(saved.iterdir()):
        world, seed = (int(number) for number in folder.name.split("-")[-2:])
        wanted = {"rng": torch.zeros(5056, dtype=torch.uint8), "scale": torch.tensor(0.0)}
        apart = {f"rank_{rank}.rng": torch.zeros_like(wanted["rng"]) for rank in range(1, world)}
        found = stock_load(folder, wanted | apart)
        for rank in range(world):
            name = f"rank_{rank}.rng" if rank else "rng"
            assert torch.equal(found[name], state_of(rank, 1, seed)["rng"]), (folder, rank)
        assert float(found["scale"]) == 0.5 + seed


def test_tensors_equal_on_all_ranks_are_saved_once(saved: Path) -> None:
    found = ckptctl.inspect(saved / "save-4-2")
    apart = {one.name for one in found.tensors if one.name.startswith("rank_")}
    names = ("rng", "loader.position")
    assert apart == {f"rank_{rank}.{name}" for rank in (1, 2, 3) for name in names}
    assert ckptctl.verify(saved / "save-4-2", level="full").verdict == "complete"


def test_new_ranks_load_lowest_rank_tensors_and_report(saved: Path) -> None:
    run_on_ranks(own_tensor_ranks.new_ranks_are_told, [4], saved / "save-2-0")


def test_torch_output_contains_tensors_of_every_rank(saved: Path, tmp_path: Path) -> None:
    ckptctl.convert(saved / "save-2-0", tmp_path / "one.pt", to="torch", only="all")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(found["rng"], state_of(0, 1)["rng"])
    assert torch.equal(found["rank_1"]["rng"], state_of(1, 1)["rng"])


def test_rank_prefixed_name_collision_is_refused() -> None:
    from ckptctl.save_load.saving.global_plan import make_global_plan
    from ckptctl.save_load.saving.local_shards import (
        LocalChunk,
        LocalShards,
        TensorMeta,
        pack_shards,
    )

    kinds = {name: TensorMeta("uint8", (2,), (name,), False) for name in ("rng", "rank_1.rng")}
    chunks = [LocalChunk(name, (0,), (2,)) for name in kinds]
    held = [
        LocalShards(kinds, chunks, {"rng": bytes([rank]) * 16}, {"rng": ("rng",)})
        for rank in range(2)
    ]
    with pytest.raises(MappingError, match="already contains"):
        make_global_plan([pack_shards(one) for one in held])
