"""Names that share one tensor in the state, and names that look like those of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptctl.distributed.loading.load import load
from ckptctl.errors import MappingError
from ckptctl.save_load.loading.key_comparison import list_rank_keys
from tests.checkpoints import save_dcp, save_torch


def tied(tensor: torch.Tensor) -> dict[str, Any]:
    return {"model": {"embed": tensor, "other": torch.zeros(2), "head": tensor}}


def untied(head: torch.Tensor) -> dict[str, Any]:
    embed = torch.arange(2100.0 * 40).reshape(2100, 40)
    return {"model": {"embed": embed, "other": torch.ones(2), "head": head}}


SAME = torch.arange(2100.0 * 40).reshape(2100, 40)
TARGETS = {
    "plain": lambda: torch.zeros(2100, 40),
    "transposed": lambda: torch.zeros(40, 2100).t(),
    "double": lambda: torch.zeros(2100, 40, dtype=torch.float64),
    "columns": lambda: torch.zeros(2100, 80)[:, ::2],
}


@pytest.mark.parametrize("kind", TARGETS)
def test_tied_state_loads_equal_checkpoint_tensors(tmp_path: Path, kind: str) -> None:
    folder = save_dcp(tmp_path / "a", untied(SAME.clone()))
    state = tied(TARGETS[kind]())
    for _ in range(2):
        state["model"]["embed"].zero_()
        report = load(state, folder, cast=True)
        assert torch.equal(state["model"]["embed"].float(), SAME)
        assert {"model.embed", "model.head"} <= set(report.loaded)


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("place", [(0, 0), (1700, 39)])
def test_tied_state_refuses_different_checkpoint_tensors(
    tmp_path: Path, kind: str, place: tuple[int, int]
) -> None:
    head = SAME.clone()
    head[place] += 1
    folder = save_dcp(tmp_path / "a", untied(head))
    with pytest.raises(MappingError, match="different values") as found:
        load(tied(TARGETS[kind]()), folder, cast=True)
    assert "model.head" in str(found.value.what) and "model.embed" in str(found.value.what)


def test_tensor_tied_on_both_sides_is_read_once(tmp_path: Path) -> None:
    path = save_torch(tmp_path / "a.pt", tied(SAME.clone()))
    state = tied(torch.zeros(2100, 40))
    report = load(state, path)
    assert report.bytes_read == SAME.nbytes + 8
    assert torch.equal(state["model"]["head"], SAME)


def test_tied_state_loads_from_one_name(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "a", {"model": {"head": SAME.clone(), "other": torch.ones(2)}})
    state = tied(torch.zeros(2100, 40))
    assert load(state, folder, strict=False).missing == ("model.embed",)
    assert torch.equal(state["model"]["embed"], SAME)


OVERLAPS = {
    "a part of both": lambda memory: (memory[:10], memory[5:]),
    "one in the other": lambda memory: (memory, memory[5:9]),
    "another order": lambda memory: (memory[:12].view(3, 4), memory[:12].view(4, 3).t()),
}


@pytest.mark.parametrize("kind", OVERLAPS)
def test_overlapping_state_tensors_need_consistent_values(tmp_path: Path, kind: str) -> None:
    """What was saved from them can be loaded into them; nothing else can."""
    memory = torch.arange(15.0)
    one, other = OVERLAPS[kind](memory)
    folder = save_dcp(tmp_path / "a", {"one": one, "apart": torch.ones(2), "other": other})
    different = save_dcp(tmp_path / "b", {"one": one, "apart": torch.ones(2), "other": other + 1})
    target = torch.zeros(15)
    for _ in range(2):
        first, second = OVERLAPS[kind](target.zero_())
        load({"one": first, "apart": torch.zeros(2), "other": second}, folder)
        assert torch.equal(first, one) and torch.equal(second, other)
    with pytest.raises(MappingError, match="different values") as found:
        load({"one": first, "apart": torch.zeros(2), "other": second}, different)
    assert "they share memory" in str(found.value.why)


@pytest.mark.parametrize("kind", ["plain", "columns"])
def test_load_fills_inference_tensors(tmp_path: Path, kind: str) -> None:
    folder = save_dcp(tmp_path / "a", untied(SAME.clone()))
    with torch.inference_mode():
        state = tied(TARGETS[kind]())
    load(state, folder)
    assert torch.equal(state["model"]["embed"], SAME)


def test_user_keys_named_like_ranks_are_not_skipped(tmp_path: Path) -> None:
    """Rank 0's values are never kept apart, and nothing of a user's is silently passed over."""
    saved = {"seed": 7, "rank_0": {"seed": 5}, "rank_1": {"seed": 6, "more": 1}, "t": torch.ones(1)}
    folder = save_dcp(tmp_path / "a", saved)
    state: dict[str, Any] = {"seed": 0, "t": torch.zeros(1)}
    report = load(state, folder, strict=False)
    assert state["seed"] == 7
    assert not any("it belongs to a single rank" in why for why in report.left_out.values())


def test_rank_prefixed_names_are_detected_as_rank_local() -> None:
    from ckptctl.catalog import Blob, Catalog

    def apart(*names: str) -> set[str]:
        blobs = {name: Blob(name, tuple(name.split(".")), None, 0, 0) for name in names}
        return list_rank_keys(Catalog(Path(), Path(), "dcp", {}, {}, blobs))

    assert apart("a", "rank_1.a", "rank_2.a") == {"rank_1.a", "rank_2.a"}
    assert apart("a", "rank_0.a", "rank_1.a", "rank_1.b") == set()
    assert apart("a", "rank_1.a", "rank_3.c") == {"rank_1.a"}
