"""Local tensors that say which parts of a global tensor they hold; and replicas that differ."""

from __future__ import annotations

from pathlib import Path

from tests.gloo import run_on_ranks
from tests.integration import placement_ranks


def test_tensors_with_placement_are_saved_and_loaded(tmp_path: Path) -> None:
    run_on_ranks(placement_ranks.save_all, (2,), tmp_path)
    run_on_ranks(placement_ranks.load_all, (1, 2), tmp_path)


def test_different_replicas_are_refused(tmp_path: Path) -> None:
    for world in (2, 3):
        (tmp_path / f"{world}").mkdir()
        run_on_ranks(placement_ranks.replicas_that_differ, (world,), tmp_path / f"{world}")
