"""Values that ranks have for themselves, in a DCP save without collectives and in ranks' files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl import formats
from ckptctl.errors import DamagedError
from ckptctl.formats.base import ReadOptions
from ckptctl.verbs.consolidate_metadata import plan_metadata, run_metadata
from tests.checkpoints.dcp import distribute
from tests.checkpoints.readers import differences, flatten
from tests.gloo import run_on_ranks

MODEL = {"w": torch.arange(35.0).reshape(7, 5)}
LONG = 3 << 20


def own(rank: int) -> dict[str, Any]:
    """Return what a rank saves beside the model."""
    return {
        "step": 7,
        "who": rank,
        "loader": {"seen": {"shard": rank, "rows": [rank, 2]}, "epoch": 1},
        "long": b"a" * LONG + bytes([rank == 2]),
    }


def save(rank: int, world: int, folder: str) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {"model": distribute(MODEL, (world,), "S0"), **own(rank)}
    save(state, checkpoint_id=f"{folder}/dcp", use_collectives=False)
    Path(folder, "files").mkdir(exist_ok=True)
    torch.save(state, f"{folder}/files/checkpoint_{rank}.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    run_on_ranks(save, [3], str(folder))
    return folder


def expected() -> dict[str, Any]:
    """Return the lowest rank's values, and those of others that differ."""
    values = flatten(own(0))
    for rank in (1, 2):
        for name, value in flatten(own(rank)).items():
            if value != flatten(own(0))[name]:
                values[f"rank_{rank}.{name}"] = value
    assert values.keys() >= {"who", "rank_1.who", "rank_2.who", "rank_2.long"}
    assert values.keys().isdisjoint({"rank_1.step", "rank_2.loader.epoch", "rank_1.long"})
    return values


@pytest.mark.parametrize("form", ["dcp", "files"])
def test_dcp_and_rank_files_keep_only_differing_values(
    saved: Path, tmp_path: Path, form: str
) -> None:
    ckptctl.convert(saved / form, tmp_path / "out.pt", to="torch", only="all")
    found = flatten(torch.load(tmp_path / "out.pt", weights_only=False))
    assert not differences({"w": found.pop("model.w")}, MODEL)
    assert found == expected()
    notes = ckptctl.inspect(saved / form).notes
    assert any("under `rank_N.`" in note and "`who`" in note for note in notes)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_torch_loads_plain_and_rank_prefixed_values(saved: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    source = Path(shutil.copytree(saved / "dcp", tmp_path / "copy"))
    run_metadata(plan_metadata(source))
    state: dict[str, Any] = {
        "model": {"w": torch.zeros(7, 5)},
        "who": None,
        "step": None,
        "rank_1": {"who": None},
        "rank_2": {"who": None, "long": None},
    }
    load(state, checkpoint_id=source, no_dist=True)
    assert torch.equal(state["model"]["w"], MODEL["w"])
    assert (state["who"], state["step"], state["rank_1"]) == (0, 7, {"who": 1})
    assert state["rank_2"] == {"who": 2, "long": own(2)["long"]}


def test_missing_rank_data_file_is_damage(saved: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(saved / "dcp", tmp_path / "copy"))
    (source / "__1_0.distcp").unlink()
    with pytest.raises(DamagedError) as caught:
        formats.open_checkpoint(source)
    assert "__1_0.distcp" in f"{caught.value.why}"
    found = formats.get_format("dcp-rank-local").read(source, ReadOptions(partial=True))
    assert "__1_0.distcp" in [one.file for one in found.findings]
    assert {"who", "rank_2.who"} <= found.blobs.keys()
    assert "rank_1.who" not in found.blobs
