"""Shell completion, which prints no errors and stops after two seconds.

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

COMPLETE_VARIABLE = "_CKPTCTL_COMPLETE"
TIME_LIMIT_SECONDS = 2.0
WORD_BREAKS = frozenset(":=")
"""Characters at which bash splits words inside arguments (``COMP_WORDBREAKS``, man 1 bash)."""


class _TooLateError(BaseException):
    """Completion exceeded its time limit. A BaseException, so that no error handler catches it."""


def is_completion_request() -> bool:
    """Return whether the shell requests completions."""
    return os.environ.get(COMPLETE_VARIABLE, "").startswith("complete_")


def print_completions(complete: Callable[[], Any]) -> None:
    """Run *complete*, print its output if it succeeds, and exit.

    Args:
        complete: Typer's completion, which ends with ``SystemExit``.
    """
    captured, prefix = io.StringIO(), ""
    if os.environ[COMPLETE_VARIABLE] == "complete_bash":
        prefix = _rejoin_split_words()
    code: object = 0
    try:
        with (
            _limit_time(),
            contextlib.redirect_stdout(captured),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            complete()
    except SystemExit as stop:
        code = stop.code
    except (Exception, _TooLateError):
        captured, code = io.StringIO(), 1
    lines = [line for line in captured.getvalue().splitlines(keepends=True) if line.strip()]
    sys.stdout.write("".join(line.removeprefix(prefix) for line in lines))
    sys.exit(code if isinstance(code, int) else 0)


def _rejoin_split_words() -> str:
    """Rejoin words in ``COMP_WORDS`` that bash split at ``:`` or ``=``.

    Returns:
        The beginning of the current word, which bash does not replace.
    """
    words = os.environ.get("COMP_WORDS", "").split("\n")
    current = int(os.environ.get("COMP_CWORD", "0"))
    if current >= len(words):
        return ""
    joined: list[str] = []
    is_joined = False
    for word in words[: current + 1]:
        is_joined = len(joined) > 1 and (_is_word_break(word) or _is_word_break(joined[-1][-1:]))
        if is_joined:
            joined[-1] += word
        else:
            joined.append(word)
    os.environ["COMP_WORDS"] = "\n".join(joined)
    os.environ["COMP_CWORD"] = str(len(joined) - 1)
    last = joined[-1]
    return last[: 1 + max(last.rfind(character) for character in WORD_BREAKS)] if is_joined else ""


def _is_word_break(text: str) -> bool:
    return bool(text) and set(text) <= WORD_BREAKS


@contextlib.contextmanager
def _limit_time() -> Iterator[None]:
    def raise_too_late(*_: object) -> None:
        raise _TooLateError

    before = signal.signal(signal.SIGALRM, raise_too_late)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
