"""Loads a model family from a Python file that the user names himself.

The file is code and is run. Nothing but a file named on the command line, or passed by the calling
program, ever gets here: no name from a checkpoint does, and no folder is searched.
"""

from __future__ import annotations

import sys
import traceback
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ckptctl.errors import SourceNotFoundError, UsageError

if TYPE_CHECKING:
    from ckptctl.planner.layouts import Family

MODULE = "ckptctl_converter_file"


def load(file: Path) -> Family:
    """Return the family that *file* defines as ``FAMILY``.

    Raises:
        SourceNotFoundError: There is no such file.
        UsageError: It cannot be run, defines no family, or its tables are malformed.
    """
    from ckptctl.planner.layouts import Family

    if not file.is_file():
        raise SourceNotFoundError(
            "there is no such converter file", where=str(file), hint="--converter FILE.py"
        )
    found = getattr(_run(file), "FAMILY", None)
    if not isinstance(found, Family):
        why = "`FAMILY` is missing" if found is None else f"`FAMILY` is {type(found).__name__}"
        raise UsageError(
            "the converter file defines no model family",
            where=str(file),
            why=why,
            hint="FAMILY = Family(...), from ckptctl.planner.layouts",
        )
    _check(found, file)
    return found


def _run(file: Path) -> ModuleType:
    """Return *file* as a module. No byte code is written beside it."""
    module = ModuleType(MODULE)
    module.__file__ = str(file)
    before = sys.modules.get(MODULE)
    sys.modules[MODULE] = module
    try:
        exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), module.__dict__)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: the program does not end here
        raise UsageError(
            "the converter file cannot be run",
            where=f"{file}, line {_line_of(error, file)}",
            why=f"{type(error).__name__}: {_message(error)}",
        ) from error
    finally:
        if before is None:
            del sys.modules[MODULE]
        else:
            sys.modules[MODULE] = before
    return module


def _message(error: BaseException) -> str:
    return error.msg if isinstance(error, SyntaxError) else str(error)


def _line_of(error: BaseException, file: Path) -> int:
    """Return the line of *file* that *error* comes from."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    return (lines[-1] if lines else None) or 1


def _check(found: Family, file: Path) -> None:
    from ckptctl.planner.families.tables import TableError
    from ckptctl.planner.families.validation import flaws, misfits

    where = str(file)
    try:
        flaw = next(chain(misfits(found), flaws(found)), None)
    except TableError as error:
        flaw, where = str(error), f"{file}, line {_line_with(error.line, file)}"
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        flaw = f"{type(error).__name__}: {error}"
    if flaw:
        raise UsageError("the tables of the converter file are malformed", where=where, why=flaw)


def _line_with(text: str, file: Path) -> int:
    """Return the line of *file* on which a row of a table stands."""
    lines = [line.strip() for line in file.read_text("utf-8", "replace").splitlines()]
    return lines.index(text) + 1 if text in lines else 1
