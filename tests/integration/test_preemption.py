"""A run that is taken off its machine: the script of the how-to, killed as schedulers do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptctl.api.runs import latest
from tests.gloo import REPOSITORY, run_on_ranks
from tests.integration.preemption_ranks import told, too_late

GRACE = 20
"""Seconds between SIGTERM and SIGKILL."""
STEPS = 150
LINE = re.compile(r"rank (\d) step (\d+) loss (-?0x[0-9a-f.]+p[-+]\d+)")
"""Written at once; its end comes apart, perhaps behind a line of the other rank."""
PAGE = REPOSITORY / "docs" / "how-to" / "survive-preemption.md"
Losses = dict[tuple[int, int], str]


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_preemption_is_seen_by_all_ranks_in_same_call(tmp_path: Path, background: bool) -> None:
    run_on_ranks(told, (1, 2, 3), tmp_path, background)


@pytest.mark.slow
def test_missed_deadline_is_raised_on_every_rank(tmp_path: Path) -> None:
    run_on_ranks(too_late, (1, 2), tmp_path)


def script(folder: Path, mode: str) -> Path:
    """Write the script that the how-to shows."""
    body = PAGE.read_text().partition("<!-- file: train.py -->\n```py\n")[2].partition("```\n")[0]
    assert '        "run",\n' in body
    path = folder / "train.py"
    path.write_text(body.replace('        "run",\n', f'        "run",\n        mode="{mode}",\n'))
    return path


def start(train: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "STEPS": str(STEPS)}
    return subprocess.Popen(
        [*command, "--nproc-per-node=2", str(train)],
        cwd=train.parent,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def family(pid: int) -> Iterator[int]:
    """Yield a process and all that it has started, and those have."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from family(int(child))


def losses(printed: str) -> Losses:
    return {(int(rank), int(step)): loss for rank, step, loss in LINE.findall(printed)}


def whole(train: Path) -> Losses:
    running = start(train)
    out, _ = running.communicate(timeout=240)
    assert running.returncode == 0
    return losses(out)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Return the losses of a run that nobody interrupts."""
    found = whole(script(tmp_path_factory.mktemp("whole"), "thread"))
    assert len(found) == 2 * STEPS
    return found


def killed(train: Path, at: str, everybody: bool) -> Losses:
    """End a run as a scheduler does, when it prints *at*."""
    running = start(train)
    assert running.stdout
    printed = []
    for line in running.stdout:
        printed.append(line)
        if at in line:
            break
    processes = list(family(running.pid))
    for pid in processes if everybody else processes[:1]:
        os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + GRACE
    while running.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    for pid in processes:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    rest = running.stdout.read()  # `communicate` would not see what has been read ahead
    running.stdout.close()
    running.wait(60)
    return losses("".join(printed) + rest)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "everybody"), [("thread", True), ("process", True), ("thread", False)]
)
def test_preempted_run_resumes_without_losing_steps(
    tmp_path: Path, expected: Losses, mode: str, everybody: bool
) -> None:
    """SIGTERM, to all or to the launcher, then SIGKILL: the loss goes on bit for bit."""
    train = script(tmp_path, mode)
    before = killed(train, "rank 0 step 23 ", everybody)
    last = max(step for _, step in before)
    assert before.keys() == {(rank, step) for rank in (0, 1) for step in range(1, last + 1)}
    assert 23 <= last < STEPS
    assert latest(tmp_path / "run").chosen.step == last, "what was trained last is on disk"
    assert not list((tmp_path / "run").glob(".*staging")), "nothing was torn off"
    after = whole(train)
    assert min(step for _, step in after) == last + 1
    assert {**before, **after} == expected
