"""The command line that was typed, for hints that say what to type next."""

from __future__ import annotations

import re
import shlex

import typer

_FLAGS = re.compile(r"-[nqy]+")
"""Short options without a value, which may be joined."""


def retyped(context: typer.Context, *more: str) -> str:
    """Return the command line as it was typed, without asking for a plan alone, and *more*."""
    from ckptctl.cli.app import RAW_ARGUMENTS

    typed: list[str] = context.meta.get(RAW_ARGUMENTS, [])
    kept = (_without_dry_run(word) for word in typed)
    return shlex.join(["ckptctl", *filter(None, kept), *more])


def _without_dry_run(word: str) -> str:
    if word == "--dry-run":
        return ""
    return word.replace("n", "").removesuffix("-") if _FLAGS.fullmatch(word) else word
