"""No regular expression of the package takes more than linear time, whatever it is given.

A few of them see text from a checkpoint or from a folder beside it, and which ones changes: all of
them are run on input made from themselves.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import pytest

from tests import limits, patterns
from tests.sweeps import one_in

LENGTH = 25_000
FOUND = {found.place: found for found in patterns.patterns()}


def run_pattern(found: patterns.Found, seconds: int = limits.SECONDS) -> limits.Ended:
    """Run a pattern on what may take it long; it is killed where it does."""

    def work() -> str:
        pattern: Any = re.compile(found.pattern, found.flags)
        for text in patterns.adversarial(pattern, LENGTH):
            pattern.match(text)
            pattern.fullmatch(text)
            if found.searches:
                deque(pattern.finditer(text), maxlen=0)
        return "linear"

    return limits.run_limited(work, seconds=seconds)


@pytest.mark.parametrize("place", one_in(13, reversed(FOUND)))
def test_regexes_take_linear_time(place: str) -> None:
    ended = run_pattern(FOUND[place])
    assert not ended.problem, f"{FOUND[place]}: {ended.problem}"


def test_every_regex_of_package_is_found() -> None:
    texts = {found.pattern for found in FOUND.values()}
    assert len(texts) > 120
    assert r"[a-z]{2,16}" in texts
    assert any(isinstance(text, bytes) for text in texts)
    assert any("word0" in text for text in texts if isinstance(text, str))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "searches"),
    [
        (r"^\s*import", True),
        (r"(?:^|:)\s*(\d{1,18})\s*(?:$|[,}])", True),
        (r"[\w.]*\d[\w.]*", False),
        (r"(.+), (at byte|`.*`)", False),
        (r"(a|a)*b", False),
        (r"(\w+\s?)*$", False),
        (rb"x.*y", True),
    ],
)
def test_superlinear_regex_exceeds_time_limit(pattern: str | bytes, searches: bool) -> None:
    found = patterns.Found("here", pattern, int(re.MULTILINE), searches)
    assert "killed by SIG" in run_pattern(found, seconds=3).problem
