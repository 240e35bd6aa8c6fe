"""What is said is kept in order, and shown by kind."""

from __future__ import annotations

from ckptctl.notes import Note, Notes


def test_texts_of_kind_are_unique_and_in_order() -> None:
    notes = Notes()
    notes.add("one", "two", "one")
    notes.add("three", kind="warning")
    assert notes.get_texts() == ("one", "two") and notes.get_texts("warning") == ("three",)


def test_last_reason_of_subject_wins() -> None:
    notes = Notes()
    notes.explain("skipped", {"a": "first", "b": "other"})
    notes.explain("dropped", {"a": "elsewhere"})
    notes.explain("skipped", {"a": "last"})
    assert list(notes.get_reasons("skipped").items()) == [("a", "last"), ("b", "other")]
    assert notes.get_reasons("missing") == {}


def test_appended_notes_keep_their_kinds() -> None:
    notes, other = Notes(), Notes()
    notes.add("before")
    other.explain("missing", {"a": "why"})
    notes += other
    assert notes == [Note("note", "", "before"), Note("missing", "a", "why")]
