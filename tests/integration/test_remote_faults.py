"""A place behind a URL that fails at its k-th operation: what makes files a checkpoint is not there
unless all of them are, and nothing is published of what was not read whole.

What is left in that place is read by safetensors and torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import ckptctl
from ckptctl.errors import CkptError, StorageError
from ckptctl.remote import retries
from ckptctl.storage.execution import finisher
from tests.checkpoints import differences, load_any_reference
from tests.conftest import DATA
from tests.sweeps import one_in

MEMORY = fsspec.filesystem("memory")
TINY = DATA / "tiny-llama3-hf"
STATE = load_any_reference(TINY)
OPERATIONS = ("put_file", "pipe_file", "cat_file", "open", "rm_file", "ls", "info", "makedirs")
MARKERS = {"hf": "model.safetensors.index.json", "dcp": ".metadata"}
SHARDS: dict[str, Any] = {"max_shard_size": 100_000, "jobs": 1}


class Faults:
    """Makes operations of the file system in memory fail.

    Args:
        once: The number of the one that fails; 0: none.
        forever: The number from which on all fail: the network, or the process, is gone.
    """

    def __init__(self, once: int = 0, forever: int = 0) -> None:
        self.once = once
        self.forever = forever
        self.done = 0
        self.hit = False

    def __call__(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*words: Any, **options: Any) -> Any:
            self.done += 1
            if self.done == self.once or 0 < self.forever <= self.done:
                self.hit = True
                raise ConnectionResetError("the network is down")
            return real(*words, **options)

        return failing


@pytest.fixture
def under(monkeypatch: pytest.MonkeyPatch) -> Callable[[Faults], Any]:
    """Return what makes the faults happen within a block."""
    monkeypatch.setattr(retries, "retry_policy", retries.RetryPolicy(0))
    monkeypatch.setattr(finisher, "MAX_KEPT_BYTES", 0)

    def context(faults: Faults) -> Any:
        patch = pytest.MonkeyPatch()
        for name in OPERATIONS:
            patch.setattr(type(MEMORY), name, faults(getattr(type(MEMORY), name)))
        return patch

    return context


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    yield f"memory://{tmp_path.name}"
    if MEMORY.exists(f"/{tmp_path.name}"):
        MEMORY.rm(f"/{tmp_path.name}", recursive=True)


def files(url: str) -> list[str]:
    """Return the files of the output; a lock that was left is none."""
    found = map(str, MEMORY.find("/" + url.removeprefix("memory://")))
    return sorted(name for name in found if "/.ckptctl" not in name)


def read(url: str, folder: Path) -> dict[str, Any]:
    """Fetch what is there and read it with other people's code."""
    for name in files(url):
        target = folder / name.removeprefix("/" + url.removeprefix("memory://") + "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(MEMORY.cat_file(name))
    return load_any_reference(folder)


def attempt(call: Callable[[], object], patch: Any) -> CkptError | None:
    try:
        call()
    except CkptError as error:
        return error
    finally:
        patch.undo()
    return None


def marked(url: str, to: str) -> bool:
    return any(name.endswith(MARKERS[to]) for name in files(url))


@pytest.mark.parametrize("kind", ["once", pytest.param("forever", marks=pytest.mark.slow)])
@pytest.mark.parametrize("to", one_in(2, MARKERS))
def test_failing_output_storage_publishes_only_complete_checkpoint(
    url: str, tmp_path: Path, under: Callable[[Faults], Any], to: str, kind: str
) -> None:
    for number in count(1):
        place, faults = f"{url}/{number}", Faults(**{kind: number})
        error = attempt(partial(ckptctl.convert, TINY, place, to=to, **SHARDS), under(faults))
        if not faults.hit:
            break
        if error is None or marked(place, to):
            assert not differences(read(place, tmp_path / str(number)), STATE), number
        if error is not None:
            assert isinstance(error, StorageError), error
            assert not files(place) or "remain" in str(error.why), error.why
    assert number > 10
    assert error is None and not differences(read(place, tmp_path / "last"), STATE)


@pytest.mark.slow
@pytest.mark.parametrize("to", MARKERS)
def test_storage_lost_during_cleanup_leaves_no_partial_checkpoint(
    url: str, tmp_path: Path, under: Callable[[Faults], Any], to: str
) -> None:
    """Whatever was removed before: the marker has gone first."""
    faults = Faults()
    assert (
        attempt(lambda: ckptctl.convert(TINY, f"{url}/0", to=to, **SHARDS), under(faults)) is None
    )
    seen = set()
    for first in range(faults.done - 6, faults.done + 1):
        for more in range(1, 10):
            place = f"{url}/{first}-{more}"
            gone = Faults(first, first + more)
            call = partial(ckptctl.convert, TINY, place, to=to, **SHARDS)
            if attempt(call, under(gone)) is not None and marked(place, to):
                assert not differences(read(place, tmp_path / f"{first}-{more}"), STATE), gone.once
            seen.add(len(files(place)))
    assert len(seen) > 3, "it was never taken back by half"


@pytest.mark.parametrize("to", ["hf", "torch"])
def test_failing_source_storage_publishes_only_complete_output(
    url: str, tmp_path: Path, under: Callable[[Faults], Any], to: str
) -> None:
    MEMORY.put(str(TINY), "/" + url.removeprefix("memory://"), recursive=True)
    for number in count(1):
        out, faults = tmp_path / f"out-{number}", Faults(number)
        error = attempt(partial(ckptctl.convert, url, out, to=to, jobs=1), under(faults))
        if not faults.hit:
            break
        if error is None:
            assert not differences(load_any_reference(out), STATE), number
        else:
            assert error.exit_code in (3, 8), error
            assert not [path.name for path in tmp_path.iterdir() if f"out-{number}" in path.name]
    assert number > 4 and not differences(load_any_reference(out), STATE)


def test_save_to_failing_storage_publishes_only_complete_state(
    url: str, tmp_path: Path, under: Callable[[Faults], Any]
) -> None:
    state = {"w": torch.arange(9.0), "step": 3}
    for number in count(1):
        place, faults = f"{url}/{number}", Faults(number)
        error = attempt(partial(ckptctl.save, state, place), under(faults))
        if not faults.hit:
            break
        if error is None or marked(place, "dcp"):
            assert not differences(read(place, tmp_path / str(number)), state), number
    assert number > 3
