"""What ranks wrote each for itself with stock torch, consolidated and loaded with stock torch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.verbs.consolidate_metadata import plan_metadata, run_metadata
from tests.checkpoints import differences, load_any_reference
from tests.checkpoints.dcp import distribute
from tests.checkpoints.readers import flatten
from tests.gloo import run_on_ranks
from tests.integration.dcp_ranks import check_on_ranks

SAVES = {
    "2-rows": (2, (2,), "S0"),
    "2-columns": (2, (2,), "S1"),
    "4-rows": (4, (4,), "S0"),
    "4-mesh": (4, (2, 2), "S0,S1"),
    "4-hybrid": (4, (2, 2), "R,S0"),
}
"""For each name the number of ranks, their mesh and the placements."""


def state() -> dict[str, Any]:
    """Return tensors whose sizes do not divide, of several dtypes, and other leaves."""
    torch.manual_seed(7)
    model = {
        "emb": torch.randn(37, 13),
        "half": torch.randn(17, 6).to(torch.bfloat16),
        "three": torch.randn(3, 5),
        "cube": torch.arange(7 * 3 * 2, dtype=torch.int64).reshape(7, 3, 2),
        "mask": torch.tensor([True, False, True, True, False, True]),
        "bytes": torch.arange(11, dtype=torch.uint8),
        "scale": torch.tensor(0.125),
        "count": torch.tensor(12),
    }
    return {
        "model": model,
        "optim": {"exp_avg": {name: torch.randn(t.shape) for name, t in model.items()}},
        "step": 7,
        "betas": [0.9, 0.95],
        "note": "run 3",
    }


def tensors() -> dict[str, torch.Tensor]:
    """Return the tensors of :func:`state` by dotted names."""
    return {k: v for k, v in flatten(state()).items() if isinstance(v, torch.Tensor)}


def _save_rank_local(rank: int, world: int, folder: str) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    for name, (ranks, mesh, words) in SAVES.items():
        if ranks == world:
            save(
                distribute(state(), mesh, words),
                checkpoint_id=f"{folder}/{name}",
                use_collectives=False,
            )


def _save_shards(rank: int, world: int, folder: str) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    for name, words, files in (("rows", "S0", 1), ("columns", "S1", 2)):
        mapping = {key: 1 + n % files for n, key in enumerate(tensors())}
        writer = HuggingFaceStorageWriter(
            f"{folder}/{name}", fqn_to_index_mapping=mapping, save_distributed=True
        )
        save(distribute(tensors(), (world,), words), storage_writer=writer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one directory per save."""
    folder = tmp_path_factory.mktemp("rank-local")
    run_on_ranks(_save_rank_local, [2, 4], str(folder))
    return folder


def test_rank_local_save_converts_bit_for_bit(saved: Path, tmp_path: Path) -> None:
    for name in SAVES:
        assert not (saved / name / ".metadata").exists()
        target = tmp_path / f"{name}.pt"
        ckptctl.convert(saved / name, target, to="torch", only="all")
        problems = differences(flatten(load_any_reference(target)), flatten(state()))
        assert not problems, name


def test_stock_torch_loads_consolidated_metadata_on_other_worlds(saved: Path) -> None:
    for name in SAVES:
        folder = saved / name
        before = {item.name: item.read_bytes() for item in folder.iterdir()}
        run_metadata(plan_metadata(folder))
        after = {item.name: item.read_bytes() for item in folder.iterdir()}
        assert after.keys() - before.keys() == {".metadata"}
        assert {key: after[key] for key in before} == before
        assert ckptctl.inspect(folder).format == "dcp"
        assert ckptctl.inspect(folder).verdict == "complete"
        assert not differences(flatten(load_any_reference(folder)), flatten(state()))
    check_on_ranks([(saved / name, flatten(state())) for name in SAVES], worlds=(1, 2, 3))


@pytest.mark.parametrize("world", [3])
def test_integer_bool_and_scalar_shards_convert_exactly(tmp_path: Path, world: int) -> None:
    """Torch's own consolidation fails on integers, and makes 0 of every 0-d tensor."""
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(_save_shards, [world], folder)
        for name in ("rows", "columns"):
            target = tmp_path / f"{name}.pt"
            ckptctl.convert(Path(folder) / name, target, to="torch", only="all")
            assert not differences(load_any_reference(target), tensors())
