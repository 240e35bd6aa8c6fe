"""What the program finds around it: terminal, limits, the Hub's cache."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from ckptctl.ops.doctor.check import Check

GROUP = "surroundings"
MANY_FILES = 1024
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def checks() -> Iterator[Check]:
    """Yield the checks of this group."""
    yield _encoding()
    yield _terminal()
    yield _open_files()
    yield _ranks()
    yield _cache()
    yield _token()


def _encoding() -> Check:
    found = (sys.stdout.encoding or "ascii").lower()
    if found.replace("-", "").replace("_", "") == "utf8":
        return Check(GROUP, "encoding", found)
    hint = "what it cannot show is escaped; `export PYTHONUTF8=1`, or set LANG to a UTF-8 locale"
    return Check(GROUP, "encoding", found, "warn", hint)


def _terminal() -> Check:
    if not sys.stdout.isatty():
        return Check(GROUP, "terminal", "none: answers are plain text, tab-separated")
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    width = shutil.get_terminal_size().columns
    return Check(GROUP, "terminal", f"{width} columns, {'no ' if plain else ''}colour")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MANY_FILES:
        return Check(GROUP, "open files", "no limit" if soft < 0 else f"up to {soft:,}")
    most = "unlimited" if hard == resource.RLIM_INFINITY else hard
    hint = f"checkpoints of many ranks have more files: `ulimit -n {most}`"
    return Check(GROUP, "open files", f"up to {soft:,}", "warn", hint)


def _ranks() -> Check:
    world = os.environ.get("WORLD_SIZE", "1")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if world in ("", "0", "1") or not missing:
        return Check(GROUP, "ranks", f"{world or 1}")
    hint = "unset WORLD_SIZE, or start ckptctl with torchrun"
    found = f"WORLD_SIZE is {world}, {' and '.join(missing)} not set"
    return Check(GROUP, "ranks", found, "warn", hint)


def _home() -> Path:
    """Return the folder of Hugging Face's libraries, as ``huggingface_hub.constants`` finds it.

    Importing that costs more than all the rest of the start.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.path.expandvars(home)).expanduser()


def _cache() -> Check:
    said = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    place = Path(os.path.expandvars(said)).expanduser() if said else _home() / "hub"
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    found = f"{place}{', offline' if offline else ''}"
    there = next(one for one in (place, *place.parents) if one.exists())
    if place.exists() or os.access(there, os.W_OK):
        return Check(GROUP, "Hub cache", found + ("" if place.exists() else ", not there yet"))
    hint = f"nothing can be written to {there}: set HF_HOME to another folder"
    return Check(GROUP, "Hub cache", found, "warn", hint)


def _token() -> Check:
    """Say where the token comes from; what it is is never read."""
    variable = next((name for name in TOKENS if os.environ.get(name)), None)
    if variable:
        return Check(GROUP, "Hub token", f"from {variable}")
    said = os.environ.get("HF_TOKEN_PATH")
    path = Path(os.path.expandvars(said)).expanduser() if said else _home() / "token"
    try:
        mode = path.stat().st_mode
    except OSError:
        return Check(GROUP, "Hub token", "none: private and gated repositories are out of reach")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        hint = f"others can read it: `chmod 600 {path}`"
        return Check(GROUP, "Hub token", f"in {path}", "warn", hint)
    return Check(GROUP, "Hub token", f"in {path}")
