"""Renamed pages of the site lead to their new addresses."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

SITE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "build_site.py"))


def test_redirects_lead_from_old_addresses_to_pages(tmp_path: Path) -> None:
    SITE["write_redirects"](tmp_path)
    for old, new in SITE["REDIRECTS"].items():
        page = tmp_path / old.removesuffix(".md") / "index.html"
        target = re.search(r'http-equiv="refresh" content="0; url=([^"]+)"', page.read_text())
        assert target and (page.parent / target[1]).resolve() == tmp_path / new.removesuffix(".md")
        assert new in SITE["pages"]().values()


def test_redirect_never_replaces_a_page(tmp_path: Path) -> None:
    page = tmp_path / next(iter(SITE["REDIRECTS"])).removesuffix(".md") / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text("a page")
    with pytest.raises(FileExistsError, match="REDIRECTS"):
        SITE["write_redirects"](tmp_path)
    assert page.read_text() == "a page"
