"""The page of a report about each state of a checkpoint: in a wide and a narrow window, by day and
by night, and printed. The pictures lie beside the page for whoever wants to look."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests import browser
from tests.browser import FAINT, Browser
from tests.report_states import STATES, page_of

pytestmark = pytest.mark.skipif(browser.found() is None, reason="no Chromium on this machine")
SECTIONS = ["Treemap", "Dtypes", "Files", "Tensors (39)"]
HEADINGS = {
    "complete": ["llama", "Treemap", "Dtypes", "Files", "Tensors (21)"],
    "missing": ["llama", "Findings (7)", "Treemap", "Dtypes", "Files", "Tensors (15 of 21)"],
    "lost_rank": ["step-40", "Findings (22)", *SECTIONS],
    "damaged": ["step-40", "Findings (50)", *SECTIONS],
    "training": ["step-40", *SECTIONS],
    "quantized_moe": ["moe", "Treemap", "Dtypes", "Files", "Tensors (295)"],
    "same": ["Allama", "Bcopy", "Differences", "Treemap", "Dtypes", "Files", "Tensors (21)"],
    "compared": ["Allama", "Btuned", "Differences", "Treemap", "Dtypes", "Files", "Tensors (21)"],
}
BADGES = {
    "missing": ["damaged"],
    "lost_rank": ["damaged"],
    "damaged": ["damaged"],
    "training": ["structure complete"],
    "quantized_moe": ["structure complete"],
    "same": ["complete", "complete"],
    "compared": ["complete", "damaged"],
}
TEXT_NODES = "h1, h2, .badge, .facts dd, p, .findings div, .places li, thead th, .plain td, nav a"
CUT = f"""[...document.querySelectorAll('{TEXT_NODES}')].filter((node) => node.checkVisibility()
  && node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).display !== 'inline')
  .map((node) => node.textContent)"""
TEXTS = "(selector) => [...document.querySelectorAll(selector)].map((one) => one.textContent)"


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture(scope="module")
def pages(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what makes the page about a state, once."""
    return cache(lambda state: page_of(state, data, tmp_path_factory.mktemp(state)))


@pytest.mark.parametrize("state", STATES)
def test_report_page_shows_checkpoint_state_without_clipping(
    opened: Browser, pages: Callable[[str], Path], state: str
) -> None:
    opened.complaints.clear()
    page = pages(state)
    for width, dark in product((1400, 420), (False, True)):
        opened.size(width, 1000, dark)
        opened.open(page)
        shown = opened.run(f"({TEXTS})('h1, h2')")
        assert [text.replace(f"{page.parent}/", "") for text in shown] == HEADINGS[state]
        assert opened.run(f"({TEXTS})('.badge')") == BADGES.get(state, ["complete"])
        assert opened.run("document.documentElement.scrollWidth") <= width
        assert not opened.run(CUT)
        assert not opened.run(FAINT)
        assert "`" not in opened.run("document.body.innerText")
        assert opened.run("document.getAnimations().length") == 0, "nothing moves"
        picture = opened.picture()
        assert len(picture) > 10_000
        (page.parent / f"{state}-{width}-{'dark' if dark else 'light'}.png").write_bytes(picture)
    assert not opened.complaints


def test_missing_tensors_are_shown_to_scale(opened: Browser, pages: Callable[[str], Path]) -> None:
    opened.size(1400, 1000)
    opened.open(pages("missing"))
    hole = "document.querySelector('.treemap > .cell.missing')"
    assert opened.run(f"{hole}.innerText") == "6 tensors missing\n72.4 KiB"
    area = "((one) => one.offsetWidth * one.offsetHeight)"
    part = opened.run(f"{area}({hole}) / {area}({hole}.parentElement)")
    assert part == pytest.approx(1 - 180480 / 254592, rel=0.05)
    facts = opened.run("document.getElementById('summary').innerText")
    assert "15 of 21" in facts and "176.3 KiB of 248.6 KiB present (70.9 %)" in facts
    missing = opened.run(f"({TEXTS})('#tensors tr.missing th')")
    assert len(missing) == 6 and "lm_head.weight" in missing
    assert "model-00003-of-00003.safetensors" in opened.run(f"({TEXTS})('#files .missing th')")


