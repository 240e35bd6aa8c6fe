"""A process takes its part of the cores of its host."""

from __future__ import annotations

import os

import pytest

from ckptctl.storage import threads


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in threads.LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("cores", "processes", "expected"),
    [(2, 1, 2), (2, 2, 1), (2, 4, 1), (64, 1, 16), (64, 8, 8), (16, 8, 2), (1, 1, 1)],
)
def test_cores_are_divided_among_processes(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: int, expected: int
) -> None:
    monkeypatch.setattr(threads, "count_cores", lambda: cores)
    assert threads.get_default_thread_count(processes) == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("LOCAL_WORLD_SIZE", "8", 2),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "16", 1),
        ("SLURM_STEP_TASKS_PER_NODE", "8(x128)", 2),
        ("SLURM_STEP_TASKS_PER_NODE", "4(x2),1", 4),
        ("LOCAL_WORLD_SIZE", "many", 1),
        ("LOCAL_WORLD_SIZE", "0", 1),
    ],
)
def test_launcher_environment_sets_processes_per_host(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: int
) -> None:
    monkeypatch.setattr(threads, "count_cores", lambda: 16)
    monkeypatch.setenv(name, value)
    assert threads.get_default_thread_count(1024) == expected


def test_cores_outside_affinity_mask_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert threads.count_cores() == 1
