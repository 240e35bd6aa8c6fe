"""The pictures of the README are what the program shows."""

from __future__ import annotations

import re
import runpy
import struct
from importlib.metadata import version
from xml.etree import ElementTree

import pytest

from tests import browser
from tests.conftest import DATA

REPOSITORY = DATA.parent.parent
SCRIPT = runpy.run_path(str(REPOSITORY / "docs" / "make_pictures.py"))
PNG = b"\x89PNG\r\n\x1a\n"


def drawn_by() -> str:
    """Return the version of rich that the picture is drawn with."""
    text = (REPOSITORY / "tests" / "constraints.txt").read_text()
    (pinned,) = re.findall(r"^rich==(.+)$", text, re.MULTILINE)
    return str(pinned)


@pytest.mark.skipif(version("rich") != drawn_by(), reason="another rich draws otherwise")
def test_terminal_picture_matches_command_output() -> None:
    assert SCRIPT["TERMINAL"].read_text() == SCRIPT["terminal"](), (
        "run `python docs/make_pictures.py`"
    )


def test_pictures_are_small_and_self_contained() -> None:
    picture = SCRIPT["TERMINAL"].read_text()
    assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert len(picture) < 60_000
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\((?!#)|<script", picture)
    page = SCRIPT["PAGE"].read_bytes()
    assert size_of(page) == (SCRIPT["WIDTH"], SCRIPT["HEIGHT"]) and len(page) < 200_000


@pytest.mark.skipif(browser.found() is None, reason="no Chromium on this machine")
def test_report_page_renders_at_expected_size() -> None:
    """Not compared: fonts are those of the machine."""
    page = SCRIPT["page"]()
    assert size_of(page) == (SCRIPT["WIDTH"], SCRIPT["HEIGHT"])
    assert 50_000 < len(page) < 200_000


def size_of(picture: bytes) -> tuple[int, int]:
    """Return the width and height of a PNG."""
    assert picture.startswith(PNG)
    width, height = struct.unpack(">II", picture[16:24])
    return width, height
