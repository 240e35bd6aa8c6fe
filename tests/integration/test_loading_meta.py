"""Loads into what is on the meta device, or is to be replaced, against ``load_state_dict``."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptctl.distributed.loading.load import load
from ckptctl.errors import MappingError, RefusedError, UsageError
from tests.checkpoints import save_dcp, save_torch
from tests.gloo import run_on_ranks
from tests.integration import meta_ranks

TOKENS = torch.arange(8)


class Tied(nn.Module):
    """A model with tied weights, a frozen one, buffers that are saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.inner.bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.inner(self.embed(tokens))) * self.scale)
        return found


@pytest.fixture
def trained() -> Tied:
    model = Tied()
    assert isinstance(model.norm.running_mean, torch.Tensor)
    model.norm.running_mean.fill_(0.25)
    return model


def on_meta() -> Tied:
    with torch.device("meta"):
        return Tied()


def require_same(model: nn.Module, other: nn.Module) -> None:
    mine, theirs = model.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    grads = [
        {name: one.requires_grad for name, one in some.named_parameters(remove_duplicate=False)}
        for some in (model, other)
    ]
    assert grads[0] == grads[1]


@pytest.fixture
def warnings() -> Iterator[io.StringIO]:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger("ckptctl").addHandler(handler)
    yield text
    logging.getLogger("ckptctl").removeHandler(handler)


def test_model_on_meta_is_materialized_by_load(
    tmp_path: Path, trained: Tied, warnings: io.StringIO
) -> None:
    folder = save_dcp(tmp_path / "a", {"model": trained, "step": 3})
    for _ in range(2):  # the second time from the plan
        model = on_meta()
        state: dict[str, Any] = {"model": model, "step": 0}
        report = load(state, folder)
        assert state["model"] is model and state["step"] == 3 and not report.missing
        require_same(model, trained)
        assert model.head.weight is model.embed.weight
        assert report.on_meta == ("model.scale",) and "meta device" in warnings.getvalue()
        with pytest.raises(RuntimeError):  # torch refuses it; nothing is computed with garbage
            model.eval()(TOKENS)
        model.scale = torch.full((4,), 2.0)
        assert torch.equal(model.eval()(TOKENS), trained.eval()(TOKENS))
        assert load({"model": model, "step": 0}, folder).on_meta == ()


def test_module_is_accepted_as_state(tmp_path: Path, trained: Tied) -> None:
    path = save_torch(tmp_path / "a.pt", trained.state_dict())
    model = on_meta()
    report = load(model, path)
    assert "embed.weight" in report.loaded and report.on_meta == ("scale",)
    require_same(model, trained)
    again = Tied()
    weight = again.inner.weight
    load(again, path)
    assert again.inner.weight is weight and torch.equal(weight, trained.inner.weight)


def test_tied_weights_load_from_one_name(tmp_path: Path, trained: Tied) -> None:
    weights = {name: one for name, one in trained.state_dict().items() if name != "head.weight"}
    path = save_torch(tmp_path / "a.pt", weights)
    for model in (on_meta(), Tied()):
        load(model, path)
        require_same(model, trained)
        assert model.head.weight is model.embed.weight
    del weights["embed.weight"]
    with pytest.raises(MappingError, match="2 only in the state"):
        load(on_meta(), save_torch(tmp_path / "b.pt", weights))


def test_failed_load_leaves_model_on_meta(tmp_path: Path, trained: Tied) -> None:
    weights = trained.state_dict()
    lacking = {name: one for name, one in weights.items() if name != "inner.bias"}
    other = {**weights, "head.weight": weights["head.weight"] + 1}
    half = {name: one.half() if one.is_floating_point() else one for name, one in weights.items()}
    for number, (wrong, said) in enumerate(
        (
            (lacking, "1 only in the state"),
            (other, "different values"),
            (half, "a different dtype"),
        )
    ):
        model = on_meta()
        with pytest.raises(MappingError, match=said):
            load({"model": model}, save_dcp(tmp_path / f"{number}", {"model": wrong}))
        assert all(one.is_meta for one in (*model.parameters(), *model.buffers()))


