"""Saves of several ranks to URLs: one at a time, under a lock that none of them leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

import ckptctl
from ckptctl.errors import RefusedError, StorageError
from ckptctl.storage import processes
from ckptctl.storage.remote import direct, mounts
from ckptctl.storage.remote.lock import RemoteLock
from ckptctl.storage.remote.writing import NAME, Writing, parse
from tests import s3_server
from tests.gloo import run_on_ranks
from tests.integration import remote_saving_ranks as ranks
from tests.s3_server import Server

MEMORY = fsspec.filesystem("memory")
STATE = {"w": torch.arange(6.0)}


@pytest.fixture
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, s3_server.serving(patch) as found:
        yield found


@pytest.mark.filterwarnings("ignore")  # of botocore and moto
def test_two_groups_to_one_url(server: Server, tmp_path: Path) -> None:
    url = "s3://bucket/run/step-5"
    said = [tmp_path / f"outcome-{n}" for n in (0, 1)]

    def group(number: int) -> None:
        flags = [str(tmp_path / f"here-{n}") for n in (number, 1 - number)]
        words = (url, number + 1.0, *flags, str(said[number]))
        run_on_ranks(ranks.save_when_both_are_there, (2,), *words)

    groups = [threading.Thread(target=group, args=(number,)) for number in (0, 1)]
    for one in groups:
        one.start()
    for one in groups:
        one.join()
    outcomes = [one.read_text() for one in said]
    assert outcomes.count("written") == 1, outcomes
    assert any(one[0] in "68" and ("another run" in one or "exists" in one) for one in outcomes)
    mounts.drop(url)
    state = {"w": torch.zeros(ranks.ROWS, 8), "b": torch.zeros(9)}
    ckptctl.load(state, url)
    written = outcomes.index("written") + 1.0
    assert all(bool((tensor == written).all()) for tensor in state.values()), "a mix"
    system = fsspec.filesystem("s3")
    system.invalidate_cache()
    assert not [name for name in system.find("bucket") if NAME in name]


def test_a_save_that_fails(tmp_path: Path) -> None:
    for world in (1, 3):
        (tmp_path / str(world)).mkdir()
        run_on_ranks(ranks.a_save_that_fails_leaves_no_lock, (world,), str(tmp_path / str(world)))


def test_a_place_that_another_run_writes_to(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    held = RemoteLock(url, MEMORY, f"/{tmp_path.name}", NAME, ["model.safetensors"])
    held.take()
    with pytest.raises(RefusedError, match="another run writes"):
        ckptctl.save(STATE, url)
    held.drop()
    ckptctl.save(STATE, url)
    assert ckptctl.verify(url).findings == ()


@pytest.mark.parametrize("names", [(".metadata",), ("model.safetensors", "config.json")])
def test_what_a_dead_run_has_left(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Of more ranks, or of a conversion; what it says nothing of stays."""
    url, folder = f"memory://{tmp_path.name}", f"/{tmp_path.name}"
    for name in ("__7_0.distcp", "model.safetensors", "train_state.json"):
        MEMORY.pipe_file(f"{folder}/{name}", b"old")
    MEMORY.pipe_file(f"{folder}/{NAME}", Writing("dead", None, names).to_bytes())
    ckptctl.save(STATE, url)
    there = {str(name).rpartition("/")[2] for name in MEMORY.find(folder)}
    kept = {"model.safetensors"} - set(names)
    assert there == {".metadata", "__0_0.distcp", "train_state.json"} | kept


def test_a_lock_that_is_lost_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a pause of minutes: nothing is published, and the other one's lock stays."""
    url = f"memory://{tmp_path.name}"
    other = Writing("other", processes.Process("elsewhere", "", 1, 1), (".metadata",))
    original = direct.create

    def create(*words: str) -> object:
        MEMORY.pipe_file(f"/{tmp_path.name}/{NAME}", other.to_bytes())
        return original(*words)

    monkeypatch.setattr(direct, "create", create)
    with pytest.raises(StorageError, match="another run writes"):
        ckptctl.save(STATE, url)
    there = MEMORY.find(f"/{tmp_path.name}")
    assert not [name for name in there if name.endswith(".metadata")]
    assert parse(MEMORY.cat_file(f"/{tmp_path.name}/{NAME}")) == other
