"""What is installed, in which version, and how long the program takes to start."""

from __future__ import annotations

import platform
import re
import sys
import time
import zlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import ckptctl
from ckptctl.ops.doctor.check import Check
from ckptctl.storage import crc

GROUP = "installation"
NAME = "ckptctl"
NEEDED = ("torch", "typer", "rich", "safetensors", "huggingface_hub", "fsspec", "isal")
"""What a checkout needs, which has no metadata that would say so."""
SLOW_START = 0.5
HEAVY = ("torch", "numpy")
_NEED = re.compile(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?")


def checks() -> Iterator[Check]:
    """Yield the checks of this group."""
    yield _start(time.process_time())
    yield _itself()
    yield Check(GROUP, "python", f"{platform.python_version()} at {sys.executable}")
    for name, least in _needed():
        yield _package(name, least)
    yield _checksums()


def _start(seconds: float) -> Check:
    found = f"{seconds:.2f} s of CPU"
    early = [name for name in HEAVY if name in sys.modules]
    if early:
        found += f", {' and '.join(early)} imported"
    if seconds <= SLOW_START and not early:
        return Check(GROUP, "start", found)
    return Check(
        GROUP,
        "start",
        found,
        "warn",
        "see what is imported before ckptctl: `python -X importtime -m ckptctl --version`; "
        "*.pth files in site-packages and sitecustomize.py are where to look",
    )


def _itself() -> Check:
    where = Path(ckptctl.__file__).parent
    found = f"{ckptctl.__version__} at {where}"
    installed = _version(NAME)
    if installed in (None, ckptctl.__version__):
        return Check(GROUP, NAME, found)
    hint = "install it again, or run from another directory"
    return Check(GROUP, NAME, f"{found}, but {installed} is installed", "warn", hint)


def _needed() -> list[tuple[str, str]]:
    """Return what ckptctl needs, with the least version that will do, or nothing."""
    try:
        said = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        said = list(NEEDED)
    plain = (_NEED.match(text) for text in said if "extra ==" not in text)
    return [(found[1], found[2] or "") for found in plain if found]


def _package(name: str, least: str) -> Check:
    version = _version(name)
    install = f"`pip install '{name}>={least}'`" if least else f"`pip install {name}`"
    if version is None:
        return Check(GROUP, name, "not installed", "fail", install)
    if least and _numbers(version) < _numbers(least):
        return Check(GROUP, name, f"{version}, older than {least}", "fail", install)
    return Check(GROUP, name, version)


def _checksums() -> Check:
    if crc.crc32 is not zlib.crc32:
        return Check(GROUP, "checksums", "computed by isal")
    hint = "`pip install isal` makes them about ten times faster"
    return Check(GROUP, "checksums", "computed by zlib", "warn", hint)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    release = re.match(r"[0-9.]*", version)
    return [int(part) for part in (release[0] if release else "").split(".") if part]
