"""Expressions from an adapter's configuration never take for ever to match."""

import re
import time

import pytest

from ckptctl.errors import RefusedError, UnsupportedError
from ckptctl.ops.adapters.expressions import check_expressions, matching

MODULE = "model.layers.11.self_attn.q_proj"


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+",
        "(a?){9}",
        ".?" * 60 + "X",
        "(.|.)" * 28 + "X",
        ".*" * 6 + "X",
        "(?:.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?)X",
        "(?x:#[\n.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?#]\n)X",
        "(?#[).?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?(?#])X",
        r"\[.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?]X",
    ],
)
def test_what_has_too_many_ways_to_match(text):
    with pytest.raises(RefusedError, match="too complicated"):
        check_expressions({text: 1}, "here")


def test_many_that_are_bearable_alone():
    patterns = {f".*.*.*{number}": 1 for number in range(9)}
    with pytest.raises(RefusedError):
        check_expressions(patterns, "here")


@pytest.mark.parametrize(
    "text", ["(", "a)(b", "(?i)q_proj", "a{4294967296}", "(" * 5000 + ")" * 5000]
)
def test_what_is_malformed(text):
    with pytest.raises(UnsupportedError, match="malformed") as caught:
        check_expressions({text: 1}, "here")
    assert len(caught.value.what) < 100


@pytest.mark.parametrize(
    "text",
    [
        "q_proj",
        r"model\.layers\.11\.self_attn\.q_proj",
        r".*\.layers\.(?:1[0-9]|2[0-9])\..*(?:q|k|v)_proj",
        r"layers\.\d+\.self_attn\.[kq]_proj",
        "^model.layers.11.self_attn.q_proj",
        r"(?!.*vision).*q_proj",
        "|".join(["q_proj", *(f"name{number}" for number in range(500))]),
    ],
)
def test_what_people_write(text):
    check_expressions({text: 1}, "here")
    expected = 3 if re.match(rf"(.*\.)?({text})$", MODULE) else None
    assert expected == 3
    assert matching({"nothing": 1, text: 3}, MODULE, None) == expected


def test_a_pattern_for_each_of_many_modules():
    patterns = {rf"model\.layers\.{n}\.mlp\.up_proj": n for n in range(700)}
    check_expressions(patterns, "here")
    start = time.monotonic()
    for number in range(0, 700, 7):
        assert matching(patterns, f"model.layers.{number}.mlp.up_proj", None) == number
    assert time.monotonic() - start < 5
