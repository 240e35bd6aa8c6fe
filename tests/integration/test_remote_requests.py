"""What is asked of a place behind a URL: how much, how much at a time, with which token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import torch

import ckptctl
from ckptctl.formats.hf import hf_files
from ckptctl.remote import blocks
from ckptctl.storage import read_ahead
from tests import hub_server
from tests.hub_server import Hub

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the client itself
TINY = Path("tests/data/tiny-llama3-hf")
INDEX = "model.safetensors.index.json"
OWN = "/api/agent-harnesses"
"""What the client asks for itself."""


def _asked(hub: Hub) -> list[str]:
    return [path.rpartition("/")[2] for _, path in hub.requests if path != OWN]


def _shards(folder: Path) -> int:
    return len(list(folder.glob("*-of-*.safetensors")))


# An index that need not be read


def _by_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY)
    model.save_pretrained(folder, max_shard_size="100KB")


def _by_ckptctl(folder: Path, size: int = 60_000) -> None:
    ckptctl.convert(TINY, folder, to="hf", max_shard_size=size)


def _by_the_hub_client(folder: Path) -> None:
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("model*"))
    weights = {
        key: tensor
        for item in TINY.glob("*.safetensors")
        for key, tensor in safetensors.torch.load_file(item).items()
    }
    huggingface_hub.save_torch_state_dict(
        {name: weights[name] for name in sorted(weights)}, folder, max_shard_size=60_000
    )


@pytest.mark.parametrize("write", [_by_transformers, _by_ckptctl, _by_the_hub_client])
def test_index_confirmed_by_listing_digest_is_not_read(
    hub: Hub, tmp_path: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path / "model")
    hub.add("org/model", tmp_path / "model")
    shards = _shards(tmp_path / "model")
    found = ckptctl.inspect("hf://org/model")
    assert shards > 2 and len(_asked(hub)) == shards + 2 and INDEX not in _asked(hub)
    expected = ckptctl.inspect(tmp_path / "model")
    assert found.tensors == expected.tensors and list(found.tensors) == list(expected.tensors)
    assert (found.metadata, found.notes) == (expected.metadata, expected.notes)


def test_lfs_index_confirmed_by_sha256_is_not_read(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_server, "LARGE", (*hub_server.LARGE, ".index.json"))
    ckptctl.inspect("hf://org/tiny")
    assert INDEX not in _asked(hub)


@pytest.mark.parametrize("change", [{"note": "mine"}, {"total_size": 1}])
def test_non_standard_index_is_read(hub: Hub, tmp_path: Path, change: dict[str, Any]) -> None:
    folder = shutil.copytree(TINY, tmp_path / "model")
    index = json.loads((folder / INDEX).read_text())
    index["metadata"] |= change
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    hub.add("org/model", folder)
    found = ckptctl.inspect("hf://org/model")
    assert INDEX in _asked(hub) and len(_asked(hub)) == _shards(folder) + 3
    assert found.metadata == ckptctl.inspect(folder).metadata


def test_wrong_index_is_reported(hub: Hub, tmp_path: Path) -> None:
    """It differs from the true one in two names that change places, not in its length."""
    folder = shutil.copytree(TINY, tmp_path / "model")
    index = json.loads((folder / INDEX).read_text())
    places = index["weight_map"]
    one = next(iter(places))
    other = next(key for key, file in places.items() if file != places[one])
    places[one], places[other] = places[other], places[one]
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    assert (folder / INDEX).stat().st_size == (TINY / INDEX).stat().st_size
    hub.add("org/model", folder)
    found = ckptctl.inspect("hf://org/model")
    assert any(one in problem for problem in found.problems), found.problems
    assert any(one in str(finding) for finding in ckptctl.verify("hf://org/model").findings)


def test_damaged_shards_are_reported_like_local_ones(hub: Hub, tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "model")
    (folder / "model-00002-of-00003.safetensors").write_bytes(b"x" * 100)
    hub.add("org/model", folder)
    there, here = ckptctl.verify("hf://org/model"), ckptctl.verify(folder)
    assert [one.what for one in there.findings] == [one.what for one in here.findings] != []


def test_index_is_not_guessed_without_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_files, "_iterate_candidate_indexes", None)
    assert ckptctl.inspect(TINY).parameters == 127296


# Requests at the same time


def test_shard_headers_are_read_concurrently(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _by_ckptctl(tmp_path / "model", 5_000)
    hub.add("org/model", tmp_path / "model")
    shards = _shards(tmp_path / "model")
    hub.gather = 8
    ckptctl.inspect("hf://org/model")
    count = len(_asked(hub))
    assert shards > 10 and count == shards + 2 and hub.most >= 8
    hub.requests.clear()
    hub.most, hub.gather, hub.patience = 0, 3, 0.1
    monkeypatch.setattr(read_ahead, "PREFETCH_COUNT", 1)
    ckptctl.inspect("hf://org/model")
    assert len(_asked(hub)) == count and hub.most <= 2


def test_dcp_items_are_read_concurrently(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lies apart from the others by more than what one request gets."""
    weights = {f"{n:02}": torch.zeros(1 << 18) for n in range(16)}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    ckptctl.convert(tmp_path / "model.safetensors", tmp_path / "dcp", to="dcp")
    hub.add("org/dcp", tmp_path / "dcp")
    hub.gather, hub.alone = 8, 2  # the first two read the ends of the file
    assert ckptctl.verify("hf://org/dcp").findings == ()
    count = len(_asked(hub))
    assert count > 16 and hub.most >= 8
    hub.requests.clear()
    monkeypatch.setattr(read_ahead, "PREFETCH_COUNT", 1)
    ckptctl.verify("hf://org/dcp")
    assert abs(count - len(_asked(hub))) <= 2, "which end of a block is first asked for may differ"


