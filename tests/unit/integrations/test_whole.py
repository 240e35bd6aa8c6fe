"""Reading checkpoints into nothing, files beside them, and second names for their data."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.errors import RefusedError
from ckptctl.integrations.whole import (
    compute_shard_checksums,
    load_full_model,
    load_full_state_dict,
    restore_optimizer_param_keys,
    save_with_sidecar_files,
)
from tests.checkpoints import differences, load_any_reference, save_dcp, save_hf, tiny_llama
from tests.checkpoints.readers import flatten

REPOSITORY = Path(__file__).parents[3]
STATE: dict[str, Any] = {"model": {"w": torch.arange(12.0).reshape(4, 3)}, "step": 3}


def trained(optimizer: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(6)))
    found = optimizer(layers.parameters(), **options)
    layers(torch.randn(2, 3)).sum().backward()
    found.step()
    return found


@pytest.mark.parametrize(
    "optimizer",
    [
        trained(torch.optim.AdamW, lr=0.1),
        trained(torch.optim.SGD, lr=0.1),
        trained(torch.optim.SGD, lr=0.1, momentum=0.9),
    ],
    ids=["adamw", "sgd", "momentum"],
)
def test_optimizer_state_roundtrips(tmp_path: Path, optimizer: torch.optim.Optimizer) -> None:
    """DCP has text for its numbers, and nothing for the empty state of plain SGD."""
    state: dict[str, Any] = {"all": [optimizer.state_dict()], "other": {"1": 2}}
    ckptctl.save(state, tmp_path / "ours", sync=False)
    save_dcp(tmp_path / "stock", state)
    for folder in ("ours", "stock"):
        found = restore_optimizer_param_keys(load_full_state_dict(tmp_path / folder))
        assert found["other"] == {"1": 2}
        (own,) = found["all"]
        assert list(own["state"]) == list(state["all"][0]["state"])
        assert own["param_groups"] == optimizer.state_dict()["param_groups"]
        assert not differences(flatten(own["state"]), flatten(optimizer.state_dict()["state"]))


def test_model_is_read_in_another_layout(tmp_path: Path) -> None:
    state, config = tiny_llama("llama3")
    save_hf(tmp_path / "hf", state, config)
    found = load_full_model(tmp_path / "hf", "meta", "llama3")
    ckptctl.convert(tmp_path / "hf", tmp_path / "meta", to="meta")
    assert not differences(found, torch.load(tmp_path / "meta" / "consolidated.00.pth"))


def test_sidecar_files_are_saved_with_linked_data(tmp_path: Path) -> None:
    save_with_sidecar_files(STATE, tmp_path / "a", {"notes.txt": b"1"})
    assert not differences(load_any_reference(tmp_path / "a"), flatten(STATE))
    assert (tmp_path / "a" / "notes.txt").read_bytes() == b"1"
    save_with_sidecar_files(STATE, tmp_path / "b", {"notes.txt": b"2"}, like=tmp_path / "a")
    assert (tmp_path / "b" / "__0_0.distcp").samefile(tmp_path / "a" / "__0_0.distcp")
    assert (tmp_path / "a" / "notes.txt").read_bytes() == b"1"
    assert (tmp_path / "b" / "notes.txt").read_bytes() == b"2"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a", "b"]


def test_unlinkable_data_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_sidecar_files(STATE, tmp_path / "a", {"notes.txt": b"1"})
    real = os.link
    done: list[Path] = []

    def link(source: Path, target: Path) -> None:
        if done:
            raise OSError(1, "no second name")
        real(source, target)
        done.append(target)

    monkeypatch.setattr(os, "link", link)
    save_with_sidecar_files(STATE, tmp_path / "b", {"notes.txt": b"2"}, like=tmp_path / "a")
    save_with_sidecar_files(STATE, tmp_path / "c", {"notes.txt": b"3"}, like=tmp_path / "gone")
    for name in ("b", "c"):
        assert ckptctl.verify(tmp_path / name).verdict == "complete"
        assert not (tmp_path / name / ".metadata").samefile(tmp_path / "a" / ".metadata")


def test_checkpoint_is_replaced_but_other_folder_is_refused(tmp_path: Path) -> None:
    save_with_sidecar_files(STATE, tmp_path / "a", {"meta.pt": b"1"})
    save_with_sidecar_files({"model": {"w": torch.zeros(2)}}, tmp_path / "a", {"meta.pt": b"2"})
    assert (tmp_path / "a" / "meta.pt").read_bytes() == b"2"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("...")
    with pytest.raises(RefusedError):
        save_with_sidecar_files(STATE, tmp_path / "mine", {})
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a", "mine"]


def test_fingerprint_depends_only_on_tensor_bytes() -> None:
    before = compute_shard_checksums(STATE)
    assert before == compute_shard_checksums(
        {"model": {"w": STATE["model"]["w"].clone()}, "step": 4}
    )
    changed = STATE["model"]["w"].clone()
    changed[3, 2] += 1
    assert before != compute_shard_checksums({"model": {"w": changed}})
    assert before != compute_shard_checksums({"model": {"w": STATE["model"]["w"].t().contiguous()}})


def test_docs_page_imports_existing_integrations() -> None:
    """Its blocks need trainers, so that the tests of the documentation cannot run them."""
    page = (REPOSITORY / "docs" / "how-to" / "trainer-integrations.md").read_text()
    imported = set()
    for block in re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and "ckptctl" in node.module:
                imported |= {(node.module, name.name) for name in node.names}
    assert len(imported) >= 5
    for module, name in imported:
        path = REPOSITORY / (module.replace(".", "/") + ".py")
        defined = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)]
        assert name in defined, (module, name)


@pytest.mark.slow
def test_importing_ckptctl_imports_no_trainer() -> None:
    asked = "import sys, ckptctl, ckptctl.distributed.run.manager; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    trainers = {"lightning", "torchtitan", "torchtune", "transformers", "ckptctl.integrations"}
    assert not trainers & set(done.stdout.split())
