import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl import units
from ckptctl.errors import UsageError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("4GiB", 4 * 2**30),
        ("1.5 kB", 1500),
        ("500m", 500 * 10**6),
        ("7", 7),
        (" 12 B ", 12),
        (9, 9),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_parse_bytes_reads_decimal_and_binary_units(text, nbytes):
    assert units.parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "GB", "5XB", "1e9", "nan", "9" * 30, "8192PiB", "٣GB"]
)
def test_parse_bytes_rejects_invalid_sizes(text):
    with pytest.raises(UsageError):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (15 * 1024**3, "15.0 GiB"),
        (3 * 1024**5, "3,072.0 TiB"),
    ],
)
def test_format_bytes_uses_binary_units(nbytes, text):
    assert units.format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1234, "1.23 K"),
        (8030261248, "8.03 B"),
        (70553706496, "70.6 B"),
        (999999, "1.00 M"),
        (405853388800, "406 B"),
    ],
)
def test_format_count_uses_three_significant_digits(count, text):
    assert units.format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.123, "0.12 s"),
        (42, "42.0 s"),
        (59.97, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3725, "1 h 02 min"),
    ],
)
def test_format_seconds_uses_minutes_and_hours(seconds, text):
    assert units.format_seconds(seconds) == text


def test_natural_sorts_numbers_by_value():
    names = ["layers.10.w", "layers.2.w", "layers.2", "a", "layers.02.w", "2", "b10", "b9"]
    assert units.sort_naturally(names) == [
        "2", "a", "b9", "b10", "layers.2", "layers.02.w", "layers.2.w", "layers.10.w",
    ]  # fmt: skip


@given(st.lists(st.text(alphabet="a1.²٣0é", max_size=6)))
def test_natural_sort_is_independent_of_input_order(names):
    assert units.sort_naturally(names) == units.sort_naturally(reversed(names))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢", "plain é 漢"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\u202e\u200b", "\\u202e\\u200b"),
        ("\ud800", "\\ud800"),
        ("\x9b", "\\x9b"),
    ],
)
def test_visible_escapes_control_characters(text, shown):
    assert units.escape_unprintable(text) == shown


@given(st.text(st.characters(exclude_categories=())))
def test_visible_text_is_printable(text):
    assert units.escape_unprintable(text).isprintable()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("12h", 43_200),
        ("7d", 604_800),
        ("2W", 1_209_600),
        ("0.5d", 43_200),
    ],
)
def test_durations_are_parsed_to_seconds(text, seconds):
    assert units.parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "1 year", "7dd", "٧d", "1e3s"])
def test_invalid_duration_is_a_usage_error(text):
    with pytest.raises(UsageError):
        units.parse_seconds(text)


@pytest.mark.parametrize(
    ("text", "months"), [("12M", "360d"), ("1.5 M", "45d"), ("999999999M", "29999999970d")]
)
def test_uppercase_m_duration_is_refused_as_ambiguous(text, months):
    with pytest.raises(UsageError) as caught:
        units.parse_seconds(text)
    minutes = text.replace("M", "m").replace(" ", "")
    assert f"`{minutes}` for minutes" in caught.value.what and f"`{months}`" in caught.value.what


@pytest.mark.parametrize(
    ("words", "none", "single", "several"),
    [
        (("tensor",), "0 tensors", "1 tensor", "1,234 tensors"),
        (("entry", "entries"), "0 entries", "1 entry", "1,234 entries"),
        (("file is", "files are"), "0 files are", "1 file is", "1,234 files are"),
    ],
)
def test_counted_words_agree_with_number(words, none, single, several):
    assert [units.pluralize(count, *words) for count in (0, 1, 1234)] == [none, single, several]
