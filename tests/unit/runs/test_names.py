"""Names of checkpoints, as trainers give them, and names that only resemble them."""

from __future__ import annotations

import math

import pytest

from ckptctl.runs.names import is_lightning_last, parse_name, parse_staged_name


@pytest.mark.parametrize(
    ("name", "series", "order"),
    [
        ("step-100", "step-", (100,)),
        ("step_100", "step_", (100,)),
        ("checkpoint-9900", "checkpoint-", (9900,)),
        ("checkpoint_3", "checkpoint_", (3,)),
        ("iter_0000010", "iter_", (10,)),
        ("global_step2", "global_step", (2,)),
        ("global_step_2", "global_step_", (2,)),
        ("epoch_0", "epoch_", (0,)),
        ("step1000", "step", (1000,)),
        ("step1000-unsharded", "step-unsharded", (1000,)),
        ("ep0-ba100", "epE-baB", (100, 0)),
        ("epoch_2_step_100", "epoch_E_step_S", (100, 2)),
        ("epoch_2_train_step_90_eval_step_10", "epoch_E_step_S", (100, 2)),
        ("epoch=0-step=3.ckpt", "epoch=N-step=N.ckpt", (3, 0, 0)),
        ("epoch=0-step=3-v1.ckpt", "epoch=N-step=N.ckpt", (3, 0, 1)),
        ("epoch=7.ckpt", "epoch=N.ckpt", (7, 0)),
        ("epoch=7-loss=nan.ckpt", "epoch=N-loss=N.ckpt", (7, 0)),
        ("epoch=7-loss=-inf.ckpt", "epoch=N-loss=N.ckpt", (7, 0)),
        ("epoch=7-model=info.ckpt", "epoch=N-model=info.ckpt", (7, 0)),
        ("epoch=1-top1=1.ckpt", "epoch=N-top1=N.ckpt", (1, 0)),
        ("epoch_2_step_7_loss=1e-05", "epoch_E_step_S", (7, 2)),
        ("epoch_2_step_7_loss=nan", "epoch_E_step_S", (7, 2)),
        ("model_epoch=7-step=90.ckpt", "model_epoch=N-step=N.ckpt", (90, 7, 0)),
    ],
)
def test_checkpoint_names_parse_into_series_and_order(name, series, order):
    found = parse_name(name)
    assert (found.series, found.order) == (series, order)


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint-50-bak",
        "epoch_2_tmp",
        "step-1.old",
        "step-",
        "step--1",
        "step-1 ",
        "mystep-1",
        "STEP-1",
        "step-١",
        "step-" + "1" * 400,
        "release",
        "step1000-sharded",
        "step1000_tokens4B",
        "ep0-ba100-rank0.pt",
        "ckpt_100",
        "model_12.pt",
        "last.ckpt",
        "last-v1.ckpt",
        "100",
        ".step-1",
        "val_loss=0.3.ckpt",
        "epoch=x.ckpt",
        "",
    ],
)
def test_other_names_are_not_checkpoints(name):
    assert parse_name(name) is None


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("last.ckpt", True),
        ("last-v12.ckpt", True),
        ("last", False),
        ("last-v.ckpt", False),
        ("at-last.ckpt", False),
        ("last.ckpt.bak", False),
    ],
)
def test_lightning_last_names_are_recognized(name, last):
    assert is_lightning_last(name) is last


def test_metrics_are_parsed_from_names():
    found = parse_name("epoch=3-step=100-val_loss=0.25-lr=1e-05-acc=-2.ckpt")
    assert found.metrics == {"val_loss": 0.25, "lr": 1e-05, "acc": -2.0}
    assert parse_name("epoch_1_step_20_val_loss=0.5").metrics == {"val_loss": 0.5}
    assert math.isnan(parse_name("epoch=3-val_loss=nan.ckpt").metrics["val_loss"])


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("tmp-checkpoint-10", "checkpoint-10"),
        (".step-10.ckptctl-staging", "step-10"),
        ("step-10", None),
        (".ckptctl-trash", None),
    ],
)
def test_staged_names_yield_target_name(name, target):
    assert parse_staged_name(name) == target
