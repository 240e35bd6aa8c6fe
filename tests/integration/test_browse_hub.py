"""``browse hf://...`` against a server on loopback that huggingface_hub itself talks to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptctl.remote.blocks import CACHE_BYTES
from ckptctl.storage import paths
from ckptctl.verbs.browsing import open_for_browsing
from ckptctl.verbs.inspection.inspect_options import InspectOptions
from tests.hub_server import Hub

pytest.importorskip("textual", reason="the extra `tui` is not installed")

from ckptctl.cli.views.browser import Browser

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the client itself
SAMPLE = Path("tests/data/tiny-llama3-hf")
NORM = "model.norm.weight"
LARGE_BYTES = 48 << 20
SLACK_BYTES = 1 << 20
"""Headers, file lists and small files, next to the values of a tensor."""


def drive(urls: list[str], act: Callable[[Browser, Any], Awaitable[None]]) -> Browser:
    browser = Browser([open_for_browsing(paths.parse_path(url), InspectOptions()) for url in urls])

    async def run() -> None:
        async with browser.run_test(size=(110, 30)) as pilot:
            await pilot.pause()
            await act(browser, pilot)

    asyncio.run(run())
    return browser


async def press(browser: Browser, pilot: Any, *keys: str) -> None:
    await pilot.press(*keys)
    await browser.workers.wait_for_complete()
    await pilot.pause()


def get_screen(browser: Browser) -> str:
    strips = browser.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


@pytest.fixture
def large(hub: Hub, tmp_path: Path) -> Hub:
    """A repository with a tensor that is larger than the cache of remote blocks."""
    (tmp_path / "large").mkdir()
    state = {"w": torch.ones(LARGE_BYTES // 2, dtype=torch.bfloat16), "z": torch.ones(3)}
    state["w"][0] = 0  # only values that differ are read twice, for a histogram
    save_file(state, tmp_path / "large" / "model.safetensors")
    hub.add("org/large", tmp_path / "large")
    return hub


def test_browsing_shows_index_and_place_of_remote_tensor(hub: Hub) -> None:
    screens: list[str] = []

    async def act(browser: Browser, pilot: Any) -> None:
        screens.append(get_screen(browser))
        await press(browser, pilot, "slash", *NORM, "enter", "l", "v")
        screens.append(get_screen(browser))

    browser = drive(["hf://org/tiny"], act)
    assert "hf://org/tiny" in screens[0] and "llama3" in screens[0]
    assert "model-00003-of-00003.safetensors bytes" in screens[1]
    (statistics,) = browser.statistics.values()
    value = load_file(SAMPLE / "model-00003-of-00003.safetensors")[NORM]
    assert getattr(statistics, "maximum", None) == value.max().item()


def test_two_remote_checkpoints_are_side_by_side(hub: Hub, tmp_path: Path) -> None:
    state: dict[str, torch.Tensor] = {}
    for file in SAMPLE.glob("*.safetensors"):
        state |= load_file(file)
    state[NORM] = state[NORM].float()
    del state["lm_head.weight"]
    (tmp_path / "other").mkdir()
    save_file(state, tmp_path / "other" / "model.safetensors")
    hub.add("org/other", tmp_path / "other")

    async def act(browser: Browser, pilot: Any) -> None:
        marks = {node.name: node.mark for node in browser.root_node.children.values()}
        assert marks["lm_head.weight"] == "<" and marks["model"] == "!"
        await press(browser, pilot, "slash", *NORM, "enter", "v")

    browser = drive(["hf://org/tiny", "hf://org/other"], act)
    assert sorted(side for side, _ in browser.statistics) == [0, 1]
    a, b = (browser.statistics[side, NORM] for side in (0, 1))
    assert getattr(a, "maximum", 0) == getattr(b, "maximum", 1)


@pytest.mark.slow
def test_values_of_remote_tensor_are_read_in_bounded_memory(large: Hub) -> None:
    """Values are read twice, so a second read that fetches again shows that no one kept them."""
    sent: list[int] = []

    async def act(browser: Browser, pilot: Any) -> None:
        sent.append(large.sent)
        await press(browser, pilot, "slash", "w", "enter", "l")
        sent.append(large.sent)
        await press(browser, pilot, "v")
        sent.append(large.sent)

    browser = drive(["hf://org/large"], act)
    assert getattr(browser.statistics[0, "w"], "count", 0) == LARGE_BYTES // 2
    assert sent[1] < SLACK_BYTES
    assert 2 * LARGE_BYTES - CACHE_BYTES <= sent[2] <= 2 * LARGE_BYTES + SLACK_BYTES


@pytest.mark.slow
def test_escape_stops_reading_of_remote_tensor(large: Hub) -> None:
    large.gather, large.patience = 1000, 0.3  # each request takes as long

    async def act(browser: Browser, pilot: Any) -> None:
        await pilot.press("slash", "w", "enter", "v")
        while large.sent < SLACK_BYTES:
            await asyncio.sleep(0.01)
        await pilot.press("escape")
        await asyncio.sleep(0.5)
        assert not browser.statistics

    drive(["hf://org/large"], act)
    assert large.sent < LARGE_BYTES
