"""Build the site: ``python docs/build_site.py [FOLDER]``, with Zensical installed (``.[docs]``).

The README becomes the first page. ``docs/index.md`` becomes the list of pages, and its sections
become the navigation. Links are those of the repository; a link to a file that is not a page
becomes text. Renamed pages redirect to their new address (``REDIRECTS``). The build fails on a
link to a missing page or heading, and on a page that is missing from the site's search.
``python -m http.server -d docs/_site`` shows the site: its search needs a server.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

DOCS = Path(__file__).parent.resolve()
REPOSITORY = DOCS.parent
SITE = DOCS / "_site"
PICTURES = DOCS / "pictures"
SKILL = DOCS / "SKILL.md"  # for agents, who copy the file
HOME, CONTENTS = REPOSITORY / "README.md", DOCS / "index.md"
CHANGELOG = REPOSITORY / "CHANGELOG.md"
REDIRECTS = {
    "explanation/beside-other-tools.md": "explanation/comparison-with-other-tools.md",
    "how-to/dequantise.md": "how-to/dequantize.md",
    "how-to/quantise.md": "how-to/quantize.md",
    "how-to/use-torchs-save-and-load.md": "how-to/use-dcp-save-and-load.md",
    "reference/changes.md": "changelog.md",
}
"""Renamed pages: the path in the site until then, and the path now."""
REDIRECT = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Moved: ckptctl</title>
<link rel="canonical" href="{address}">
<meta name="robots" content="noindex">
<meta http-equiv="refresh" content="0; url={address}">
<p>This page moved to <a href="{address}">{address}</a>.</p>
<script>location.replace("{address}" + location.hash)</script>
</html>
"""
"""A page that leads to a relative address."""
HIDDEN = re.compile(r"^<!-- .*?-->\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[((?:[^][]|\[[^][]*\])*)\]\(([^()\s#]*)(#[^()\s]*)?\)")
TABLE_ROW = re.compile(r"^\|.*$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
LONG = 40
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(
    r"^(?P<level>#{2,}) (?P<title>.+)$|^\* \[.*?\]\((?P<page>.+?\.md)\)", re.MULTILINE
)


def pages() -> dict[Path, str]:
    """Return every page, and its path in the site."""
    files = [path for path in sorted(DOCS.rglob("*.md")) if path != SKILL]
    found = {path: path.relative_to(DOCS).as_posix() for path in files}
    return found | {HOME: "index.md", CONTENTS: "contents.md", CHANGELOG: "changelog.md"}


def site_text(path: Path) -> str:
    """Return a page as the site has it: comments are gone, links lead to the site's pages."""
    text = HIDDEN.sub("", path.read_text()).replace("<details>", '<details markdown="1">')
    parts = FENCED.split(text)
    for number in range(0, len(parts), 2):
        linked = LINK.sub(lambda link: _linked(link, path), parts[number])
        parts[number] = TABLE_ROW.sub(_unbroken, linked)
    return "".join(parts)


def _linked(link: re.Match[str], page: Path) -> str:
    text, target, heading = link[1], link[2], link[3] or ""
    if not target or "://" in target:
        return link[0]
    known = pages()
    leads_to = (page.parent / target).resolve()
    if leads_to in known:
        start = Path(known[page]).parent
        return f"[{text}]({os.path.relpath(known[leads_to], start)}{heading})"
    if leads_to.parent == PICTURES:
        start = Path(known[page]).parent
        return f"[{text}]({os.path.relpath(f'pictures/{leads_to.name}', start)})"
    return text if leads_to.exists() else link[0]


def _unbroken(row: re.Match[str]) -> str:
    """Return a row of a table: bars in code are not escaped, short code stays on one line."""
    return CODE.sub(lambda code: _whole(code[1].replace("\\|", "|")), row[0])


def _whole(code: str) -> str:
    return f"`{code}`" if " " in code or len(code) > LONG else f"`{code}`{{.whole}}"


def navigation() -> list[object]:
    """Return the navigation, as Zensical has it; below the first two, titles are those of pages."""
    top: list[object] = [{"Home": "index.md"}, {"All pages": "contents.md"}]
    sections: list[list[object]] = [top]
    known = pages()
    for title, level, page in _entries():
        if title:
            below: list[object] = []
            del sections[level - 1 :]
            sections[-1].append({title: below})
            sections.append(below)
        else:
            sections[-1].append(known[(CONTENTS.parent / page).resolve()])
    return top


def _entries() -> Iterator[tuple[str, int, str]]:
    """Yield headings with their level, and pages, of the contents."""
    for entry in ENTRY.finditer(CONTENTS.read_text()):
        yield entry["title"] or "", len(entry["level"] or ""), entry["page"] or ""


def stage(folder: Path) -> Path:
    """Write what Zensical reads into *folder* and return the path of its configuration."""
    for path, name in pages().items():
        target = folder / "pages" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(site_text(path))
    shutil.copy(DOCS / "site.css", folder / "pages")
    if PICTURES.exists():
        shutil.copytree(PICTURES, folder / "pages" / PICTURES.name)
    settings = (DOCS / "zensical.toml").read_text()
    head, first, rest = settings.partition("[project]\n")
    configuration = folder / "zensical.toml"
    configuration.write_text(f"{head}{first}nav = {_toml(navigation())}\n{rest}")
    return configuration


def _toml(value: object) -> str:
    """Return strings, lists and tables of one entry as TOML has them, in one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(k)} = {_toml(v)}' for k, v in value.items())} }}"
    return json.dumps(value)


def address(name: str) -> str:
    """Return the address of the page at path *name* of the site, relative to the site's root."""
    return re.sub(r"(^|/)index\.md$|\.md$", "/", name).lstrip("/")


def write_redirects(site: Path) -> None:
    """Write a small page into *site* for each renamed page, which leads to its new address."""
    for old, new in REDIRECTS.items():
        target = site / address(old) / "index.html"
        if target.exists():
            raise FileExistsError(f"{old} is a page: remove it from REDIRECTS")
        target.parent.mkdir(parents=True, exist_ok=True)
        relative = os.path.relpath(address(new), address(old)) + "/"
        target.write_text(REDIRECT.format(address=relative))


def not_searched(site: Path) -> list[str]:
    """Return the addresses of the pages that the search of *site* does not know."""
    items = json.loads((site / "search.json").read_text())["items"]
    known = {item["location"].partition("#")[0] for item in items}
    return sorted({address(name) for name in pages().values()} - known)


def main(target: Path) -> int:
    """Build the site into *target* and return the exit code; what else is there stays."""
    if not find_spec("zensical"):
        sys.exit("the site needs zensical: pip install '.[docs]'")
    if target == SITE:
        shutil.rmtree(SITE, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        configuration = stage(Path(folder))
        command = ["-m", "zensical", "build", "--strict", "--config-file", str(configuration)]
        done = subprocess.run([sys.executable, *command], env={**os.environ, "NO_COLOR": "1"})
        if done.returncode == 0:
            if missed := not_searched(configuration.parent / "site"):
                sys.exit(f"missing from search: {', '.join(missed)}")
            write_redirects(configuration.parent / "site")
            shutil.copytree(configuration.parent / "site", target, dirs_exist_ok=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else SITE))