def test_missing_tensors_stay_on_meta(tmp_path: Path, trained: Tied) -> None:
    weights = {name: one for name, one in trained.state_dict().items() if "inner" not in name}
    model = on_meta()
    report = load({"model": model}, save_dcp(tmp_path / "a", {"model": weights}), strict=False)
    assert report.missing == ("model.inner.weight", "model.inner.bias")
    assert set(report.on_meta) == {*report.missing, "model.scale"}
    assert model.inner.weight.is_meta and torch.equal(model.embed.weight, trained.embed.weight)


def test_partly_materialized_model_is_filled_in_place(tmp_path: Path, trained: Tied) -> None:
    """What has memory is filled where it is."""
    folder = save_dcp(tmp_path / "a", {"model": trained})
    model = on_meta()
    model.inner = nn.Linear(4, 4)
    model.inner.bias.requires_grad_(False)
    weight = model.inner.weight
    load({"model": model}, folder)
    assert model.inner.weight is weight
    require_same(model, trained)


def test_meta_tensors_in_state_dict_are_replaced(tmp_path: Path, trained: Tied) -> None:
    folder = save_dcp(tmp_path / "a", {"model": trained.state_dict(), "list": [torch.ones(2)]})
    weights = on_meta().state_dict()
    state: dict[str, Any] = {"model": weights, "list": [torch.empty(2, device="meta")]}
    load(state, folder)
    assert state["model"] is weights and torch.equal(state["list"][0], torch.ones(2))
    model = on_meta()
    model.load_state_dict(weights, assign=True)
    require_same(model, trained)


def test_cast_keeps_model_dtype_and_assign_takes_checkpoint_dtype(
    tmp_path: Path, trained: Tied
) -> None:
    path = save_torch(tmp_path / "a.pt", trained.half().state_dict())
    model, own = on_meta(), on_meta()
    load(model, path, cast=True)
    assert model.inner.weight.dtype == torch.float32
    assert torch.equal(model.inner.weight, trained.inner.weight.float())
    load(own, path, assign=True)
    require_same(own, trained)


def test_assign_matches_torch_load_state_dict(tmp_path: Path, trained: Tied) -> None:
    path = save_torch(tmp_path / "a.pt", trained.bfloat16().state_dict())
    model, theirs = Tied(), Tied()
    before = {name: (one, one.clone()) for name, one in model.named_parameters()}
    report = load(model, path, assign=True)
    theirs.load_state_dict(torch.load(path), assign=True)
    require_same(model, theirs)
    assert not report.cast and model.head.weight is model.embed.weight
    assert all(torch.equal(one, copy) for one, copy in before.values()), "they are left alone"
    state = {"inner.weight": torch.zeros(4, 4)}
    held = state["inner.weight"]
    load(state, path, assign=True, strict="state")
    assert state["inner.weight"].dtype == torch.bfloat16 and not held.any()


def test_meta_tensors_without_module_are_refused(tmp_path: Path, trained: Tied) -> None:
    class Wrapper:
        def state_dict(self) -> dict[str, Any]:
            return on_meta().state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    folder = save_dcp(tmp_path / "a", {"model": trained})
    with pytest.raises(RefusedError, match="its owner is not a module"):
        load({"model": Wrapper()}, folder)
    for device in ("meta", "nowhere"):
        with pytest.raises(UsageError, match="device"):
            load({"model": on_meta()}, folder, device=device)


@pytest.mark.slow
def test_sharded_models_on_meta_are_materialized(tmp_path: Path) -> None:
    folder, flat = meta_ranks.in_folder(tmp_path)
    run_on_ranks(meta_ranks.loaded_on_meta, [2, 4], folder, flat)


@pytest.mark.slow
def test_ranks_read_only_their_shards_and_fail_together(tmp_path: Path) -> None:
    folder, flat = meta_ranks.in_folder(tmp_path)
    run_on_ranks(meta_ranks.read_once, [2, 4], flat)
    run_on_ranks(meta_ranks.failing, [2], folder)
    torch.save(meta_ranks.whole().bfloat16().state_dict(), tmp_path / "half.pt")
    run_on_ranks(meta_ranks.assigned, [2], str(tmp_path / "half.pt"))
