"""``kill -9`` at every system call of a run, and at random times.

A torch-free process forks a child for each point; the child kills itself just before its k-th
call. Afterwards the destination is as it was or complete, the source is unchanged, and a second
run succeeds (or refuses, where the first had already published) and leaves nothing else behind.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptctl.errors import RefusedError
from ckptctl.file_identity import FileIdentity
from ckptctl.planner.plan import OutputFile, Plan, RawCopy, Record, Transfer
from ckptctl.planner.strided import StridedTensor
from ckptctl.storage import file_system
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from ckptctl.storage.publish import stage_output
from tests.sweeps import one_in
from tests.transfers import stored
from tests.transfers import target as target_box

HOOKED = ("open", "mkdir", "ftruncate", "preadv", "pwrite", "write", "fsync", "unlink", "rmdir")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
ROWS, COLUMNS, TENSORS = 16, 32, 3
SIZE = ROWS * COLUMNS * 2
SCENARIOS = ("fresh", "overwrite", "resume", "single-file")
JOBS, MOST = int(os.environ.get("KILL_JOBS", "1")), 16
"""Threads of the run that is killed, and the most: the next one has many where it had few."""


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def make_source(root: Path) -> None:
    root.mkdir()
    for number in range(TENSORS):
        (root / f"s{number}").write_bytes(content(number))
    (root / "config.json").write_bytes(b"{}")


def make_plan(source: Path, target: Path, single: bool) -> Plan:
    shape = (ROWS, COLUMNS)
    name = target.name if single else "model"
    records, transfers = [], []
    for number in range(TENSORS):
        records.append(Record(f"t{number}", name, number * SIZE, SIZE))
        into = target_box(name, number * SIZE, shape, number, item=2)
        tensor = StridedTensor.from_entry(stored(f"s{number}", shape, dtype="bfloat16"))
        transfers.append(Transfer("t", tensor, (into,)))
    files = [OutputFile(name, TENSORS * SIZE + 4, lambda _: iter([(TENSORS * SIZE, b"END.")]))]
    raw = []
    if not single:
        files.append(OutputFile("sub/config.json", 2, lambda _: iter(())))
        raw.append(RawCopy("config.json", 0, 2, "sub/config.json"))
    sources = {}
    for path in source.iterdir():
        sources[path.name] = FileIdentity.from_stat(path.stat())
    return Plan(
        source,
        sources,
        target,
        single,
        tuple(files),
        tuple(records),
        tuple(transfers),
        tuple(raw),
        "digest",
    )


def convert(root: Path, scenario: str, jobs: int = JOBS) -> None:
    target, resume = root / "out", scenario == "resume"
    plan = make_plan(root / "source", target, scenario == "single-file")
    with stage_output(
        target,
        overwrite=scenario == "overwrite",
        resume=resume,
        restart=not resume,
        keep_on_error=resume,
        single_file=plan.single_file,
        is_checkpoint=lambda path: (path / "model").is_file(),
    ) as stage:
        options = ExecutionOptions(jobs=jobs, resume=resume, journal_every=1)
        execute_plan(plan, stage.data, options, lambda _: None, stage.journal)
        stage.publish()


def state(root: Path) -> str:
    target = root / "out"
    whole = b"".join(content(n) for n in range(TENSORS)) + b"END."
    for number in range(TENSORS):
        assert (root / "source" / f"s{number}").read_bytes() == content(number)
    if not os.path.lexists(target):
        return "absent"
    if target.is_file():
        assert target.read_bytes() == whole
        return "new"
    found = {str(p.relative_to(target)): p for p in target.rglob("*") if p.is_file()}
    if set(found) == {"model"} and found["model"].read_bytes() == b"old":
        return "old"
    assert set(found) == {"model", "sub/config.json"}, sorted(found)
    assert found["model"].read_bytes() == whole
    assert found["sub/config.json"].read_bytes() == b"{}"
    return "new"


class Bomb:
    """Counts hooked calls and kills the process before the *at*-th."""

    def __init__(self, at: int):
        self.at = at
        self.count = 0

    def install(self) -> None:
        for name in HOOKED:
            setattr(os, name, self.wrap(getattr(os, name)))
        setattr(file_system, "rename_atomically", self.wrap(file_system.rename_atomically))  # noqa: B010
        setattr(fcntl, "flock", self.wrap(fcntl.flock))  # noqa: B010

    def wrap(self, function: Callable[..., object]) -> Callable[..., object]:
        def counted(*args, **options):
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return counted


def forked(body: Callable[[], int]) -> int:
    """Return the exit code of *body* in a child, negative for a signal."""
    child = os.fork()
    if not child:
        code = 99
        try:
            code = body()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def prepared(root: Path, scenario: str) -> None:
    make_source(root / "source")
    if scenario == "overwrite":
        (root / "out").mkdir()
        (root / "out" / "model").write_bytes(b"old")


def settle(root: Path, scenario: str) -> str:
    """Check what a killed run left, run again, check that all is well and tidy."""
    before = state(root)
    assert before in (("old", "new") if scenario == "overwrite" else ("absent", "new")), before

    def again() -> int:
        try:
            convert(root, scenario, MOST + 1 - JOBS)
        except RefusedError:
            return 6
        return 0

    code = forked(again)
    published = before == "new" and scenario != "overwrite"
    assert code == (6 if published else 0), (before, code)
    assert state(root) == "new"
    assert sorted(p.name for p in root.iterdir()) == ["out", "source"], sorted(root.iterdir())
    return before


def at_every_call(scenario: str) -> tuple[int, set[str]]:
    seen: set[str] = set()
    for point in range(1, 2000):
        with tempfile.TemporaryDirectory(dir=MEMORY) as name:
            root = Path(name)
            prepared(root, scenario)

            def body(root: Path = root, point: int = point) -> int:
                Bomb(point).install()
                convert(root, scenario)
                return 0

            code = forked(body)
            if code == 0:
                return point - 1, seen
            assert code == -signal.SIGKILL, (point, code)
            seen.add(settle(root, scenario))
    raise AssertionError("it never ended")


def at_random_times(scenario: str, trials: int) -> None:
    dice = random.Random(scenario)
    for _ in range(trials):
        with tempfile.TemporaryDirectory(dir=MEMORY) as name:
            root = Path(name)
            prepared(root, scenario)
            child = os.fork()
            if not child:
                convert(root, scenario)
                os._exit(0)
            time.sleep(dice.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            settle(root, scenario)


def main() -> None:
    assert "torch" not in sys.modules
    scenario = sys.argv[1]
    points, seen = at_every_call(scenario)
    at_random_times(scenario, 10)
    print(points, *sorted(seen))


@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.slow), MOST])
@pytest.mark.parametrize(
    "scenario",
    one_in(
        2,
        [
            one if one in ("fresh", "overwrite") else pytest.param(one, marks=pytest.mark.slow)
            for one in SCENARIOS
        ],
    ),
)
def test_killed_run_leaves_complete_output_or_none(scenario, jobs):
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.test_kill", scenario],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "KILL_JOBS": str(jobs)},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    points, *seen = done.stdout.split()
    assert int(points) > 40
    assert set(seen) == {"old" if scenario == "overwrite" else "absent", "new"}


if __name__ == "__main__":
    main()
