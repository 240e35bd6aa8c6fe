"""Which checkpoints are kept: single rules, and what holds for every policy and every run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.planner.retention import (
    BestRule,
    Policy,
    Retainable,
    decide_retention,
    find_out_of_order_pair,
    sort_checkpoints,
)
from ckptctl.verdict import Verdict

NOW = 1_000_000.0
NEWEST = ("newest complete checkpoint",)
TORN = {"verdict": Verdict.DAMAGED, "torn": True}


def candidate(step: int, **more) -> Retainable:
    usual = {"name": f"s-{step}", "series": "s-", "order": (step,), "time": step}
    return Retainable(**{**usual, **more})


def kept(
    policy: Policy, *candidates: Retainable, coming: int = 0, replaced: bool = False
) -> dict[str, tuple[str, ...]]:
    decisions = decide_retention(candidates, policy, NOW, pending_saves=coming, replaced=replaced)
    return {d.checkpoint.name: d.reasons for d in decisions if d.action == "keep"}


STEPS = [candidate(step) for step in (9, 10, 100, 1000, 9900, 10000)]


def test_last_keeps_highest_steps():
    assert list(kept(Policy(last=2), *STEPS)) == ["s-9900", "s-10000"]
    assert kept(Policy(last=2), *STEPS)["s-9900"] == ("last 2 (2/2)",)


def test_every_keeps_multiples_and_newest():
    found = kept(Policy(every=100), *STEPS)
    assert list(found) == ["s-100", "s-1000", "s-9900", "s-10000"]


def test_future_timestamp_does_not_age_other_checkpoints():
    """A run that ended long ago, and the clock was wrong when its newest one was written."""
    future = candidate(10_001, time=NOW + 1e6)
    found = kept(Policy(within=100.0), *STEPS, future)
    assert list(found) == ["s-9900", "s-10000", "s-10001"]


def test_within_counts_from_newest():
    assert list(kept(Policy(within=100.0), *STEPS)) == ["s-9900", "s-10000"]


def test_newest_in_future_does_not_age_other_checkpoints():
    future = candidate(20000, time=NOW + 1e9)
    recent = [candidate(step, time=NOW - 20000 + step) for step in (100, 10000, 19000)]
    found = kept(Policy(within=11_000.0), *recent, future)
    assert list(found) == ["s-10000", "s-19000", "s-20000"]


def test_patterns_keep_matching_names():
    assert list(kept(Policy(patterns=("s-10*",)), *STEPS)) == ["s-10", "s-100", "s-1000", "s-10000"]


@pytest.mark.parametrize(("lowest", "name"), [(True, "s-2"), (False, "s-3")])
def test_best_ignores_nan_and_unrated(lowest, name):
    nan = candidate(1, metrics={"loss": float("nan")})
    values = [candidate(step, metrics={"loss": v}) for step, v in ((2, 0.5), (3, 0.7), (4, 0.6))]
    found = kept(Policy(best=(BestRule("loss", lowest),)), nan, *values, candidate(5))
    assert list(found) == [name, "s-5"]
    assert found["s-5"] == ("newest complete checkpoint",)


def test_newest_of_equal_metrics_is_best():
    values = [candidate(step, metrics={"loss": 0.5}) for step in (1, 2, 3)]
    policy = Policy(best=(BestRule("loss", True),))
    assert list(kept(policy, *values, candidate(4))) == ["s-3", "s-4"]


def test_best_keeps_several_lowest_metrics():
    values = ((1, 0.5), (2, 0.3), (3, 0.9), (4, 0.3), (5, 0.7))
    rated = [candidate(step, metrics={"loss": value}) for step, value in values]
    found = kept(Policy(best=(BestRule("loss", True, 3),)), *rated, candidate(6))
    assert list(found) == ["s-1", "s-2", "s-4", "s-6"]
    assert found["s-4"] == ("3 lowest loss (0.3)",)


@pytest.mark.parametrize(
    ("steps", "left"),
    [
        ((10, 40, 60, 95, 103, 148, 152), [103, 152]),
        ((0, 95, 105), [0, 105]),
        ((50, 150), [50, 150]),
        ((7, 8, 9), [9]),
    ],
)
def test_closest_keeps_step_nearest_to_each_multiple(steps, left):
    """Of two that are as close the later; the first of a run are close to no multiple but 0."""
    found = kept(Policy(closest=100), *map(candidate, steps))
    assert list(found) == [f"s-{step}" for step in left]


def test_interval_keeps_one_per_period():
    times = (0, 50, 100, 120, 190, 210, 215)
    run = [candidate(step, time=float(time)) for step, time in enumerate(times)]
    found = kept(Policy(interval=100.0), *run)
    assert [times[int(name[2:])] for name in found] == [0, 100, 210, 215]
    assert found["s-5"] == ("one per 100s",)


def test_clock_set_back_restarts_intervals():
    """One checkpoint of the future would otherwise stand for all until that day."""
    times = (0.0, 1e9, 60.0, 120.0, 170.0, 180.0)
    run = [candidate(step, time=time) for step, time in enumerate(times)]
    assert list(kept(Policy(interval=100.0), *run)) == ["s-0", "s-1", "s-2", "s-4", "s-5"]


def test_wanted_function_selects_checkpoints():
    policy = Policy(keep_if=lambda one: one.metrics.get("loss", 1.0) < 0.5)
    rated = [candidate(step, metrics={"loss": step / 10}) for step in (3, 6, 7)]
    assert kept(policy, *rated) == {"s-3": ("selected by `keep_if`",), "s-7": NEWEST}
    with pytest.raises(ZeroDivisionError):
        kept(Policy(keep_if=lambda one: 1 // 0), *rated)


@pytest.mark.parametrize(("last", "left"), [(1, [10000]), (2, [10000]), (3, [9900, 10000])])
def test_coming_checkpoint_counts_but_newest_stays(last, left):
    assert list(kept(Policy(last=last), *STEPS, coming=1)) == [f"s-{step}" for step in left]


def test_all_matching_rules_are_reported():
    found = kept(Policy(last=1, every=10000, patterns=("*0000",)), *STEPS)
    assert found == {"s-10000": ("last 1 (1/1)", "every 10,000", "matches `*0000`")}


def test_pinned_checkpoint_is_kept():
    pinned = candidate(5, pinned=("`latest`",))
    assert kept(Policy(last=1), pinned, *STEPS)["s-5"] == ("named by `latest`",)


def test_incomplete_checkpoints_do_not_count():
    broken = candidate(20000, verdict=Verdict.DAMAGED, torn=True, problem="cut off")
    found = decide_retention([*STEPS, broken], Policy(last=1), NOW)
    assert [d.action for d in found] == ["remove"] * 5 + ["keep", "skip"]
    assert found[-1].reasons == ("damaged: cut off",)


@pytest.mark.parametrize(
    ("state", "age", "more", "action"),
    [
        (TORN, 7200, {}, "remove"),
        (TORN, 60, {}, "skip"),
        (TORN, -7200, {}, "skip"),
        (TORN | {"writing": True}, 7200, {}, "skip"),
        ({"verdict": Verdict.DAMAGED}, 7200, {}, "skip"),
        ({"verdict": Verdict.UNKNOWN}, 7200, {}, "skip"),
        (TORN, 7200, {"pinned": ("`latest`",)}, "skip"),
        (TORN, 7200, {"name": "precious"}, "skip"),
    ],
)
def test_only_damaged_checkpoints_are_removed_on_request(state, age, more, action):
    broken = candidate(7, time=NOW - age, **state, **more)
    policy = Policy(last=1, incomplete=True, patterns=("precious",))
    found = {d.checkpoint.step: d.action for d in decide_retention([broken, *STEPS], policy, NOW)}
    assert found[7] == action


def test_run_without_complete_checkpoint_removes_nothing():
    broken = [candidate(step, **TORN) for step in (1, 2)]
    assert {d.action for d in decide_retention(broken, Policy(last=1, incomplete=True), NOW)} == {
        "skip"
    }


def test_replaced_run_may_remove_all():
    assert kept(Policy(last=0), *STEPS, replaced=True) == {}
    assert list(kept(Policy(last=0), *STEPS)) == ["s-10000"]


def test_series_are_counted_separately():
    others = [candidate(n, name=f"e-{n}", series="e-") for n in (1, 2)]
    assert list(kept(Policy(last=1), *STEPS, *others)) == ["e-2", "s-10000"]


def test_disorder_reports_contradicting_times():
    assert find_out_of_order_pair(STEPS) is None
    stale = candidate(20000, time=50.0)
    newer, older = find_out_of_order_pair([*STEPS, stale])
    assert (newer.name, older.name) == ("s-10000", "s-20000")
    assert find_out_of_order_pair([*STEPS, replace(stale, **TORN)]) is None
    assert find_out_of_order_pair([*STEPS, candidate(20000, time=9999.0)]) is None, (
        "clocks are coarse"
    )


# ------------------------------------------------------------------------------ what always holds

STATES = st.sampled_from(
    [
        *[{"verdict": Verdict.COMPLETE}] * 4,
        TORN,
        TORN | {"writing": True},
        {"verdict": Verdict.DAMAGED},
        {"verdict": Verdict.UNKNOWN},
        {"verdict": Verdict.UNKNOWN, "writing": True},
    ]
)
RUNS = st.lists(
    st.builds(
        lambda step, time, state, pin, value, series, lacks: Retainable(
            f"{series}{step}",
            series,
            (step,),
            float(time),
            **state,
            pinned=("`latest`",) if pin else (),
            metrics={} if value is None else {"loss": value},
            lacks=lacks,
        ),
        st.integers(0, 40),
        st.integers(0, 40),
        STATES,
        st.booleans(),
        st.none() | st.floats(),
        st.sampled_from(["s-", "e-"]),
        st.sampled_from(["", "", "", "trainer_state.json"]),
    ),
    unique_by=lambda one: one.name,
    max_size=12,
)
POLICIES = st.builds(
    Policy,
    last=st.none() | st.integers(0, 5),
    every=st.none() | st.integers(1, 5),
    within=st.none() | st.integers(0, 20).map(float),
    best=st.sampled_from([(), (BestRule("loss", True),), (BestRule("loss", False),)]),
    patterns=st.sampled_from([(), ("s-1*",), ("*3",)]),
    incomplete=st.booleans(),
    min_age=st.integers(0, 50).map(float),
)
CLOCKS = st.integers(0, 60).map(float)


@given(RUNS, POLICIES, CLOCKS)
def test_every_checkpoint_is_decided_once(run, policy, now):
    found = decide_retention(run, policy, now)
    assert [d.checkpoint for d in found] == sort_checkpoints(run)


@given(RUNS, POLICIES, CLOCKS)
def test_newest_complete_of_each_series_is_kept(run, policy, now):
    actions = {d.checkpoint.name: d.action for d in decide_retention(run, policy, now)}
    for series in ("s-", "e-"):
        whole = [c for c in run if c.series == series and c.complete]
        if whole:
            assert actions[max(whole, key=lambda c: c.order).name] == "keep"


@given(RUNS, POLICIES, CLOCKS, st.booleans())
def test_pinned_or_active_checkpoints_are_never_removed(run, policy, now, replaced):
    for decision in decide_retention(run, policy, now, replaced=replaced):
        one = decision.checkpoint
        if decision.action == "remove":
            assert not one.pinned
            assert one.complete or (policy.incomplete and one.torn and not one.writing)
            assert one.complete or one.time <= now - policy.min_age
        if decision.action == "keep":
            assert one.complete
            assert decision.reasons


@given(RUNS, POLICIES, CLOCKS)
def test_incomplete_trainer_state_removes_no_other_checkpoint(run, policy, now):
    sure = [one for one in run if not one.lacks]
    kept = {d.checkpoint.name for d in decide_retention(sure, policy, now) if d.action == "keep"}
    assert kept <= {
        d.checkpoint.name for d in decide_retention(run, policy, now) if d.action == "keep"
    }


@given(RUNS, POLICIES, POLICIES, CLOCKS)
def test_more_rules_keep_more_checkpoints(run, policy, more, now):
    joined = replace(
        policy,
        last=max((n for n in (policy.last, more.last) if n is not None), default=None),
        within=max((n for n in (policy.within, more.within) if n is not None), default=None),
        best=policy.best + more.best,
        patterns=policy.patterns + more.patterns,
    )
    before = {d.checkpoint.name for d in decide_retention(run, policy, now) if d.action == "keep"}
    assert before <= {
        d.checkpoint.name for d in decide_retention(run, joined, now) if d.action == "keep"
    }


@given(RUNS, POLICIES, CLOCKS)
def test_second_run_removes_nothing_more(run, policy, now):
    first = decide_retention(run, policy, now)
    left = [d.checkpoint for d in first if d.action != "remove"]
    assert "remove" not in [d.action for d in decide_retention(left, policy, now)]


@given(RUNS, POLICIES, CLOCKS, st.randoms())
def test_listing_order_does_not_matter(run, policy, now, random):
    shuffled = list(run)
    random.shuffle(shuffled)
    assert decide_retention(shuffled, policy, now) == decide_retention(run, policy, now)
