"""torch's own ``save``, ``async_save`` and ``load`` with our planners and storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckptctl import convert
from tests.checkpoints.llama import tiny_llama
from tests.checkpoints.meta import save_meta
from tests.checkpoints.writers import save_hf
from tests.gloo import run_on_ranks
from tests.integration import stock_ranks
from tests.integration.dcp_ranks import check_on_ranks
from tests.integration.training_ranks import state

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.slow
def test_planner_storage_pairs_are_interchangeable_with_stock(tmp_path: Path) -> None:
    run_on_ranks(stock_ranks.save_all, (1, 2, 3, 4), tmp_path)
    expected = {f"model.{name}": tensor for name, tensor in state().items()} | {"step": 5}
    check_on_ranks([(folder, expected) for folder in sorted(tmp_path.iterdir())])
    run_on_ranks(stock_ranks.load_all, (1, 2, 3, 4), tmp_path)


@pytest.mark.slow
def test_stock_save_plans_are_reused_but_never_stale(tmp_path: Path) -> None:
    for name in ("save_again", "cached"):
        (tmp_path / name).mkdir()
        run_on_ranks(getattr(stock_ranks, name), (2,), tmp_path / name)


@pytest.mark.slow
def test_differing_leaves_are_kept_or_an_error(tmp_path: Path) -> None:
    run_on_ranks(stock_ranks.save_apart, (3,), tmp_path)


def test_write_failure_raises_on_all_ranks_and_publishes_nothing(tmp_path: Path) -> None:
    run_on_ranks(stock_ranks.swallowed, (2,), tmp_path)


@pytest.mark.slow
def test_conflicting_saves_across_ranks_are_refused(tmp_path: Path) -> None:
    run_on_ranks(stock_ranks.places, (2,), tmp_path)


def test_stock_save_without_collectives_is_loadable(tmp_path: Path) -> None:
    run_on_ranks(stock_ranks.rank_local, (2,), tmp_path)


def test_stock_async_save_is_loadable(tmp_path: Path) -> None:
    run_on_ranks(stock_ranks.asynchronous, (2,), tmp_path)


@pytest.mark.slow
def test_unevenly_sharded_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    run_on_ranks(stock_ranks.unevenly_sharded, (2,), tmp_path)


@pytest.mark.slow
def test_compressed_and_safetensors_storage_is_loaded(tmp_path: Path) -> None:
    run_on_ranks(stock_ranks.stored_otherwise, (2,), tmp_path)


def test_replicas_are_balanced_by_bytes(tmp_path: Path) -> None:
    run_on_ranks(stock_ranks.balanced, (4,), tmp_path)


@pytest.mark.slow
def test_hf_and_meta_checkpoints_load_into_sharded_state(tmp_path: Path) -> None:
    weights, config = tiny_llama("llama3")
    hf = save_hf(tmp_path / "hf", weights, config)
    meta = save_meta(tmp_path / "meta", weights, config, mp=2)
    for number, (source, layout) in enumerate(((hf, "torchtune"), (meta, "hf"), (hf, "hf"))):
        truth = _converted(source, tmp_path / f"{number}", layout)
        options = {"model_type": "llama3"}
        run_on_ranks(stock_ranks.load_model, (1, 2, 3), str(source), str(truth), options, "model")
        run_on_ranks(stock_ranks.load_fsdp, (2,), str(source), str(truth), options)


def test_deepspeed_zero_shards_load_into_sharded_state(tmp_path: Path) -> None:
    folder = DATA / "deepspeed" / "z3_sub_w3"
    truth = tmp_path / "truth.pt"
    torch.save(load_file(folder / "expected.safetensors"), truth)
    arguments = (str(folder / "ckpt"), str(truth), {"weights": "master"}, "module")
    run_on_ranks(stock_ranks.load_model, (1, 2, 3), *arguments)


def _converted(source: Path, target: Path, layout: str) -> Path:
    """Return a file of the tensors that the command makes of *source*."""
    convert(source, target, to="torch", model_type="llama3", to_layout=layout)
    return next(target.rglob("*.pt")) if target.is_dir() else target
