"""Paths and builders that every test may ask for."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

DATA = Path(__file__).parent / "data"
ORACLES = Path(__file__).parent / "oracle"


def pytest_configure() -> None:
    """Let Ctrl-C be heard here and in what tests start: a shell's background jobs ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tests run on all cores already: threads of torch would wait for each other, at full speed.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # How fast examples are drawn and run depends on what else the machine does.
    unhurried = settings(
        deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50
    )
    settings.register_profile("tests", unhurried)
    settings.load_profile("tests")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Start no workers for a part of the tests: that takes them longer than most parts."""
    return None if _asks_for_all(config) else 0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip what has no selected test: oracles, which import transformers; files without oracles."""
    if "not oracle" in _selected(config):
        return True if collection_path == ORACLES else None
    if "oracle" in _selected(config) and _asks_for_all(config) and collection_path.suffix == ".py":
        has_oracles = "mark.oracle" in collection_path.read_text()
        return None if has_oracles or collection_path.name == "conftest.py" else True
    return None


def _selected(config: pytest.Config) -> list[str]:
    found: list[str] = config.getoption("markexpr").split(" and ")
    return found


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector away from the tests: each search of all takes half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)  # as in ckptctl.__main__


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say how long it will take."""
    if hasattr(config, "workerinput") or not _asks_for_all(config):
        return None
    return "all tests: 3 to 5 minutes on two cores; `pytest tests/unit/planner`, say, a few seconds"


def _asks_for_all(config: pytest.Config) -> bool:
    return all(Path(name).resolve() in (DATA.parent, DATA.parents[1]) for name in config.args)


@pytest.fixture(scope="session")
def data() -> Path:
    """Return ``tests/data``, described in its README."""
    return DATA


@pytest.fixture(scope="session")
def tiny_llama3_hf(data: Path) -> Path:
    """Return the sharded Llama 3.1 folder that transformers wrote; read only."""
    return data / "tiny-llama3-hf"


@pytest.fixture(scope="session", autouse=True)
def command_trees() -> Iterator[None]:
    """Let Typer's runner make the commands of an app once: that takes longer than running most."""
    from typer.main import get_command

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", cache(get_command))
        yield


@pytest.fixture
def two_torch_threads() -> Iterator[None]:
    """Let torch use two threads, as it does outside of the tests."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
