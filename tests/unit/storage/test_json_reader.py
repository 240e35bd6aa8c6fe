"""Strict JSON: what Python's reader lets pass is refused."""

import json
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.storage import json_reader
from ckptctl.storage.files import source_files
from ckptctl.storage.json_reader import JsonTextReader, parse_json, read_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_json_round_trips(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert parse_json(text, where="x") == value


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1,"a":1}',
        b'[{"a":{"b":1,"b":2}}]',
        b"NaN",
        b"[Infinity]",
        b"[-Infinity]",
        b"1e400",
        b"-1e400",
        b'"\\ud800"',
        b'{"\\udfff":1}',
        b'"\\ud800\\u0041"',
        b"\xef\xbb\xbf{}",
        b'"\xff"',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        b"",
        b"{} {}",
        b"{'a':1}",
        b"[1,]",
        b'"\x01"',
        b"01",
    ],
)
def test_lenient_json_is_refused(text):
    with pytest.raises((DamagedError, UnsupportedError)) as error:
        parse_json(text, where="config.json")
    assert error.value.where == "config.json"
    assert error.value.why


WHOLE = b'{"a": [1, 2.5, true, null, {"b": "c\xc3\xa9"}], "d": "e"}'


@pytest.mark.parametrize("end", range(len(WHOLE)))
def test_truncated_json_is_damaged(end):
    with pytest.raises(DamagedError, match="truncated"):
        parse_json(WHOLE[:end], where="x")


@pytest.mark.parametrize(
    "text", [b'{"a": 1,}', b'{"a": "b}', b"{1: 2}", b'{"a": 1} x', b'["\xff"]']
)
def test_malformed_json_is_unsupported(text):
    with pytest.raises(UnsupportedError, match="malformed JSON"):
        parse_json(text, where="x")


def test_surrogate_pairs_are_decoded():
    assert parse_json(b'"\\ud83d\\ude00"', where="x") == "\U0001f600"


def test_json_file_above_size_limit_is_unsupported(tmp_path):
    (tmp_path / "a.json").write_bytes(b"[1, 2]")
    with source_files(tmp_path) as files:
        assert read_json(files, "a.json") == [1, 2]
        with pytest.raises(UnsupportedError, match="too large"):
            read_json(files, "a.json", max_bytes=5)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_json_text_is_parsed_incrementally(monkeypatch, chunk):
    monkeypatch.setattr(json_reader, "CHUNK_CHARACTERS", chunk)
    text = JsonTextReader(StringIO(' {"a": 12345, "list": [1, "two", {"x": []}], "b": null} '))
    values = {
        name: list(text.iterate_items()) if name == "list" else text.read_value()
        for name in text.iterate_keys()
    }
    assert values == {"a": 12345, "list": [1, "two", {"x": []}], "b": None}
    text.require_end()


def test_values_before_truncation_are_parsed(monkeypatch):
    monkeypatch.setattr(json_reader, "CHUNK_CHARACTERS", 4)
    text, read = JsonTextReader(StringIO('{"a": 1, "list": [1, 2, ')), []
    with pytest.raises(ValueError, match="Expecting value"):
        for name in text.iterate_keys():
            read += [name, *(text.iterate_items() if name == "list" else [text.read_value()])]
    assert read == ["a", 1]
