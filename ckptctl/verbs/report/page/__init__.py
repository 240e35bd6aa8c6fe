"""Page of a report, a self-contained HTML file that is safe for any names in a checkpoint.

Names come from untrusted files. The page contains names only as JSON without ``<``, which its
script shows as text. The page's policy (CSP) allows only the one script and the one style
sheet whose digests it contains.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from ckptctl import formats
from ckptctl.conversion.destinations import require_destination
from ckptctl.storage.destinations import Replaceable, require_space
from ckptctl.storage.file_system import write_file
from ckptctl.storage.publish import stage_output
from ckptctl.tree import TreePath
from ckptctl.version import __version__

if TYPE_CHECKING:
    from ckptctl.verbs.report.data import Report

SCHEMA = "ckptctl.report/1"
MAX_SAFE_INTEGER = 2**53 - 1
"""Largest integer n for which JavaScript represents all integers up to n exactly."""
BIG_INTEGER = re.compile(r"\d{16}")
HEAD_BYTES = 1024
"""Number of bytes at the start of a page that are searched for the generator tag."""
GENERATOR = '<meta name="generator" content="ckptctl report">'
SCRIPTS = (
    "dom.js",
    "numbers.js",
    "colors.js",
    "coloring.js",
    "list.js",
    "tree.js",
    "treemap.js",
    "projection.js",
    "chunks.js",
    "values.js",
    "details.js",
    "findings.js",
    "sections.js",
    "tensors.js",
    "difference.js",
    "movement.js",
    "fit.js",
    "main.js",
)


def build_page(document: Mapping[str, object]) -> str:
    """Build the HTML page that shows the report *document*."""
    style = f"\n{_read_resource('page.css')}"
    script = "\n".join(['\n"use strict";', *map(_read_resource, SCRIPTS)])
    data = {"schema": SCHEMA, "ckptctl": __version__, **document}
    policy = (
        f"default-src 'none'; style-src '{_compute_digest(style)}'; "
        f"script-src '{_compute_digest(script)}'; base-uri 'none'; form-action 'none'"
    )
    return Template(_read_resource("page.html")).substitute(
        generator=GENERATOR,
        policy=policy,
        title=html.escape(str(document.get("path", "")).encode("ascii", "replace").decode()),
        style=style,
        script=script,
        data=embed_json(data),
    )


def embed_json(document: Mapping[str, object]) -> str:
    """Encode *document* as JSON that is safe inside an HTML page.

    Integers beyond :data:`MAX_SAFE_INTEGER` become text, so that the script receives all digits.
    """
    text = _encode_json(document)
    if BIG_INTEGER.search(text):
        text = _encode_json(_convert_big_integers(document))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _encode_json(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _convert_big_integers(value: object) -> object:
    if isinstance(value, dict):
        return {name: _convert_big_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_convert_big_integers(item) for item in value]
    return str(value) if isinstance(value, int) and abs(value) > MAX_SAFE_INTEGER else value


def _compute_digest(text: str) -> str:
    """Return the digest by which a content security policy allows an inline script or style.

    Source: CSP level 3, section 2.3.1.
    """
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _read_resource(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


@contextmanager
def publish_page(
    output: Path | None, sources: Sequence[str | TreePath], overwrite: bool
) -> Iterator[Callable[[Report], None]]:
    """Reserve the path of a page outside of *sources*, and yield a function that writes a page."""
    if output is None:
        yield lambda _: None
        return
    target = output
    for source in sources:
        origin = formats.to_existing_path(source)
        target = Path(
            require_destination(origin, output, overwrite, REPLACEABLE_PAGE, OUTSIDE_HINT).path
        )
    with stage_output(
        target, overwrite=overwrite, single_file=True, is_checkpoint=REPLACEABLE_PAGE
    ) as stage:

        def write_page(report: Report) -> None:
            content = build_page(report.to_json()).encode()
            require_space(stage.data, len(content))
            write_file(stage.data / target.name, content)
            stage.publish()

        yield write_page


def is_report(path: TreePath) -> bool:
    """Return whether *path* is a page written by ``ckptctl report``, which may be overwritten."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(HEAD_BYTES)


OUTSIDE_HINT = "`-o FILE` writes the page outside of the checkpoint"
REPLACEABLE_PAGE = Replaceable(is_report, "a page of `ckptctl report`", is_file=True)
