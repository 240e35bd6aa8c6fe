"""Leaves that are no tensors: what is damaged, and what is only not trusted."""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

import ckptctl
from ckptctl.distributed.values import unpickle_value
from ckptctl.errors import DamagedError, UnsafePickleError, UnsupportedError, UsageError
from tests.checkpoints import save_dcp


def saved(value: object, *, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def read(content: bytes, *, trusted: bool) -> object:
    return unpickle_value(content, "leaf", "here", trusted=trusted)


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.getpid, ()


@pytest.mark.parametrize(("zipped", "trusted"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("value", [{"a": [1, "text"]}, {"t": torch.arange(300)}, _Hostile()])
def test_damaged_leaf_is_an_error_even_if_trusted(
    value: object, zipped: bool, trusted: bool
) -> None:
    whole = saved(value, zipped=zipped)
    torn = [whole[:length] for length in (0, 1, 30, len(whole) // 2)]
    changed = [bytes(len(whole)), whole[: len(whole) // 3] + bytes(len(whole) * 2 // 3)]
    for content in (*torn, *changed):
        with pytest.raises(DamagedError, match="`leaf` cannot be read") as found:
            read(content, trusted=trusted)
        assert type(found.value) is DamagedError
        assert found.value.hint is None, "trust does not help"
        assert found.value.where == "here"


@pytest.mark.parametrize(
    ("zipped", "error"), [(True, UnsafePickleError), (False, UnsupportedError)]
)
def test_intact_unsafe_leaf_requires_trust(zipped: bool, error: type[UnsupportedError]) -> None:
    with pytest.raises(error, match="harmless") as found:
        read(saved(_Hostile(), zipped=zipped), trusted=False)
    assert "trusted=True" in str(found.value.hint)
    assert read(saved(_Hostile(), zipped=zipped), trusted=True) == os.getpid()


def test_class_that_is_not_installed_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("of_the_trainer")
    exec("class Arguments: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "of_the_trainer", module)
    content = saved(module.Arguments())
    monkeypatch.delitem(sys.modules, "of_the_trainer")
    with pytest.raises(UnsafePickleError):
        read(content, trusted=False)
    with pytest.raises(UsageError, match="code that is not installed") as found:
        read(content, trusted=True)
    assert "of_the_trainer" in str(found.value.why)


@pytest.mark.parametrize("trusted", [False, True])
def test_zeroed_leaf_is_damage_and_changes_nothing(tmp_path: Path, trusted: bool) -> None:
    folder = save_dcp(tmp_path / "a", {"w": torch.ones(2), "leaf": {"x"}})
    places = FileSystemReader(folder).read_metadata().storage_data
    (place,) = (one for index, one in places.items() if index.fqn == "leaf")
    path = folder / place.relative_path
    content = bytearray(path.read_bytes())
    content[place.offset : place.offset + place.length] = bytes(place.length)
    path.write_bytes(content)
    state: dict[str, Any] = {"w": torch.zeros(2), "leaf": None}
    with pytest.raises(DamagedError) as found:
        ckptctl.load(state, folder, trusted=trusted)
    assert type(found.value) is DamagedError
    assert not state["w"].any()


def test_plain_pickle_is_unsupported() -> None:
    with pytest.raises(UnsupportedError):
        read(pickle.dumps({"a": 1}), trusted=False)
