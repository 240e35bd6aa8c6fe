"""What ``prune`` removes from random runs, against an oracle that knows how they were made.

Nothing that should stay is removed; nothing stays that the documentation says goes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptctl.cli.app import build_program
from tests.contract.retention_oracle import COMPLETE, TORN, UNCLEAR, Refused, Rules, Thing, goes
from tests.contract.run_templates import LEAVES, TEARS, UNTORN, Template, templates
from tests.runs import START, age
from tests.sweeps import one_in

pytestmark = pytest.mark.filterwarnings("ignore")
PRUNE = build_program("prune")
CASES = 30
MANY = 1230
EACH = 30
"""Cases of one test, so that a failure names a short stretch."""
KINDS = 2
"""How many kinds of unusual files a run has: each may be called unknown, or not."""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> list[Template]:
    return templates(tmp_path_factory.mktemp("templates"))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, CASES, EACH))
def test_prune_deletes_only_as_oracle_allows(
    known: list[Template], tmp_path: Path, first: int
) -> None:
    for seed in range(first, first + EACH):
        check(known, tmp_path / str(seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(CASES, MANY, 10 * EACH))
def test_prune_deletes_only_as_oracle_allows_in_many_runs(
    known: list[Template], tmp_path: Path, first: int
) -> None:
    for seed in range(first, first + 10 * EACH):
        check(known, tmp_path / str(seed), seed)


def check(known: list[Template], folder: Path, seed: int) -> None:
    made = Tree(folder / "run", random.Random(seed), known)
    rules = made.rules()
    before, words = listing(folder), [*options(rules), "--yes", "--json"]
    result = CliRunner().invoke(PRUNE, ["prune", str(made.root), *words])
    gone = before - listing(folder)
    case = f"seed {seed}: prune {' '.join(words)}\n{made}\n{result.stderr}"
    assert result.exit_code in (0, 2, 6), case
    possible = list(outcomes(made.things, rules, made.now))
    assert gone in possible, f"{case}\ngone: {sorted(gone)}, may go: {possible}"
    assert (result.exit_code == 0) or not gone, case
    shutil.rmtree(folder)


def outcomes(things: list[Thing], rules: Rules, now: float) -> Iterator[set[str]]:
    """Yield what may go: an odd one is complete, but may be called unknown, all of a kind."""
    kinds = sorted({one.odd for one in things if one.odd})
    for chosen in itertools.product((COMPLETE, UNCLEAR), repeat=len(kinds)):
        truth = dict(zip(kinds, chosen, strict=True))
        seen = [replace(one, truth=truth.get(one.odd, one.truth)) for one in things]
        try:
            yield goes(seen, rules, now)
        except Refused:
            yield set()


def options(rules: Rules) -> list[str]:
    values = {
        "--keep-last": rules.last,
        "--keep-every": rules.every,
        "--keep-closest": rules.closest,
        "--keep-within": None if rules.within is None else f"{rules.within:g}s",
        "--keep-interval": None if rules.interval is None else f"{rules.interval:g}s",
        "--keep-best": rules.best and f"{rules.best}:min:{rules.count}",
        "--min-age": f"{rules.min_age:.0f}s" if rules.incomplete else None,
    }
    words = [str(w) for name, value in values.items() if value is not None for w in (name, value)]
    words += [word for pattern in rules.patterns for word in ("--keep", pattern)]
    flags = {"--include-incomplete": rules.incomplete, "--force": rules.force}
    return [*words, *(name for name, wanted in flags.items() if wanted)]


def listing(folder: Path) -> set[str]:
    """Return the names in the run, and the paths of all that lies beside it or is no checkpoint."""
    run = folder / "run"
    beside = {str(item.relative_to(folder)) for item in folder.rglob("*")} - {"run"}
    return {item.name for item in run.iterdir()} | {
        path for path in beside if not path.startswith("run/") or "keep" in path
    }


def _inside(path: Path) -> list[Path]:
    return [item for item in path.rglob("*") if item.is_file()] if path.is_dir() else []


class Tree:
    """A random run.

    Args:
        root: Where it is made.
        draw: What it is drawn from.
        known: Templates of complete checkpoints.

    Attributes:
        root: The same.
        things: What lies there.
        now: What the clock says.
    """

    def __init__(self, root: Path, draw: random.Random, known: list[Template]) -> None:
        self.root, self.now = root, time.time()
        self.things: list[Thing] = []
        self._draw, self._known = draw, known
        root.mkdir(parents=True)
        series = draw.sample(sorted({one.series for one in known}), draw.choice((1, 1, 2)))
        for name in series:
            self._fill(name, [one for one in known if one.series == name])
        self._add_foreign()
        self._point()

    def __str__(self) -> str:
        return "\n".join(f"  {one}" for one in self.things)

    def rules(self) -> Rules:
        """Return something to ask for."""
        draw = self._draw
        rules = Rules(incomplete=draw.random() < 0.6, force=draw.random() < 0.3)
        rules.min_age = draw.choice((0.0, 60.0, 3600.0, 100_000_000.0))
        if draw.random() < 0.7:
            rules.last = draw.randint(1, 3)
        if draw.random() < 0.2:
            rules.every = draw.randint(2, 5)
        if draw.random() < 0.2:
            rules.within = draw.choice((30.0, 61.0, 190.0))
        if draw.random() < 0.15:
            rules.best = draw.choice(("eval_loss", "val_loss"))
        if draw.random() < 0.2:
            rules.patterns = [draw.choice(("step-*", "*-2", "*=1.ckpt", "*3*", "nothing*"))]
        if draw.random() < 0.2:
            rules.closest = draw.randint(2, 5)
        if draw.random() < 0.2:
            rules.interval = draw.choice((30.0, 61.0, 190.0))
        rules.count = draw.choice((1, 1, 2, 3))
        asked = (rules.last, rules.every, rules.closest, rules.within, rules.interval, rules.best)
        if not any((*asked, *rules.patterns)):
            rules.last = 1
        return rules

    def _fill(self, series: str, usable: list[Template]) -> None:
        draw = self._draw
        odd = [one for one in usable if not one.sure]
        draw.shuffle(odd)
        usable = [*(one for one in usable if one.sure), *odd[:KINDS]]
        rated = series.startswith("epoch") and draw.random() < 0.5
        for step in sorted(draw.sample(range(1, 13), draw.randint(1, 6))):
            template = draw.choice(usable)
            moment = START + 60 * (step if draw.random() < 0.93 else draw.randint(1, 13))
            name = series + (f"{step:07d}" if series == "iter_" else str(step))
            metrics = {}
            if rated:
                metrics = {"val_loss": draw.choice((0.25, 0.5, 0.75))}
                name += f"-val_loss={metrics['val_loss']}"
            if series.startswith("epoch"):
                name += ".ckpt"
            thing = Thing(name, COMPLETE, moment, metrics=metrics)
            self._make(thing, template, series, step)
            self.things.append(thing)

    def _make(self, thing: Thing, template: Template, series: str, step: int) -> None:
        draw, path = self._draw, self.root / thing.name
        fate = draw.random()
        tears = TEARS.get(template.path.name, ())
        untorn = UNTORN.get(template.path.name, ())
        if fate < 0.06:
            thing.truth, thing.link = COMPLETE if template.sure else UNCLEAR, True
            (self.root.parent / "elsewhere").mkdir(exist_ok=True)
            target = self.root.parent / "elsewhere" / thing.name
            template.copy(target)
            path.symlink_to(target)
            thing.odd = "" if template.sure else template.path.name
            return
        if fate < 0.12:
            thing.truth = UNCLEAR
            self._foreign_folder(path)
        else:
            template.copy(path)
            thing.odd = "" if template.sure else template.path.name
        if series == "checkpoint-":
            self._state(thing, path, step)
        if tears and 0.12 <= fate < 0.35:
            draw.choice(tears)(path)
            thing.truth, thing.odd = TORN, ""
            thing.states = thing.states if (path / "trainer_state.json").exists() else None
            if draw.random() < 0.3:
                thing.time = self.now - draw.choice((10, 300, 700, 1800))
        elif untorn and 0.35 <= fate < 0.55:
            draw.choice(untorn)(path)
            thing.truth = UNCLEAR
        elif path.is_dir() and fate > 0.96:
            name = draw.choice((f".{thing.name}.ckptctl-staging", f"tmp-{thing.name}"))
            if name.startswith(".") or series == "checkpoint-":
                path.rename(self.root / name)
                thing.name, thing.truth, thing.odd = name, TORN, ""
                path = self.root / name
        age(path, thing.time)

    def _state(self, thing: Thing, path: Path, step: int) -> None:
        draw = self._draw
        if draw.random() < 0.25 or not path.is_dir():
            return
        thing.states = f"checkpoint-{draw.randint(1, step)}"
        state: dict[str, object] = {
            "global_step": step,
            "best_model_checkpoint": f"out/{thing.states}",
        }
        if draw.random() < 0.7:
            thing.metrics["eval_loss"] = draw.choice((0.1, 0.2, 0.3))
            state["log_history"] = [{"step": step, "eval_loss": thing.metrics["eval_loss"]}]
        (path / "trainer_state.json").write_text(json.dumps(state))

    def _foreign_folder(self, path: Path) -> None:
        """Somebody's own things under the name of a checkpoint, or a weird one."""
        if path.suffix == ".ckpt":
            path.write_bytes(b"model_checkpoint_path: 'x'\n" * 9)
            return
        (path / "keep").mkdir(parents=True)
        (path / "keep" / "thesis.tex").write_text("x")
        (path / "main.py").write_text("x")

    def _add_foreign(self) -> None:
        draw = self._draw
        names = ("notes.txt", "logs", "src", "loop", "gone", "step-9-bak", ".cache", "step-77")
        for name in draw.sample(names, draw.randint(0, 4)):
            path = self.root / name
            self.things.append(Thing(name, ""))
            if name == "notes.txt" or name == "step-77":
                path.write_text("x")
            elif name in ("loop", "gone"):
                path.symlink_to("loop" if name == "loop" else "nowhere")
            elif name == "step-9-bak":
                self._known[0].copy(path)
            else:
                (path / "keep").mkdir(parents=True)
                (path / "keep" / "x.py").write_text("x")

    def _point(self) -> None:
        """Let something name checkpoints: pointers, and links from anywhere."""
        draw = self._draw
        named = [one for one in self.things if one.truth and not one.name.startswith((".", "tmp-"))]
        own = [one for one in named if not one.link]
        if draw.random() < 0.35 and own:
            one = draw.choice(own)
            pointer = draw.choice(("latest", "latest_universal", "last_checkpoint"))
            text = draw.choice(
                (f"{one.name}", f"/data/run/{one.name}\n", f'"{one.name}"', "step-999")
            )
            (self.root / pointer).write_text(text)
            if text != "step-999":
                one.named_by.append(pointer)
        if draw.random() < 0.3 and own:
            one = draw.choice(own)
            place = draw.choice((self.root, self.root.parent, self.root / "links"))
            place.mkdir(exist_ok=True)
            (place / "best").symlink_to(self.root / one.name)
            one.named_by.append("a link")
        folders = [one for one in own if any(_inside(self.root / one.name))]
        if draw.random() < 0.2 and len(folders) > 1:
            holder, one = draw.sample(folders, 2)
            link = self.root / holder.name / "links" / "earlier"
            link.parent.mkdir()
            link.symlink_to(os.path.relpath(self.root / one.name, link.parent))
            one.named_by.append(f"a link in {holder.name}")
            age(self.root / holder.name, holder.time)


@pytest.mark.parametrize("leaf", one_in(2, [*LEAVES, "own"]))
def test_prune_never_treats_unusual_leaf_as_damage(
    known: list[Template], tmp_path: Path, leaf: str
) -> None:
    """Of four complete checkpoints the newest two hold something that few trainers save."""
    plain = next(one for one in known if one.path.name == "plain.ckpt")
    unusual = next(one for one in known if one.path.name == f"{leaf}.ckpt")
    for step, template in ((10, plain), (20, plain), (30, unusual), (40, unusual)):
        age(template.copy(tmp_path / f"epoch=0-step={step}.ckpt"), START + step)
    words = ["--keep-last", "1", "--include-incomplete", "--yes"]
    assert CliRunner().invoke(PRUNE, ["prune", str(tmp_path), *words]).exit_code == 0
    left = [int(path.stem.rpartition("=")[2]) for path in sorted(tmp_path.iterdir())]
    assert left in ([40], [20, 30, 40]), "complete: the rules apply; unknown: all stay"