def test_rank_files_are_read_concurrently(hub: Hub, tmp_path: Path) -> None:
    ckptctl.convert(TINY, tmp_path / "meta", to="meta", mp=2)
    hub.add("org/meta", tmp_path / "meta")
    hub.gather = 2
    assert ckptctl.inspect("hf://org/meta").format == "meta" and hub.most >= 2


def test_failed_read_ahead_is_reported_for_its_file(
    hub: Hub,
) -> None:
    repository = hub.repositories["org/tiny"]
    hf_files = dict(repository.files)
    hf_files["model-00003-of-00003.safetensors"] = b""
    repository.commit(hf_files)
    found = ckptctl.verify("hf://org/tiny").findings
    assert [one.file for one in found if one.file] != []


def test_each_shard_is_requested_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though fewer blocks are kept than there are shards."""
    monkeypatch.setattr(blocks.SHARED_BLOCKS, "_capacity_bytes", 200_000)
    monkeypatch.setattr(read_ahead, "PREFETCH_COUNT", 1)
    assert ckptctl.verify("hf://org/tiny").findings == ()
    assert sum(name.endswith(".safetensors") for name in _asked(hub)) == 3


# Repositories


@pytest.mark.parametrize("kind", ["datasets", "spaces"])
def test_datasets_and_spaces_are_inspected(hub: Hub, kind: str) -> None:
    hub.add(f"{kind}/org/tiny", TINY)
    del hub.repositories["org/tiny"]
    assert ckptctl.inspect(f"hf://{kind}/org/tiny@main").parameters == 127296
    assert all(f"{kind}/org/tiny" in path for _, path in hub.requests if path != OWN)


def test_hub_token_is_not_sent_to_cdn(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.cdn, server = hub_server.start()
    hub.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert ckptctl.verify("hf://org/tiny", level="full").findings == ()
    server.shutdown()
    server.server_close()
    assert hub.cdn.sent > 100_000 and hub.cdn.tokens
    assert set(hub.cdn.tokens) == {None} and "Bearer secret" in hub.tokens


def test_full_verify_compares_with_hub_digests(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ckptctl.verify("hf://org/tiny", level="full")
    assert found.findings == () and sum(found.verified.values()) == found.nbytes
    name = "model-00002-of-00003.safetensors"
    original = hub_server._sibling

    def sibling(file: str, data: bytes) -> dict[str, object]:
        return original(file, data[:-1] + b"x" if file in (name, "config.json") else data)

    monkeypatch.setattr(hub_server, "_sibling", sibling)
    bad = ckptctl.verify("hf://org/tiny", level="full").findings
    assert {one.file for one in bad} == {name, "config.json"}
    assert {one.severity for one in bad} == {"error"} and "the Hub lists" in str(bad[0].why)
