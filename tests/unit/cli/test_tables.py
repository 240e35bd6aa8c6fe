"""Tables: what is cut, what goes, and what stays where a terminal is narrow."""

import re

import pytest

from ckptctl.cli import tables
from ckptctl.cli.tables import Column, StyledText

NAME = "model.layers.10.self_attn.q_proj.weight"
COLUMNS = (
    tables.name_column("name"),
    Column("shape"),
    tables.number_column("bytes", drop=1),
    tables.number_column("worst", drop=2),
    tables.prose_column("remark"),
)
ROW = (NAME, "[4096, 4096]", "33,554,432", "0.25", "some words that may be left out")


def shown(room, rows=(ROW,), columns=COLUMNS):
    return tables.format_lines(columns, rows, room, "…", lambda text, _: text)


def test_wide_terminal_shows_all_columns():
    head, row = shown(200)
    assert head.split() == ["name", "shape", "bytes", "worst", "remark"]
    assert re.split("  +", row) == list(ROW)


def test_least_important_columns_are_dropped_first():
    assert shown(105)[0].split() == ["name", "shape", "bytes", "worst", "remark"]
    assert shown(90)[0].split() == ["name", "shape", "worst", "remark"]
    assert shown(80)[0].split() == ["name", "shape", "remark"]
    assert NAME in shown(95, [(*ROW[:4], "short")])[1]


@pytest.mark.parametrize("room", range(20, 130))
def test_lines_fit_terminal_and_numbers_are_complete(room):
    lines = shown(room)
    assert len(lines) == 2 and max(map(len, lines)) <= max(room, 20)
    assert "[4096, 4096]" in lines[1]
    assert "33,554,432" in lines[1] or "33" not in lines[1]


def test_names_are_shortened_in_middle_and_prose_at_end():
    assert tables.truncate_text("model.layers.0.self_attn.q_proj.weight", 22, "…") == (
        "model.la…q_proj.weight"
    )
    assert tables.truncate_text("some words that", 11, "…", prose=True) == "some words…"
    assert tables.truncate_text("short", 5, "…") == "short"
    assert tables.truncate_text("long", 0, "…") == "…"


def test_blank_columns_are_omitted():
    assert shown(200, [("a", "[1]", "", "", "")]) == ["name  shape", "a     [1]"]
    assert shown(200, [("a", "b"), ("cc",)], (Column(), Column())) == ["a   b", "cc"]
    assert shown(200, []) == []


def test_mostly_empty_columns_are_dropped_first():
    columns = (
        tables.name_column("name"),
        Column("time", drop=1),
        tables.prose_column("by", drop=2),
    )
    rows = [("a" * 30, "12:00", "")] * 3 + [("a" * 30, "12:00", "a link")]
    assert shown(50, rows, columns)[0].split() == ["name", "time", "by"]
    assert shown(44, rows, columns)[0].split() == ["name", "time"]
    assert shown(33, rows, columns)[0].split() == ["name"]
    assert shown(44, [(*row[:2], "a link") for row in rows], columns)[0].split() == ["name", "by"]


@pytest.mark.parametrize(("count", "line"), [(10, ""), (11, "  and 1 more (`--json` lists all)")])
def test_more_counts_rows_beyond_ten(count, line):
    assert tables.format_remaining(count) == line


def test_color_does_not_affect_column_width():
    paint = {"complete": "<{}>"}
    lines = tables.format_lines(
        (Column(), Column()),
        [(StyledText("ok", "complete"), "x"), ("torn", "y")],
        80,
        "…",
        lambda text, style: paint.get(style, "{}").format(text),
    )
    assert lines == ["<ok>    x", "torn  y"]
