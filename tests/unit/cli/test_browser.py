"""The browser, driven by textual's pilot, with pictures of its states."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import shutil
import struct
import subprocess
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptctl.verbs import browsing
from ckptctl.verbs.browsing import build_tree, find_tensors, open_for_browsing
from ckptctl.verbs.inspection.inspect_options import InspectOptions
from tests.program import start_program

pytest.importorskip("textual", reason="the extra `tui` is not installed")

from textual.screen import Screen

from ckptctl.cli.views.browser import Browser
from ckptctl.verbs.statistics import UnneededResultError

SNAPSHOTS = Path(__file__).parents[2] / "snapshots" / "browse"
PINNED = "8.2.8"
SIZE = (110, 30)
Drive = Callable[[Browser, Any], Awaitable[None]]
LLAMA = "tiny-llama3-hf"


def drive(paths: list[Path], act: Drive, size: tuple[int, int] = SIZE) -> Browser:
    """Open *paths* in a browser without a terminal, and let *act* press keys."""
    browser = Browser([open_for_browsing(path, InspectOptions()) for path in paths])

    async def run() -> None:
        async with browser.run_test(size=size) as pilot:
            await pilot.pause()
            await act(browser, pilot)

    asyncio.run(run())
    return browser


async def press(browser: Browser, pilot: Any, *keys: str) -> None:
    await pilot.press(*keys)
    await browser.workers.wait_for_complete()
    await pilot.pause()


def screen(browser: Browser) -> list[str]:
    strips = browser.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip).rstrip() for strip in strips]


def require_picture(browser: Browser, name: str) -> None:
    """Compare the screen with the stored picture, which depends on textual's version."""
    if version("textual") != PINNED:
        return
    picture = re.sub(r"terminal-\d+", "terminal", browser.export_screenshot(title=name))
    path = SNAPSHOTS / f"{name}.svg"
    if os.environ.get("CKPTCTL_UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(picture)
    assert picture == path.read_text()


@pytest.fixture
def llama(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with a short relative path, which pictures show."""
    shutil.copytree(data / LLAMA, tmp_path / "llama", copy_function=shutil.copyfile)
    monkeypatch.chdir(tmp_path)
    return Path("llama")


def test_top_level_is_sorted_by_size(llama: Path) -> None:
    async def act(browser: Browser, pilot: Any) -> None:
        lines = screen(browser)
        assert "llama · hf · llama3" in lines[0] and "complete" in lines[0]
        assert "model." in lines[2] and "lm_head.weight" in lines[3]
        assert "bf16 [128, 64]" in lines[3]
        require_picture(browser, "top")

    drive([llama], act)


def test_keys_move_like_ncdu_and_less(llama: Path) -> None:
    async def act(browser: Browser, pilot: Any) -> None:
        await press(browser, pilot, "right")
        assert browser.module.full_name == "model"
        await press(browser, pilot, "l", "enter")
        assert browser.module.full_name == "model.layers.0"
        count = len(browser.entry_list.nodes)
        await press(browser, pilot, "G")
        assert browser.entry_list.cursor == count - 1
        await press(browser, pilot, "down")
        assert browser.entry_list.cursor == count - 1
        await press(browser, pilot, "g", "j", "j", "k")
        assert browser.entry_list.cursor == 1
        await press(browser, pilot, "h")
        assert browser.module.full_name == "model.layers"
        assert browser.entry_list.highlighted is browser.module.children["0"]
        await press(browser, pilot, "left", "backspace", "left")
        assert browser.module is browser.root_node

    drive([llama], act)


def test_sort_keeps_highlighted_entry(llama: Path) -> None:
    async def act(browser: Browser, pilot: Any) -> None:
        await press(browser, pilot, "enter", "G")
        node = browser.entry_list.highlighted
        assert node and node.name == "norm.weight"
        await press(browser, pilot, "s")
        assert browser.entry_list.highlighted is node
        assert [n.name for n in browser.entry_list.nodes] == [
            "embed_tokens.weight",
            "layers",
            "norm.weight",
        ]
        require_picture(browser, "by-name")

    drive([llama], act)


def test_search_finds_tensors_in_all_modules(llama: Path) -> None:
    async def act(browser: Browser, pilot: Any) -> None:
        await press(browser, pilot, "slash", *"Q_PROJ")
        require_picture(browser, "search")
        await press(browser, pilot, "enter")
        found = browser.entry_list.highlighted
        assert found and found.full_name == "model.layers.0.self_attn.q_proj.weight"
        assert browser.status == "match 1 of 2"
        await press(browser, pilot, "n")
        assert browser.entry_list.highlighted is not found
        await press(browser, pilot, "n")
        assert browser.entry_list.highlighted is found
        await press(browser, pilot, "N")
        assert browser.status == "match 2 of 2"
        await press(browser, pilot, "slash", *"nothing", "enter")
        assert "no tensor contains `nothing`" in screen(browser)[-1]
        await press(browser, pilot, "n")
        assert browser.status.startswith("no search")
        await press(browser, pilot, "slash", "escape", "j")
        assert browser.focused is browser.entry_list

    drive([llama], act)


def test_tensor_shows_bytes_and_values(llama: Path) -> None:
    async def act(browser: Browser, pilot: Any) -> None:
        await press(browser, pilot, "slash", *"1.input_layernorm", "enter")
        text = "\n".join(screen(browser))
        assert "bfloat16" in text and "stored in 1 box" in text
        assert not browser.statistics and not browser.extents
        await press(browser, pilot, "enter", "v")
        require_picture(browser, "tensor")

    browser = drive([llama], act)
    name = "model.layers.1.input_layernorm.weight"
    files = sorted(llama.glob("*.safetensors"))
    state = {key: (file, value) for file in files for key, value in load_file(file).items()}
    file, value = state[name]
    (text,) = browser.extents[0, name]
    start, end = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+)-([\d,]+)$", text)[0])
    assert text.startswith(file.name)
    assert file.read_bytes()[start:end] == value.view(torch.uint8).numpy().tobytes()
    statistics: Any = browser.statistics[0, name]
    assert statistics.count == value.numel()
    assert statistics.minimum == float(value.min())
    assert statistics.mean == pytest.approx(float(value.double().mean()))
    assert sum(statistics.histogram) == value.numel() and len(statistics.histogram) == 40


def test_two_checkpoints_are_side_by_side(llama: Path) -> None:
    state = {key: v for f in sorted(llama.glob("*.safetensors")) for key, v in load_file(f).items()}
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.norm.weight"] = torch.ones(32)
    state["extra"] = torch.ones(3)
    Path("other").mkdir()
    save_file(state, "other/model.safetensors", {"format": "pt"})

    async def act(browser: Browser, pilot: Any) -> None:
        marks = {n.full_name: n.mark for n in browsing.walk(browser.root_node)}
        assert marks["extra"] == ">"
        assert marks["model.layers.1.mlp.up_proj.weight"] == "<"
        assert marks["model.norm.weight"] == "!"
        assert marks["model.layers.0"] == "=" and marks["lm_head.weight"] == "="
        assert marks["model.layers.1"] == marks["model"] == "!"
        await press(browser, pilot, "enter", "G")
        require_picture(browser, "two")
        await press(browser, pilot, "v")
        assert {side for side, _ in browser.statistics} == {0, 1}

    drive([llama, Path("other")], act)


def test_help_lists_all_keys(llama: Path) -> None:
    async def act(browser: Browser, pilot: Any) -> None:
        await press(browser, pilot, "question_mark")
        assert "highlight another entry" in "\n".join(screen(browser))
        require_picture(browser, "help")
        await press(browser, pilot, "escape", "j")
        assert browser.entry_list.cursor == 1

    drive([llama], act)


def test_layout_of_tiny_terminal_settles(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scroll bar that appears and disappears would draw the screen forever."""
    lay_out, layouts = Screen._refresh_layout, []

    def count(screen: Screen[Any], *args: Any, **options: Any) -> None:
        layouts.append(1)
        lay_out(screen, *args, **options)

    monkeypatch.setattr(Screen, "_refresh_layout", count)

    async def act(browser: Browser, pilot: Any) -> None:
        layouts.clear()
        await asyncio.sleep(0.5)

    drive([llama], act, size=(12, 8))
    assert len(layouts) < 3


def test_redirected_stderr_is_no_terminal(llama: Path, tmp_path: Path) -> None:
    """textual draws on stderr, so nothing would be visible."""
    master, slave = pty.openpty()
    with (tmp_path / "log").open("wb") as log:
        wait = start_program(["browse", llama], [slave, slave, log.fileno()])
        os.close(slave)
        assert wait() == 0
    assert (tmp_path / "log").read_bytes() == b""
    assert b"lm_head.weight" in os.read(master, 65536)
    os.close(master)


def test_two_checkpoints_without_terminal_are_an_error(
    llama: Path, piped: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    result = piped("browse", llama, llama)
    assert (result.returncode, result.stdout) == (2, "")
    assert "ckptctl diff llama llama --structure" in result.stderr


def test_damaged_checkpoint_is_shown(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "dcp/dcp_2d/ckpt", tmp_path / "ckpt", copy_function=shutil.copyfile)
    (tmp_path / "ckpt" / "__1_0.distcp").unlink()

    async def act(browser: Browser, pilot: Any) -> None:
        assert "damaged" in screen(browser)[0]
        node = next(n for n in browsing.walk(browser.root_node) if n.is_tensor)
        browser._show_module(node.parent or browser.root_node, node)
        await press(browser, pilot, "enter", "v")
        (result,) = browser.statistics.values()
        assert result is not None

    drive([tmp_path / "ckpt"], act, (300, 30))


def test_names_from_files_cannot_style_or_hide_text(tmp_path: Path) -> None:
    names = ["[bold red]x[/]", "turn\u202ed", "bell\x07", "a" * 300]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "m.safetensors")

    async def act(browser: Browser, pilot: Any) -> None:
        text = "\n".join(screen(browser))
        assert "[bold red]x[/]" in text and r"turn\u202ed" in text and r"bell\x07" in text
        assert "\u202e" not in text and "…" in text

    drive([tmp_path / "m.safetensors"], act, (80, 24))


def write_long_index(path: Path, count: int) -> None:
    """Write a file of many one-element tensors, whose header only is large."""
    entries = ",".join(
        f'"layers.{n}.weight":{{"dtype":"BF16","shape":[1],"data_offsets":[{2 * n},{2 * n + 2}]}}'
        for n in range(count)
    )
    header = f"{{{entries}}}".encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 2 * count)


@pytest.mark.slow
def test_only_visible_lines_are_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 20_000
    write_long_index(tmp_path / "m.safetensors", count)
    rendered: list[str] = []
    render = Browser._render_node

    def record(self: Browser, node: Any, width: int) -> Any:
        rendered.append(node.name)
        return render(self, node, width)

    monkeypatch.setattr(Browser, "_render_node", record)

    async def act(browser: Browser, pilot: Any) -> None:
        await press(browser, pilot, "enter", "G")
        assert len(browser.entry_list.nodes) == count
        assert browser.entry_list.cursor == count - 1

    drive([tmp_path / "m.safetensors"], act)
    assert 0 < len(rendered) < 500


def test_only_index_is_read_without_request(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr("ckptctl.verbs.browsing.measure_tensor", refuse)

    async def act(browser: Browser, pilot: Any) -> None:
        await press(browser, pilot, "enter", "enter", "enter", "j", "G", "slash", "w", "enter", "n")

    drive([llama], act)


@pytest.mark.slow
def test_reading_stops_on_request(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []

    def read_forever(checkpoint: Any, entry: Any, advance: Callable[[int], None]) -> None:
        try:
            while True:
                advance(1)
        except UnneededResultError:
            stopped.append(True)
            raise

    monkeypatch.setattr("ckptctl.cli.views.browser.measure", read_forever)

    async def act(browser: Browser, pilot: Any) -> None:
        await pilot.press("slash", *"norm", "enter", "v")
        await pilot.pause()
        assert browser.status.startswith("reading values")
        await pilot.press("escape")
        for _ in range(1000):
            if stopped:
                break
            await asyncio.sleep(0.01)
        assert not browser.statistics

    drive([llama], act)
    assert stopped == [True]


def test_tree_of_many_parts_is_limited(tmp_path: Path) -> None:
    name = ".".join("a" * 500)
    save_file({name: torch.ones(1), "b": torch.ones(1)}, tmp_path / "m.safetensors")
    root = build_tree([open_for_browsing(tmp_path / "m.safetensors", InspectOptions())])
    assert [node.full_name for node in find_tensors(root, "a.a")] == [name]
