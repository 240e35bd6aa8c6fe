"""Shell completion, which never prints errors and ends after two seconds.

The scripts that ``--show-completion`` prints call the program with ``_CKPTCTL_COMPLETE`` set. The
program then prints one completion per line.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

VARIABLE = "_CKPTCTL_COMPLETE"
SECONDS = 2.0
BREAKS = frozenset(":=")
"""Characters at which bash splits words inside arguments (``COMP_WORDBREAKS``, man 1 bash)."""


class _TooLateError(BaseException):
    """The time limit expired. A BaseException, so that no error handler catches it."""


def wanted() -> bool:
    """Return whether the shell requests completions."""
    return os.environ.get(VARIABLE, "").startswith("complete_")


def offer(complete: Callable[[], Any]) -> None:
    """Run *complete*, print its output unless it fails, and exit.

    Args:
        complete: Typer's completion, which ends with ``SystemExit``.
    """
    shown, prefix = io.StringIO(), ""
    if os.environ[VARIABLE] == "complete_bash":
        prefix = _join_words()
    code: object = 0
    try:
        with (
            _deadline(),
            contextlib.redirect_stdout(shown),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            complete()
    except SystemExit as ended:
        code = ended.code
    except (Exception, _TooLateError):
        shown, code = io.StringIO(), 1
    lines = [line for line in shown.getvalue().splitlines(keepends=True) if line.strip()]
    sys.stdout.write("".join(line.removeprefix(prefix) for line in lines))
    sys.exit(code if isinstance(code, int) else 0)


def _join_words() -> str:
    """Rejoin words that bash split, and return the prefix of the last one that bash keeps."""
    words = os.environ.get("COMP_WORDS", "").split("\n")
    current = int(os.environ.get("COMP_CWORD", "0"))
    if current >= len(words):
        return ""
    joined: list[str] = []
    glued = False
    for word in words[: current + 1]:
        glued = len(joined) > 1 and (_breaks(word) or _breaks(joined[-1][-1:]))
        if glued:
            joined[-1] += word
        else:
            joined.append(word)
    os.environ["COMP_WORDS"] = "\n".join(joined)
    os.environ["COMP_CWORD"] = str(len(joined) - 1)
    last = joined[-1]
    return last[: 1 + max(last.rfind(one) for one in BREAKS)] if glued else ""


def _breaks(text: str) -> bool:
    return bool(text) and set(text) <= BREAKS


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    def late(*_: object) -> None:
        raise _TooLateError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