def test_missing_part_of_tensor_is_shown_to_scale(
    opened: Browser, pages: Callable[[str], Path]
) -> None:
    opened.size(1400, 1000)
    opened.open(pages("damaged"))
    cell = "[...document.querySelectorAll('.cell')].find((one) => one.ariaLabel.startsWith('{}'))"
    weight = cell.format("model.l1.weight")
    gone = opened.run(f"{weight}.querySelector('.gone').offsetWidth / {weight}.clientWidth")
    assert gone == pytest.approx(8 / 17, rel=0.05), "8 of 17 rows"
    assert "416 B missing" in opened.run(f"{weight}.ariaLabel")
    colors = [
        opened.run(f"getComputedStyle({cell.format(name)}).borderTopColor")
        for name in ("model.l1.weight", "model.inv_freq")
    ]
    assert colors == ["rgb(179, 32, 31)", "rgb(219, 164, 0)"], "damaged, missing"


def test_optimizer_tensors_are_collapsed_into_one(
    opened: Browser, pages: Callable[[str], Path]
) -> None:
    opened.size(1400, 1000)
    opened.open(pages("training"))
    cells = opened.run("[...document.querySelectorAll('.treemap .cell')].map((c) => c.ariaLabel)")
    assert not any("optim." in label for label in cells)
    assert opened.run(f"({TEXTS})('.cell.fold')") == ["optimizer7.2 KiB, 27 tensors"]
    names = f"({TEXTS})('#tensors tbody th')"
    shown = opened.run(names)
    assert shown[0].startswith("model.") and shown[-2:] == ["optimizer: 27 tensors", "rng"]
    opened.run("document.querySelector('#tensors [aria-expanded]').click()")
    assert len(opened.run(names)) == len(shown) + 27
    assert opened.run("document.activeElement.ariaExpanded") == "true"
    opened.press("Enter")
    assert opened.run(names) == shown
    opened.run("document.getElementById('search').value = 'exp_avg_sq'")
    opened.run("document.getElementById('search').dispatchEvent(new Event('input'))")
    assert len(opened.run(names)) == 9, "a search looks into it"


def test_long_tensor_names_are_truncated_at_start(
    opened: Browser, pages: Callable[[str], Path]
) -> None:
    """Those of experts are the same in the beginning, and are cut there."""
    opened.size(420, 1000)
    opened.open(pages("quantized_moe"))
    name = "model.layers.0.mlp.experts.0.down_proj.weight_scale_inv"
    buttons = "[...document.querySelectorAll('#tensors .link')]"
    button = f"{buttons}.find((one) => one.textContent === '{name}')"
    assert opened.run(f"{button}.scrollWidth > {button}.clientWidth")
    edges = [
        opened.run(f"{one}.getBoundingClientRect().right")
        for one in (button, f"{button}.querySelector('bdi')")
    ]
    assert edges[0] == pytest.approx(edges[1], abs=1), "the last letter is in sight"


@pytest.mark.slow
def test_printed_report_is_light_and_complete(
    opened: Browser, pages: Callable[[str], Path]
) -> None:
    """Light, with all findings and tables, and without a script's help."""
    page = pages("damaged")
    opened.size(794, 1123, dark=True)
    opened.open(page)
    opened.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert opened.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        places = opened.run(f"({TEXTS})('#findings .places li:not(.more)')")
        assert len(places) == 50
        visible = "[...document.querySelectorAll('.places li')].filter((o) => o.checkVisibility())"
        assert opened.run(f"{visible}.length") == 50
        high = "(one) => one.scrollHeight <= one.clientHeight + 1"
        assert opened.run(f"[...document.querySelectorAll('.scroller')].every({high})")
        assert opened.run("document.documentElement.scrollWidth") <= 794
        assert not opened.run(FAINT)
        paper = b64decode(opened.call("Page.printToPDF", preferCSSPageSize=True)["data"])
        (page.parent / "printed.pdf").write_bytes(paper)
    finally:
        opened.call("Emulation.setEmulatedMedia", media="")
