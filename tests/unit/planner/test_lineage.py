"""Which saves a run left behind when it went on from an earlier checkpoint."""

from __future__ import annotations

import random

from ckptctl.planner.lineage import Lineage, Resume, find_abandoned_saves
from ckptctl.planner.retention import Policy, Retainable, decide_retention, find_out_of_order_pair


def test_left_behind_saves_match_random_history() -> None:
    """Save and go back at random, lose checkpoints at random; the history says what is left."""
    chance = random.Random(3)
    for _ in range(300):
        there: dict[str, tuple[int, Lineage, frozenset[str]]] = {}
        own, base, step, count = Lineage(), frozenset[str](), 0, 0
        for _ in range(chance.randrange(2, 25)):
            if there and chance.random() < 0.3:
                name = chance.choice(list(there))
                step, saved, base = there[name]
                newest = max(one.save for _, one, _ in there.values())
                own = saved.resume_at(step, newest)
            else:
                own, step, count = own.next_save(), step + 10, count + 1
                base |= {f"save {count}"}
                there[f"save {count}"] = step, own, base
            if len(there) > 3 and chance.random() < 0.3:
                tip = max(there, key=lambda name: there[name][1].save)
                del there[chance.choice([name for name in there if name != tip])]
        if not there:
            continue
        tip = max(there, key=lambda name: there[name][1].save)
        found = find_abandoned_saves({name: one for name, (_, one, _) in there.items()})
        assert found.keys() == there.keys() - there[tip][2], there


def test_resuming_from_newest_leaves_nothing_behind() -> None:
    first = Lineage().next_save()
    again = first.resume_at(10, 1).next_save().resume_at(20, 2).next_save()
    assert again == Lineage(3, (Resume(20, 2, 2),))
    assert find_abandoned_saves({"a": first, "c": again}) == {}


def candidate(step: int, save: int, time: float) -> Retainable:
    return Retainable(f"step-{step}", "step-", (step,), time, lineage=Lineage(save))


def test_save_numbers_outrank_clocks() -> None:
    backwards = [candidate(10, 1, 900.0), candidate(20, 2, 100.0)]
    assert find_out_of_order_pair(backwards) is None
    at_once = [candidate(10, 2, 100.0), candidate(20, 1, 100.0)]
    found = find_out_of_order_pair(at_once)
    assert found and [one.step for one in found] == [10, 20]
    unknown = [candidate(10, 0, 900.0), candidate(20, 2, 100.0)]
    assert find_out_of_order_pair(unknown) is not None


def test_left_behind_saves_do_not_count() -> None:
    left = Retainable("step-30", "step-", (30,), 3.0, exempt="left behind")
    run = [candidate(20, 2, 2.0), candidate(21, 4, 4.0), left]
    actions = {
        one.checkpoint.name: one.action for one in decide_retention(run, Policy(last=1), 10.0)
    }
    assert actions == {"step-20": "remove", "step-21": "keep", "step-30": "skip"}
