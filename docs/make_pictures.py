"""Make the pictures of the README: ``python docs/make_pictures.py``.

``terminal.svg`` is what commands print on a terminal, run here on samples of the tests;
``report.png`` is a page of ``ckptctl report`` in Chromium, if there is one.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from io import StringIO
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.resolve()
PICTURES = REPOSITORY / "docs" / "pictures"
TERMINAL, PAGE = PICTURES / "terminal.svg", PICTURES / "report.png"
SAMPLE = REPOSITORY / "tests" / "data" / "tiny-llama3-hf"
COMMANDS = (
    "ckptctl verify download",
    "ckptctl inspect llama",
    "ckptctl convert llama out --to dcp",
)
COLUMNS, LINES = 100, 40
WIDTH, HEIGHT = 1200, 1260
SECONDS = re.compile(r"\bin [0-9.]+ m?s(, [0-9.]+ \w+/s)?\b")
GROUND, WORDS = (22, 24, 29), (222, 225, 230)
COLORS = [
    *((60, 64, 72), (255, 123, 114), (111, 207, 143), (240, 192, 96)),
    *((121, 174, 255), (212, 160, 255), (102, 217, 232), WORDS),
]
SVG = """<svg class="{unique_id}" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font: {char_height}px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  line-height: {line_height}px;
}}
.{unique_id}-title {{ font: 18px system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def terminal() -> str:
    """Return the commands and what they print, as SVG; the same whenever nothing has changed."""
    from rich.console import Console
    from rich.terminal_theme import TerminalTheme
    from rich.text import Text

    theme = TerminalTheme(GROUND, WORDS, COLORS)
    console = Console(
        file=StringIO(), record=True, width=COLUMNS, force_terminal=True, color_system="truecolor"
    )
    with samples():
        for line in COMMANDS:
            console.print(Text(f"$ {line}", "bold cyan"))
            console.print(Text.from_ansi(SECONDS.sub("in 0.01 s", printed(line))), end="\n\n")
    picture = console.export_svg(
        title="ckptctl", theme=theme, code_format=SVG, unique_id="terminal"
    )
    return "".join(f"{line.rstrip()}\n" for line in picture.splitlines() if line.strip())


@contextmanager
def samples() -> Iterator[None]:
    """Work in a new folder that holds a model, and one whose last file has not come."""
    with tempfile.TemporaryDirectory() as name, chdir(name):
        for folder in ("llama", "download"):
            shutil.copytree(SAMPLE, folder, copy_function=shutil.copyfile)
        Path("download/model-00003-of-00003.safetensors").unlink()
        yield


def printed(line: str) -> str:
    """Return what a command prints on a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    words = [sys.executable, "-m", *shlex.split(line)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CKPTCTL_")}
    for name in ("NO_COLOR", "COLUMNS"):
        kept.pop(name, None)
    kept |= {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    kept["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [kept.get("PYTHONPATH")])])
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=kept)
    os.close(theirs)
    text = b""
    with suppress(OSError):  # what reading ends with when the command has
        while part := os.read(ours, 1 << 16):
            text += part
    os.close(ours)
    process.wait()
    return text.decode().replace("\r\n", "\n").rstrip("\n")


def page() -> bytes | None:
    """Return a picture of the page about a checkpoint that is not whole; None: no browser."""
    sys.path.insert(0, str(REPOSITORY))
    import ckptctl
    from tests import browser

    if browser.found() is None:
        return None
    with samples(), browser.Browser() as opened:
        ckptctl.report("download", "page.html")
        opened.size(WIDTH, HEIGHT)
        opened.open(Path("page.html").resolve())
        return opened.picture()


def main() -> None:
    """Write both."""
    PICTURES.mkdir(exist_ok=True)
    TERMINAL.write_text(terminal())
    picture = page()
    if picture is None:
        sys.exit(f"no Chromium: {PAGE.name} stays as it is")
    PAGE.write_bytes(picture)


if __name__ == "__main__":
    main()
