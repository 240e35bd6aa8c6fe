"""The leaves of nested objects, and their names."""

from __future__ import annotations

import tracemalloc

import pytest

from ckptctl.catalog import Blob
from ckptctl.errors import UnsupportedError
from ckptctl.formats.shared.leaves import flatten_mappings, flatten_object, join_path


def test_names_below_long_key_are_refused_in_bounded_memory() -> None:
    root = {"a" * 1_000_000: {"b": {str(number): number for number in range(20_000)}}}
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedError, match="too long") as caught:
            [join_path(path) for path, _ in flatten_object(root, lambda _: False, where="a.pt")]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.where == "a.pt"
    assert peak < 20_000_000


def test_parent_path_counts_toward_name_length_limit() -> None:
    with pytest.raises(UnsupportedError, match="too long"):
        list(flatten_object([*range(100), {}], lambda _: True, ("a" * 1_000_000,), where="a.pt"))


def test_many_names_of_usual_length_are_flattened() -> None:
    root = {"model": {f"layers.{number}.{'a' * 200}": number for number in range(50_000)}}
    assert len(list(flatten_object(root, lambda _: False, where="a.pt"))) == 50_000


def test_dictionaries_are_flattened_unless_two_keys_become_one() -> None:
    blobs = [
        Blob("a", ("a",), value={1.5: 2, None: {"b": [{"c": 3}]}}),
        Blob("d", ("d",), value={1.5: 2, "1.5": 3}),
        Blob("e", ("e",), value={}),
    ]
    found = {blob.name: blob.value for blob in flatten_mappings(blobs)}
    assert found == {"a.1.5": 2, "a.None.b.0.c": 3, "d": {1.5: 2, "1.5": 3}, "e": {}}
