"""``ckptctl delta`` with sources and destinations at URLs, next to the stores' own clients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import ckptctl
from ckptctl import delta
from ckptctl.cli.app import app
from ckptctl.conversion.convert import run_conversion
from ckptctl.errors import ChangedError, DamagedError, RefusedError, StorageError, UsageError
from tests import hub_bucket_server, s3_server
from tests.checkpoints import save_hf, tiny_llama
from tests.checkpoints.deltas import apply_delta
from tests.checkpoints.readers import raw_bytes
from tests.hub_bucket_server import BUCKET_ID
from tests.hub_server import Hub
from tests.stores import names

pytestmark = pytest.mark.filterwarnings("ignore")  # of clients and servers
State = dict[str, torch.Tensor]


def read(folder: Path) -> State:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def to_bytes(state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: raw_bytes(tensor) for name, tensor in state.items()}


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    """Three steps of a run; the last one also changes a file."""
    state, config = tiny_llama("llama3")
    state = {name: tensor.bfloat16() for name, tensor in state.items()}
    folders = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        state = {
            name: (
                tensor.float() + 1e-4 * torch.randn(tensor.shape, generator=generator)
            ).bfloat16()
            for name, tensor in state.items()
        }
        save_hf(tmp_path / f"step-{step}", state, config)
        folders.append(tmp_path / f"step-{step}")
    (folders[2] / "generation_config.json").write_text("{}")
    return folders


def upload(folder: Path, url: str) -> str:
    """Upload *folder* with the client of the store."""
    system, root = fsspec.core.url_to_fs(url)
    for path in folder.rglob("*"):
        if path.is_file():
            system.pipe_file(f"{root}/{path.relative_to(folder)}", path.read_bytes())
    return url


def download(url: str, folder: Path) -> Path:
    """Download *url* with the client of the store."""
    system, root = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    for path in system.find(root):
        target = folder / path[len(root.strip("/")) + (path.startswith("/")) :].lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(system.cat_file(path))
    return folder


def test_delta_is_made_applied_and_squashed_at_urls(
    url: str, steps: list[Path], tmp_path: Path
) -> None:
    base, new, last = (upload(step, f"{url}/{step.name}") for step in steps)
    made = delta.make(base, new, f"{url}/1.delta")
    assert made.output == f"{url}/1.delta"
    delta.make(new, last, f"{url}/2.delta")
    assert {Path(name).name for name in names(f"{url}/2.delta")} == {
        "ckptctl.delta.json",
        "delta-00001.safetensors",
        "generation_config.json",
    }
    assert apply_delta(read(steps[0]), download(f"{url}/1.delta", tmp_path / "1")) == to_bytes(
        read(steps[1])
    )
    deltas = [f"{url}/1.delta", f"{url}/2.delta"]
    assert delta.verify(deltas, base=base).result_sha256 == delta.verify(deltas[1]).result_sha256
    delta.squash(deltas, f"{url}/squashed")
    for number, chain in enumerate((deltas, f"{url}/squashed")):
        delta.apply(base, chain, tmp_path / f"local-{number}")
        assert to_bytes(read(tmp_path / f"local-{number}")) == to_bytes(read(steps[2]))
        delta.apply(base, chain, f"{url}/out-{number}", verify=True)
        found = download(f"{url}/out-{number}", tmp_path / f"out-{number}")
        assert to_bytes(read(found)) == to_bytes(read(steps[2]))
        assert (found / "generation_config.json").read_text() == "{}"
    weights = read(steps[0])
    delta.apply_to(weights, deltas, check="all")
    assert to_bytes(weights) == to_bytes(read(steps[2]))


def test_delta_at_a_url_is_only_replaced_if_asked(
    url: str, steps: list[Path], tmp_path: Path
) -> None:
    first, last = steps[0], steps[2]
    target = f"{url}/delta"
    delta.make(first, last, target)
    before = names(target)
    with pytest.raises(RefusedError, match="the destination exists"):
        delta.make(first, steps[1], target)
    assert names(target) == before
    delta.make(first, steps[1], target, overwrite=True)
    assert "ckptctl.delta.json" in names(target) and len(names(target)) == len(before) - 1
    delta.apply(first, target, tmp_path / "out")
    assert to_bytes(read(tmp_path / "out")) == to_bytes(read(steps[1]))
    model = upload(first, f"{url}/model")
    kept = names(model)
    for overwrite in (False, True):
        with pytest.raises(RefusedError):
            delta.make(first, last, model, overwrite=overwrite)
    with pytest.raises(RefusedError, match="overlap"):
        delta.make(model, last, model, overwrite=True)
    assert names(model) == kept


def test_damaged_delta_at_a_url_is_not_applied(url: str, steps: list[Path], tmp_path: Path) -> None:
    delta.make(steps[0], steps[1], tmp_path / "delta")
    content = bytearray((tmp_path / "delta" / "delta-00001.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "delta" / "delta-00001.safetensors").write_bytes(content)
    target = upload(tmp_path / "delta", f"{url}/delta")
    for use in (
        lambda: delta.verify(target),
        lambda: delta.apply(steps[0], target, f"{url}/out"),
    ):
        with pytest.raises(DamagedError, match="does not match its digest"):
            use()
    assert not names(f"{url}/out")


def test_delta_at_a_url_that_is_replaced_after_its_check_is_not_used(
    url: str, steps: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"{url}/delta"
    delta.make(steps[0], steps[2], target)
    plan = delta.plan(steps[0], target, tmp_path / "out")
    plan.check()
    system, root = fsspec.core.url_to_fs(target)
    path = f"{root}/delta-00001.safetensors"
    content = bytearray(system.cat_file(path))
    content[-1] ^= 1
    system.pipe_file(path, bytes(content))
    with pytest.raises((ChangedError, DamagedError, StorageError)):
        run_conversion(plan.conversion)
    assert not (tmp_path / "out").exists()


def test_weight_update_is_published_at_a_url(url: str, steps: list[Path], tmp_path: Path) -> None:
    target = f"{url}/weight_v000001"
    delta.make(steps[0], steps[1], target, weight_version=1)
    with pytest.raises(RefusedError) as occupied:
        delta.make(steps[0], steps[1], target, weight_version=1)
    assert "to replace a delta" in str(occupied.value.hint)
    delta.make(steps[0], steps[1], target, weight_version=1, overwrite=True)
    delta.make(steps[0], target, tmp_path / "again")
    assert apply_delta(read(steps[0]), tmp_path / "again") == to_bytes(read(steps[1]))


def test_failed_upload_leaves_no_delta(steps: list[Path], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, s3_server.serving(patch) as server:
        url = f"s3://{s3_server.BUCKET}/delta"
        server.fault = lambda request: (
            "refuse" if request.sends and request.key.endswith(".delta.json") else None
        )
        with pytest.raises(StorageError):
            delta.make(steps[0], steps[1], url)
        server.reset()
        assert not names(url)


def test_repository_of_the_hub_is_a_source_and_no_destination(
    hub: Hub, steps: list[Path], tmp_path: Path
) -> None:
    hub.add("org/base", steps[0])
    hub.add("org/step", steps[1])
    delta.make("hf://org/base", "hf://org/step", tmp_path / "delta")
    delta.apply("hf://org/base", tmp_path / "delta", tmp_path / "out")
    assert to_bytes(read(tmp_path / "out")) == to_bytes(read(steps[1]))
    hub.add("org/delta", tmp_path / "delta")
    delta.apply("hf://org/base", "hf://org/delta", "hf://org/new", overwrite=True)
    assert delta.verify("hf://org/delta", base="hf://org/base").tensors == 21
    command = ["delta", "make", "hf://org/base", "hf://org/step", "hf://org/new/delta"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == UsageError.exit_code
    assert "cannot write a delta to a repository of the Hub" in found.stderr
    assert "hf://buckets/ORG/NAME/FOLDER" in found.stderr


@pytest.mark.slow
def test_delta_in_a_bucket_of_the_hub(steps: list[Path], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, hub_bucket_server.serving(patch) as server:
        url = f"hf://buckets/{BUCKET_ID}"
        for step in steps[:2]:
            ckptctl.convert(step, f"{url}/{step.name}", to="hf")
        delta.make(f"{url}/step-0", f"{url}/step-1", f"{url}/a b/1.delta")
        assert "a b/1.delta/ckptctl.delta.json" in server.files
        delta.apply(f"{url}/step-0", f"{url}/a b/1.delta", tmp_path / "out")
        assert to_bytes(read(tmp_path / "out")) == to_bytes(read(steps[1]))
