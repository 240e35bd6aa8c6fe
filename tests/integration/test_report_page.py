"""The page of a report in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptctl
from tests import browser
from tests.browser import Browser

pytestmark = pytest.mark.skipif(browser.found() is None, reason="no Chromium on this machine")
HOSTILE = "</script><img src=x onerror=document.title='run'>"
MANY = 5000
ROWS = "document.querySelectorAll('#tensors tbody tr[data-index]')"


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture
def look(opened: Browser) -> Iterator[Browser]:
    opened.complaints.clear()
    opened.size(1200, 900)
    yield opened
    assert not opened.complaints


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("big")
    state = {f"layers.{i // 10}.{i % 10}.weight": torch.zeros(1 + i % 7) for i in range(MANY)}
    state |= {HOSTILE: torch.ones(50), "turned\u202e\x07": torch.ones(1), "n": torch.tensor(3)}
    save_file(state, folder / "model.safetensors")
    ckptctl.report(folder / "model.safetensors", folder / "out" / "page.html")
    return folder / "out" / "page.html"


@pytest.fixture(scope="module")
def torn(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torn")
    shutil.copytree(data / "dcp" / "dcp_2d" / "ckpt", folder / "ckpt")
    (folder / "ckpt" / "__1_0.distcp").unlink()
    ckptctl.report(folder / "ckpt", folder / "page.html", stats=True)
    return folder / "page.html"


def test_names_are_text(look: Browser, big: Path) -> None:
    look.open(big)
    assert look.run("document.querySelectorAll('img, iframe, object').length") == 0
    assert "run" not in look.run("document.title").split()
    look.run(f"[...{ROWS}].map((row) => row.querySelector('button').textContent)")
    look.run("document.getElementById('search').value = 'img'")
    look.run("document.getElementById('search').dispatchEvent(new Event('input'))")
    assert look.run(f"{ROWS}[0].querySelector('button').textContent") == HOSTILE
    look.run(f"{ROWS}[0].querySelector('button').click()")
    assert look.run("document.getElementById('details-name').textContent") == HOSTILE
    assert look.run("document.querySelectorAll('img').length") == 0
    look.open(big, "#tensor=turned%E2%80%AE%07")
    assert look.run("document.getElementById('details-name').textContent") == r"turned\u{202e}\u{7}"


def test_nothing_else_runs_or_loads(look: Browser, big: Path) -> None:
    look.open(big)
    assert look.run("performance.getEntriesByType('resource').length") == 0
    script = "const s = document.createElement('script'); s.textContent = 'document.title = 1';"
    look.run(f"(() => {{ {script} document.body.append(s); }})()")
    look.run("document.body.insertAdjacentHTML('beforeend', '<img src=data:,>')")
    assert look.run("document.title") != "1"
    look.wait("true")
    assert any("Content Security Policy" in one for one in look.complaints)
    look.complaints.clear()


def test_a_long_table_is_drawn_where_one_looks(look: Browser, big: Path) -> None:
    look.open(big)
    assert (
        look.run("document.querySelector('#tensors [role=status]').textContent") == "5,003 of 5,003"
    )
    assert 10 < look.run(f"{ROWS}.length") < 100
    look.run("document.querySelector('#tensors .scroller').scrollTop = 1e9")
    look.wait(f"{ROWS}.length > 0 && {ROWS}[{ROWS}.length - 1].dataset.index === '5002'")
    assert look.run(f"{ROWS}.length") < 100
    assert (
        look.run("document.querySelector('#tensors th').getAttribute('aria-sort')") == "ascending"
    )
    names = sorted_by(look, 0)
    assert names[0].startswith("turned")
    sizes = sorted_by(look, 3)
    assert HOSTILE in sizes[0]


def sorted_by(look: Browser, column: int) -> Any:
    look.run(f"document.querySelectorAll('#tensors .sort')[{column}].click()")
    look.wait(f"{ROWS}.length > 0 && {ROWS}[0].dataset.index === '0'")
    return look.run(f"[...{ROWS}].map((row) => row.querySelector('th').textContent)")


def test_the_treemap_is_walked_with_keys(look: Browser, big: Path) -> None:
    look.open(big)
    here = "document.querySelector('.trail [aria-current]').textContent"
    assert look.run(here) == "all tensors"
    look.run("document.querySelector('.treemap .cell').focus()")
    look.press("Enter")
    assert look.run(here) == "layers"
    look.press("ArrowRight")
    index = "[...document.querySelector('.treemap').children].indexOf(document.activeElement)"
    assert look.run(index) == 1
    look.press("Escape")
    assert look.run(here) == "all tensors"
    inside = """[...document.querySelectorAll('.treemap .cell')].every((cell) => {
      const [a, b] = [cell, cell.parentElement].map((one) => one.getBoundingClientRect());
      return a.left >= b.left - 1 && a.right <= b.right + 1 && a.bottom <= b.bottom + 1;
    })"""
    assert look.run(inside)
    assert look.run("document.querySelectorAll('.treemap .cell').length") < 3200


def test_holes_are_red_and_named(look: Browser, torn: Path) -> None:
    look.open(torn, "#tensor=model.l1.weight")
    assert look.run("document.querySelectorAll('.map .chunk').length") == 4
    holes = "document.querySelectorAll('.map .chunk.hole')"
    assert look.run(f"{holes}.length") == 1
    red = look.run(f"getComputedStyle({holes}[0]).fill")
    assert red == "rgb(179, 32, 31)"
    # Rows 9 to 13 of 17.
    part = look.run(
        f"{holes}[0].height.baseVal.value / {holes}[0].viewportElement.viewBox.baseVal.height"
    )
    assert part == pytest.approx(4 / 17, rel=0.02)
    shown = look.run("document.querySelector('dialog .small tbody tr.alarming').textContent")
    assert shown == "[9:13, 0:13]missing: should be in __1_0.distcp (rank 1)"
    assert look.run("document.querySelectorAll('.histogram .bar-value').length") == 40
    look.press("Escape")
    assert not look.run("document.getElementById('details').open")
    assert look.run("document.querySelector('.badge').textContent") == "not whole"


def test_two_checkpoints(look: Browser, data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "tiny-llama3-hf", tmp_path / "other")
    file = min((tmp_path / "other").glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 0x40
    file.chmod(0o644)
    file.write_bytes(raw)
    found = ckptctl.report(
        data / "tiny-llama3-hf", tmp_path / "page.html", other=tmp_path / "other"
    )
    assert found.difference is not None
    (name,) = [one.name for one in found.difference.tensors]
    look.open(tmp_path / "page.html")
    rows = "document.querySelectorAll('#differences tbody tr[data-index]')"
    assert look.run(f"{rows}.length") == 1
    look.run(f"{rows}[0].querySelector('button').click()")
    assert look.run("document.getElementById('details-name').textContent") == name
    assert "largest difference" in look.run("document.getElementById('details').textContent")


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (360, False)])
def test_it_fits(look: Browser, torn: Path, big: Path, width: int, dark: bool) -> None:
    """Nothing is wider than the window, and text can be told from its ground."""
    for page, name in ((torn, "model.l1.weight"), (big, "n")):
        look.size(width, 800, dark)
        look.open(page)
        assert look.run("document.documentElement.scrollWidth") <= width
        ground, text = (
            look.run(f"getComputedStyle(document.body).{one}")
            for one in ("backgroundColor", "color")
        )
        assert (brightness(ground) < brightness(text)) == dark
        assert abs(brightness(ground) - brightness(text)) > 400
        look.open(page, f"#tensor={name}")
        assert look.run("document.getElementById('details').scrollWidth") <= width
        assert len(look.picture()) > 10_000


def brightness(colour: str) -> int:
    return sum(int(part) for part in colour[4:-1].split(","))


def test_every_control_has_a_name(look: Browser, torn: Path) -> None:
    look.open(torn, "#tensor=model.l1.weight")
    look.call("Accessibility.enable")
    nodes = look.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "link", "combobox", "searchbox", "checkbox", "dialog", "image", "table"}
    seen = [n for n in nodes if n.get("role", {}).get("value") in roles and not n["ignored"]]
    assert len(seen) > 5
    assert all(node["name"]["value"] for node in seen), seen
