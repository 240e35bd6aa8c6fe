"""Which part of a training checkpoint a name belongs to."""

from __future__ import annotations

import pytest

from ckptctl.conversion.recognition.roots import classify_leaf


@pytest.mark.parametrize(
    ("name", "root", "part"),
    [
        ("model.l1.weight", "model.", "model"),
        ("optim.state.l1.weight.exp_avg", "model.", "optimizer"),
        ("optimizer_0.param_groups.0.lr", "model.", "optimizer"),
        ("opt.state.l1.weight.step", "model.", "optimizer"),
        ("optimizer_states.0.state.0.exp_avg", "state_dict.", "optimizer"),
        ("state.optimizer.l1.weight.exp_avg", "state.model.", "optimizer"),
        ("lr_schedulers.0.last_epoch", "model.", "scheduler"),
        ("extra_state.lr_scheduler", "model.", "scheduler"),
        ("dataloader.dp_rank_0", "", "loader"),
        ("data_sampler", "module.", "loader"),
        ("rank_1.extra_state.rng", "model.", "rest"),
        ("ema.l1.weight", "model.", "rest"),
        ("step", "", "rest"),
        ("tok_embeddings.weight", "", "model"),
        ("optimizer.layers.0.wq.weight.exp_avg", "", "optimizer"),
        ("optical_flow.weight", "model.", "rest"),
    ],
)
def test_part_of_classifies_names_by_part(name: str, root: str, part: str) -> None:
    assert classify_leaf(name, root, "dcp") == part


def test_model_only_format_has_no_other_parts() -> None:
    assert classify_leaf("optimizer.weight", "", "hf") == "model"
