"""The page of a report in a real browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.verbs.report import page as report_page
from tests import browser
from tests.browser import FAINT, Browser

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
def damaged(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(data / "dcp" / "dcp_2d" / "ckpt", folder / "ckpt")
    (folder / "ckpt" / "__1_0.distcp").unlink()
    ckptctl.report(folder / "ckpt", folder / "page.html", stats=True)
    return folder / "page.html"


def test_hostile_tensor_names_are_shown_as_text(look: Browser, big: Path) -> None:
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


def test_report_page_blocks_injected_scripts_and_requests(look: Browser, big: Path) -> None:
    look.open(big)
    assert look.run("performance.getEntriesByType('resource').length") == 0
    script = "const s = document.createElement('script'); s.textContent = 'document.title = 1';"
    look.run(f"(() => {{ {script} document.body.append(s); }})()")
    look.run("document.body.insertAdjacentHTML('beforeend', '<img src=data:,>')")
    assert look.run("document.title") != "1"
    look.wait("true")
    assert any("Content Security Policy" in one for one in look.complaints)
    look.complaints.clear()


def test_long_table_renders_only_visible_rows(look: Browser, big: Path) -> None:
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


def test_treemap_is_navigable_by_keyboard(look: Browser, big: Path) -> None:
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


def test_missing_chunks_are_highlighted_and_listed(look: Browser, damaged: Path) -> None:
    look.open(damaged, "#tensor=model.l1.weight")
    assert look.run("document.querySelectorAll('.map .chunk').length") == 4
    holes = "document.querySelectorAll('.map .chunk.hole')"
    assert look.run(f"{holes}.length") == 1
    yellow = look.run(f"getComputedStyle({holes}[0]).fill")
    assert yellow == "rgb(219, 164, 0)"
    # Rows 9 to 13 of 17.
    part = look.run(
        f"{holes}[0].height.baseVal.value / {holes}[0].viewportElement.viewBox.baseVal.height"
    )
    assert part == pytest.approx(4 / 17, rel=0.02)
    shown = look.run("document.querySelector('dialog .small tbody tr.missing').textContent")
    assert shown == "[9:13, 0:13]missing: expected in __1_0.distcp (rank 1)"
    assert look.run("document.querySelectorAll('.histogram .bar-value').length") == 40
    look.press("Escape")
    assert not look.run("document.getElementById('details').open")
    assert look.run("document.querySelector('.badge').textContent") == "damaged"


def test_identical_findings_are_grouped(look: Browser, damaged: Path) -> None:
    look.open(damaged)
    groups = "document.querySelectorAll('#findings .findings > li')"
    assert look.run(f"{groups}.length") == 2
    assert "elements are missing (21 times)" in look.run(f"{groups}[1].textContent")
    places = f"{groups}[1].querySelectorAll('.places > li:not(.more)')"
    in_sight = f"[...{places}].filter((one) => one.checkVisibility()).length"
    assert look.run(in_sight) == 4
    look.run(f"{groups}[1].querySelector('.more button').click()")
    assert look.run(in_sight) == 21
    assert look.run(f"{places}[4].contains(document.activeElement)"), "where one was"
    look.press("Enter")
    assert look.run("document.getElementById('details').open")
    look.press("Escape")
    assert look.run(f"{places}[4].contains(document.activeElement)")


def test_large_integers_keep_all_digits(look: Browser, tmp_path: Path) -> None:
    """JavaScript has no whole numbers beyond 2 ** 53."""
    state = {"n": torch.tensor([2**53 + 1, -(2**62) - 1]), "w": torch.ones(2, 3)}
    save_file(state, tmp_path / "a.safetensors")
    document = ckptctl.report(tmp_path / "a.safetensors", stats=True).to_json()
    number, weight = cast(list[dict[str, Any]], document["tensors"])
    document |= {"parameters": 2**61 + 1, "bytes": 2**62 + 1, "file_bytes": 2**62 + 3}
    document["left_out"] = {**cast(dict[str, int], document["left_out"]), "bytes": 2**60 + 1}
    document["dtypes"] = {
        "int64": {"tensors": 1, "elements": 2**60 + 1, "bytes": 2**62 + 1},
        "float32": {"tensors": 2**53 + 1, "elements": 6, "bytes": 24},
    }
    high = 2**60 + 1
    chunks = [
        {"file": 0, "offsets": [0, 0], "sizes": [high, 3]},
        {"file": 0, "offsets": [high, 0], "sizes": [high, 3]},
    ]
    weight |= {"bytes": 2**63 + 1, "shape": [2 * high, 3], "map": chunks, "chunks": 2}
    weight["stats"] |= {"count": 2**53 + 3, "histogram": [2**53 + 3, *[0] * 39]}
    (tmp_path / "page.html").write_text(report_page.build_page(document))
    look.open(tmp_path / "page.html", "#tensor=n")
    assert look.run("document.getElementById('summary').innerText.split('\\n')").count(
        f"2305843 T ({2**61 + 1:,})"
    )
    assert f"{2**53 + 1:,}" in look.run("document.getElementById('dtypes').textContent")
    details = "document.getElementById('details').textContent"
    assert f"min{-(2**62) - 1:,}max{2**53 + 1:,}mean" in look.run(details)
    look.open(tmp_path / "page.html", "#tensor=w")
    found = look.run(details)
    assert f"8192.0 PiB ({2**63 + 1:,})" in found and f"values{2**53 + 3:,}min" in found
    assert f"[{high}:{2 * high}, 0:3]" in found
    assert f"dim 0 ({2 * high:,})" in found
    heights = "[...document.querySelectorAll('.map .chunk')].map((one) => one.height.baseVal.value)"
    first, second = look.run(heights)
    assert first == second > 100
    assert number["stats"]["max"] == 2**53 + 1


def test_page_of_50000_tensors_stays_fast(look: Browser, tmp_path: Path) -> None:
    names = [
        f"model.layers.{i // 768}.mlp.experts.{i // 3 % 256}.{part}_proj.weight"
        for i, part in zip(range(50_000), cycle(("down", "gate", "up")), strict=False)
    ]
    save_file({"w": torch.ones(2048, 7168, dtype=torch.int8)}, tmp_path / "a.safetensors")
    document = ckptctl.report(tmp_path / "a.safetensors").to_json()
    (one,) = cast(list[dict[str, object]], document["tensors"])
    document |= {"tensors": [{**one, "name": name} for name in names], "tensor_count": 50_000}
    path = tmp_path / "page.html"
    path.write_text(report_page.build_page(document))
    assert path.stat().st_size < 14_000_000
    look.call("Performance.enable")
    look.open(path)
    # What the page's own thread does: about a second, on a machine that does nothing else.
    metrics = {one["name"]: one["value"] for one in look.call("Performance.getMetrics")["metrics"]}
    assert 0 < metrics["TaskDuration"] < 10
    assert look.run("document.querySelectorAll('*').length") < 5_000
    look.run("document.getElementById('search').value = '.64.mlp.experts.255.'")
    look.run("document.getElementById('search').dispatchEvent(new Event('input'))")
    status = look.run("document.querySelector('#tensors [role=status]').textContent")
    assert status == f"{sum('.64.mlp.experts.255.' in name for name in names)} of 50,000"


def test_initial_treemap_coloring_is_most_informative(
    look: Browser, big: Path, damaged: Path
) -> None:
    mode = "document.querySelector('#treemap select').value"
    legend = "[...document.querySelectorAll('#treemap .legend li')].map((one) => one.textContent)"
    look.open(big)
    assert look.run(mode) == "part", "all but eight bytes are float32"
    look.open(damaged)
    assert look.run(mode) == "part"
    assert {"emb", "missing"} <= set(look.run(legend)), "of what is in sight"
    assert "exp_avg" not in look.run(legend)
    look.run("document.querySelector('.cell.fold').click()")
    assert {"exp_avg", "missing"} <= set(look.run(legend))
    hatched = "document.querySelector('.cell.wrong:not(.module) .gone')"
    assert "repeating-linear-gradient" in look.run(f"getComputedStyle({hatched}).backgroundImage")


def test_comparison_page_highlights_different_tensor(
    look: Browser, data: Path, tmp_path: Path
) -> None:
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
    assert look.run("document.querySelector('#treemap select').value") == "difference"
    cells = "document.querySelectorAll('#treemap .cell.painted:not(.module)')"
    assert look.run(f"[...{cells}].map((one) => one.ariaLabel.split(',')[0])") == [name]
    rows = "document.querySelectorAll('#differences tbody tr[data-index]')"
    assert look.run(f"{rows}.length") == 1
    look.run(f"{rows}[0].querySelector('button').click()")
    assert look.run("document.getElementById('details-name').textContent") == name
    assert "largest difference" in look.run("document.getElementById('details').textContent")


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (360, False)])
def test_report_page_fits_window_and_color_scheme(
    look: Browser, damaged: Path, big: Path, width: int, dark: bool
) -> None:
    """Nothing is wider than the window, and text can be told from its ground."""
    for page, name in ((damaged, "model.l1.weight"), (big, "n")):
        look.size(width, 800, dark)
        look.open(page)
        assert look.run("document.documentElement.scrollWidth") <= width
        tables = "[...document.querySelectorAll('.scroller')]"
        assert look.run(f"{tables}.every((one) => one.scrollWidth <= one.clientWidth)")
        ground, text = (
            look.run(f"getComputedStyle(document.body).{one}")
            for one in ("backgroundColor", "color")
        )
        assert (brightness(ground) < brightness(text)) == dark
        assert abs(brightness(ground) - brightness(text)) > 400
        look.open(page, f"#tensor={name}")
        assert look.run("document.getElementById('details').scrollWidth") <= width
        assert look.run(f"{tables}.every((one) => one.scrollWidth <= one.clientWidth)")
        assert len(look.picture()) > 10_000


@pytest.mark.parametrize("dark", [False, True])
def test_report_page_text_has_sufficient_contrast(
    look: Browser, damaged: Path, big: Path, dark: bool
) -> None:
    """By the ratio that WCAG 2.2 (1.4.3, AA) asks for."""
    look.size(1200, 900, dark)
    for place, name in ((damaged, "model.l1.weight"), (big, "n")):
        look.open(place)
        assert not look.run(FAINT)
        look.open(place, f"#tensor={name}")
        assert not look.run(FAINT)


def brightness(color: str) -> int:
    return sum(int(part) for part in color[4:-1].split(","))


@pytest.mark.slow
def test_every_control_has_accessible_name(look: Browser, damaged: Path) -> None:
    look.open(damaged, "#tensor=model.l1.weight")
    look.call("Accessibility.enable")
    nodes = look.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "link", "combobox", "searchbox", "checkbox", "dialog", "image", "table"}
    seen = [n for n in nodes if n.get("role", {}).get("value") in roles and not n["ignored"]]
    assert len(seen) > 5
    assert all(node["name"]["value"] for node in seen), seen


CUT_OFF = """[...document.querySelectorAll('.scroller thead th, .scroller td')]
    .filter((cell) => cell.scrollWidth > cell.clientWidth).map((cell) => cell.textContent)"""


@pytest.mark.parametrize("width", [390, 680, 800, 1000])
def test_columns_of_narrow_window_are_readable(
    look: Browser, tmp_path: Path, data: Path, width: int
) -> None:
    sample = data / "tiny-llama3-hf"
    other = shutil.copytree(sample, tmp_path / "other")
    for file in other.glob("*.safetensors"):
        state = {name: value + 1 for name, value in load_file(file).items()}
        save_file(state, file)
    compared, sized = tmp_path / "compared.html", tmp_path / "sized.html"
    ckptctl.report(sample, compared, other=other, movement=True, stats=True)
    ckptctl.report(sample, sized, fit="2x80GB")
    look.size(width, 800)
    for page in (compared, sized):
        look.open(page)
        assert look.run(CUT_OFF) == []
        assert look.run("document.documentElement.scrollWidth") <= width
    boxes = "[...document.querySelectorAll('.sideways')]"
    assert look.run(f"{boxes}.map((box) => box.scrollWidth <= box.clientWidth)") == [True, True]


def test_sections_and_dialog_are_named_and_bars_are_not_focusable(
    look: Browser, tmp_path: Path, data: Path
) -> None:
    """ARIA spells ``labelledby`` with two l. Bars of a plot are no stops of the Tab key."""
    sample = data / "tiny-llama3-hf"
    page = tmp_path / "page.html"
    ckptctl.report(sample, page, other=sample, movement=True)
    look.open(page)
    assert look.run("document.querySelectorAll('[aria-labelledby]').length") > 3
    focus = "(bar) => { bar.focus(); return document.activeElement === bar; }"
    bars = look.run(f"[...document.querySelectorAll('#movement .back')].filter({focus}).length")
    assert bars == 0


@pytest.mark.parametrize("window", [None, 8])
def test_longest_request_is_unlimited_if_all_layers_have_a_window(
    look: Browser, tmp_path: Path, data: Path, window: int | None
) -> None:
    sample = shutil.copytree(data / "tiny-llama3-hf", tmp_path / "sample")
    config = json.loads((sample / "config.json").read_text())
    if window:
        config |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": window}
    (sample / "config.json").write_text(json.dumps(config))
    ckptctl.report(sample, tmp_path / "page.html", fit="1MB")
    look.open(tmp_path / "page.html")
    text = look.run("document.getElementById('fit').textContent")
    assert ("longest requestunlimited" if window else "longest request2,911 tokens") in text


def test_movement_and_memory_have_plot_and_tables(
    look: Browser, tmp_path: Path, data: Path
) -> None:
    sample = data / "tiny-llama3-hf"
    page = tmp_path / "page.html"
    ckptctl.report(sample, page, other=sample, movement=True, fit="2x80GB")
    look.open(page)
    assert look.run("document.querySelectorAll('#movement svg .bar-value').length") == 5
    assert look.run("document.querySelectorAll('#movement tbody tr').length") >= 1
    assert look.run("document.querySelectorAll('#fit table').length") == 2
    assert look.run(FAINT) == []
