"""The functions for runs and for what ranks left, as their commands; options are elsewhere."""

from __future__ import annotations

import shutil

import pytest

import ckptctl
from ckptctl.errors import RefusedError, UsageError
from tests.conftest import DATA
from tests.runs import save_step, tear

RANKS = DATA / "dcp-rank-local" / "w2" / "ckpt"


@pytest.fixture
def run(tmp_path):
    for step in (10, 20, 30):
        save_step(tmp_path / f"step-{step}")
    tear(tmp_path / "step-30")
    return tmp_path


def test_run_functions_list_and_prune(run):
    listed = ckptctl.ls(str(run))
    assert [one.complete for one in listed.checkpoints] == [True, True, False]
    newest = ckptctl.latest(run)
    assert newest.path == run / "step-20" and newest.skipped[0].name == "step-30"
    plan = ckptctl.plan_prune(run, keep_last=1)
    assert [one.name for one in plan.list_decisions("remove")] == ["step-10"]
    assert ckptctl.prune(run, keep_within="0.5s", keep="step-20").done == ("step-10",)
    assert not (run / "step-10").exists() and (run / "step-30").exists()


def test_run_function_errors_name_python_arguments(run):
    with pytest.raises(RefusedError, match="no keep rule") as refused:
        ckptctl.prune(run)
    assert refused.value.hint == "pass one, for example `keep_last=3`"
    with pytest.raises(UsageError, match="'3' is not an integer"):
        ckptctl.prune(run, keep_last="3")
    with pytest.raises(
        UsageError, match=r"`min_age` only applies to .* requires `include_incomplete=True`"
    ):
        ckptctl.plan_prune(run, keep_last=1, min_age="2h")
    with pytest.raises(UsageError, match="no complete checkpoint has a metric `eval_loss`"):
        ckptctl.plan_prune(run, keep_best="eval_loss")
    with pytest.raises(UsageError, match="it cannot be None"):
        ckptctl.plan_prune(run, keep_last=1, force=None)
    with pytest.raises(UsageError) as unsaid:
        ckptctl.map("lm_head.weight", to_layout="meta")
    assert unsaid.value.hint and "`model_type='llama3'`" in unsaid.value.hint


def test_consolidate_functions_produce_complete_checkpoint(tmp_path):
    plan = ckptctl.plan_consolidation(RANKS, tmp_path / "out", to="dcp")
    assert isinstance(plan, ckptctl.ConversionPlan) and not list(tmp_path.iterdir())
    done = ckptctl.consolidate(RANKS, tmp_path / "out", to="dcp")
    assert (
        isinstance(done, ckptctl.ConversionResult)
        and ckptctl.verify(done.target).verdict == "complete"
    )
    shutil.copytree(RANKS, tmp_path / "ranks", copy_function=shutil.copyfile)
    added = ckptctl.consolidate(tmp_path / "ranks", metadata_only=True)
    assert added.target == tmp_path / "ranks" / ".metadata" and added.target.exists()
    for wrong, said in (
        ({}, "missing argument DST"),
        (
            {"metadata_only": True, "dtype": "bf16"},
            "`dtype` is not supported with `metadata_only=True`",
        ),
        ({"metadata_only": True, "dst": "x"}, "DST conflicts with"),
    ):
        with pytest.raises(UsageError, match=said):
            ckptctl.plan_consolidation(RANKS, **wrong)
