"""``kill -9`` at every system call of a prune: whole checkpoints under their names, or trash.

The harness is that of ``test_kill.py``: a torch-free process forks a child for each point.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ckptctl import formats
from ckptctl.planner.retention import Policy
from ckptctl.runs.health import check_health
from ckptctl.runs.removal import plan_prune, run_prune
from ckptctl.storage.trash import TRASH_FOLDER
from ckptctl.verbs.verification.verify import verify_checkpoint
from ckptctl.verbs.verification.verify_options import VerifyOptions
from tests.integration.test_kill import MEMORY, Bomb, forked
from tests.runs import START, age, save_step
from tests.sweeps import one_in

SCENARIOS = {"remove": 1, "thin": 7, "files": 5}
"""How many system calls lie between two points; many times as many in the quick test."""
QUICK = 10
SAVED = Path(__file__).parents[1] / "data" / "wrappers" / "lightning_fsdp1" / "ckpt"
NAMES = [f"epoch=0-step={step}.ckpt" for step in (1, 2, 3)]


def prepared(root: Path, scenario: str) -> None:
    for step, name in enumerate(NAMES, 1):
        if scenario == "thin":
            shutil.copytree(SAVED / NAMES[1], root / name)
        else:
            save_step(root / name, files=2)
            (root / name / "inner").mkdir()
            (root / name / "inner" / "state.json").write_text("{}")
        if scenario == "files":
            (root / name / "optimizer.pt").write_bytes(b"moments")
            verify_checkpoint(root / name, VerifyOptions(level="full", manifest=True))
        age(root / name, START + step)


def prune(root: Path, scenario: str) -> int:
    run_prune(plan_prune(root, Policy(last=1), thin=scenario != "remove"))
    return 0


def listing(folder: Path) -> list[tuple[str, bytes]]:
    files = (item for item in sorted(folder.rglob("*")) if item.is_file())
    return [(str(item.relative_to(folder)), item.read_bytes()) for item in files]


def settle(root: Path, scenario: str, before: list[tuple[str, bytes]]) -> bool:
    """Check what a killed run left, run again, check that all is well and tidy."""
    there = sorted(item.name for item in root.iterdir() if item.name != TRASH_FOLDER)
    assert NAMES[-1] in there
    assert set(there) <= set(NAMES)
    for name in there:
        assert not check_health(root / name).problem, name
        if scenario == "remove" or name == NAMES[-1]:
            assert listing(root / name) == before, name
        if scenario == "files":
            check_files(root / name, before)
    if scenario != "remove":
        assert there == NAMES
    assert forked(lambda: prune(root, scenario)) == 0
    left = sorted(item.name for item in root.iterdir())
    assert left == (NAMES[-1:] if scenario == "remove" else NAMES), left
    if scenario == "thin":
        for name in NAMES[:-1]:
            catalog = formats.open_checkpoint(root / name)
            assert catalog.tensors
            assert not [key for key in catalog.tensors if key.startswith("optimizer")]
            assert (root / name / "meta.pt").exists()
    if scenario == "files":
        assert [(root / name / "optimizer.pt").exists() for name in NAMES] == [False, False, True]
    return there != NAMES


def check_files(path: Path, before: list[tuple[str, bytes]]) -> None:
    """Check that weights are as they were, and that what the list says is true."""
    changing = ("optimizer.pt", "SHA256SUMS")
    assert [one for one in listing(path) if one[0] not in changing] == [
        one for one in before if one[0] not in changing
    ]
    assert verify_checkpoint(path, VerifyOptions(level="full")).verdict == "complete"
    assert "model.safetensors.index.json" in (path / "SHA256SUMS").read_text()


def at_every_call(scenario: str, stride: int) -> int:
    changed, points = False, 0
    for point in range(1, 20_000, stride):
        with tempfile.TemporaryDirectory(dir=MEMORY) as name:
            root = Path(name)
            prepared(root, scenario)
            before = listing(root / NAMES[0])

            def body(root: Path = root, point: int = point) -> int:
                Bomb(point).install()
                return prune(root, scenario)

            code = forked(body)
            if code == 0:
                assert changed or scenario != "remove"
                return points
            assert code == -signal.SIGKILL, (point, code)
            changed |= settle(root, scenario, before)
            points += 1
    raise AssertionError("it never ended")


@pytest.mark.parametrize("times", [QUICK, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", one_in(3, SCENARIOS))
def test_killed_prune_leaves_only_complete_checkpoints(scenario: str, times: int) -> None:
    stride = str(SCENARIOS[scenario] * times)
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.test_kill_prune", scenario, stride],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * times > 9


if __name__ == "__main__":
    assert "torch" not in sys.modules
    print(at_every_call(sys.argv[1], int(sys.argv[2])))
