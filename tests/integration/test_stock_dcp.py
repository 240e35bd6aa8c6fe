"""What ckptctl writes, stock torch reads: on one rank and on several with other shardings."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import ckptctl
from tests.checkpoints import (
    differences,
    dtype_matrix,
    load_any_reference,
    save_dcp_ranks,
    save_meta,
    save_torch,
    save_training_dcp,
    tiny_llama,
    training_state,
)
from tests.checkpoints.readers import flatten
from tests.integration.dcp_ranks import check_on_ranks


@pytest.mark.parametrize("worlds", [(3,), pytest.param((1, 2, 4), marks=pytest.mark.slow)])
def test_our_dcp_loads_on_every_world_and_sharding(
    tmp_path: Path, tiny_llama3_hf: Path, worlds: tuple[int, ...]
) -> None:
    """One launch for all sources: hf, meta of two ranks, torch of every dtype, a training run."""
    state, config = tiny_llama()
    matrix = dtype_matrix("safetensors.torch")
    trained, _ = tiny_llama(layers=1)
    training = training_state(trained)
    sources: dict[str, tuple[Path, dict[str, Any], dict[str, Any]]] = {
        "hf": (tiny_llama3_hf, load_any_reference(tiny_llama3_hf), {}),
        "meta": (
            save_meta(tmp_path / "meta-2", state, config, 2),
            state,
            {"to_layout": "hf", "model_type": "llama3"},
        ),
        "dtypes": (save_torch(tmp_path / "matrix.pt", matrix), matrix, {}),
        "ranks": (save_dcp_ranks(tmp_path / "ranks", state, 3, "S1"), state, {}),
        "training": (
            save_training_dcp(tmp_path / "training", trained),
            flatten(training),
            {"only": "all"},
        ),
    }
    cases = []
    for name, (path, expected, options) in sources.items():
        target = tmp_path / f"out-{name}"
        ckptctl.convert(path, target, to="dcp", **options)
        cases.append((target, expected))
    check_on_ranks(cases, worlds)


@pytest.mark.parametrize("style", ["torchtitan", "prefixed"])
def test_training_state_roundtrips_through_dcp(tmp_path: Path, style: str) -> None:
    state, _ = tiny_llama()
    source = save_training_dcp(tmp_path / "source", state, style)  # type: ignore[arg-type]
    ckptctl.convert(source, tmp_path / "out", to="dcp", only="all")
    assert not differences(load_any_reference(tmp_path / "out"), load_any_reference(source))


def test_torch_format_converters_read_our_output(tmp_path: Path, tiny_llama3_hf: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

    expected = load_any_reference(tiny_llama3_hf)
    ckptctl.convert(tiny_llama3_hf, tmp_path / "dcp", to="dcp")
    ckptctl.convert(tiny_llama3_hf, tmp_path / "ours.pt", to="torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "theirs.pt")
        torch_save_to_dcp(tmp_path / "ours.pt", tmp_path / "theirs")
    assert not differences(load_any_reference(tmp_path / "theirs.pt"), expected)
    assert not differences(load_any_reference(tmp_path / "theirs"), expected)


def test_torch_load_mmaps_our_output(tmp_path: Path, tiny_llama3_hf: Path) -> None:
    ckptctl.convert(tiny_llama3_hf, tmp_path / "ours.pt", to="torch")
    mapped = torch.load(tmp_path / "ours.pt", weights_only=True, mmap=True)
    assert not differences(mapped, load_any_reference(tiny_llama3_hf))


@pytest.mark.parametrize("name", ["dcp2", "dcp_2d", "fsdp1_dcp"])
def test_multi_rank_dcp_samples_convert_exactly(tmp_path: Path, data: Path, name: str) -> None:
    sample = data / "dcp" / name
    ckptctl.convert(sample / "ckpt", tmp_path / "out", to="torch", only="model")
    expected = load_any_reference(sample / "expected.safetensors")
    assert not differences(load_any_reference(tmp_path / "out"), expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_state_with_empty_dictionaries_loads_from_dcp_output(tmp_path: Path) -> None:
    """``dcp.load`` takes any dictionary that is a value as a sign of torch 2.3, and all fails."""
    config = {"lr": 1, "opt": {"name": "adam"}, "betas": []}
    state: dict[str, Any] = {"model": {"w": torch.ones(2)}, "config": config}
    empty: dict[str, Any] = {"extra": {}, "nested": [{}, {"ordered": OrderedDict()}]}
    torch.save(state | empty, tmp_path / "in.pt")
    plan = ckptctl.convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", only="all").plan
    assert plan.left_out.keys() == {"extra", "nested.0", "nested.1.ordered"}
    target: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "config": {**config, "lr": 0}}
    target |= empty
    stock_load(target, checkpoint_id=tmp_path / "out", no_dist=True)
    assert target["config"] == config and torch.equal(target["model"]["w"], torch.ones(2))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoint_of_torch_2_3_keeps_its_dictionaries(tmp_path: Path) -> None:
    """Its flattening left dictionaries without tensors as they are, and so do these keys."""
    saved = {"model.w": torch.ones(2), "config": {"lr": 1}, "extra": {}}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    stock_save(saved, checkpoint_id=tmp_path / "in", planner=planner, no_dist=True)
    plan = ckptctl.convert(tmp_path / "in", tmp_path / "out", to="dcp", only="all").plan
    assert not plan.left_out
    for name in ("in", "out"):
        target: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "config": {"lr": 0}, "extra": {}}
        stock_load(target, checkpoint_id=tmp_path / name, no_dist=True)
        assert target["config"] == {"lr": 1} and torch.equal(target["model"]["w"], torch.ones(2))
