"""What is odd is not damaged: complete files of stock writers that hold what is rarely seen."""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import pickle
import re
import shutil
import time
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from typer.testing import CliRunner

import ckptctl
from ckptctl.cli.app import app
from ckptctl.errors import DamagedError, RefusedError, UnsupportedError
from ckptctl.runs.health import check_health
from ckptctl.verdict import STRUCTURE_COMPLETE, UNKNOWN_MODEL
from tests.checkpoints import save_dcp
from tests.contract.samples import SAMPLES
from tests.sweeps import one_in

Make = Callable[[], Any]
WEIGHT = torch.arange(24.0).reshape(6, 4)
COMPLEX = torch.complex(torch.arange(15.0).reshape(3, 5), torch.ones(3, 5))

VIEWS: dict[str, Make] = {
    "expanded scalar": lambda: torch.ones(1, 1).expand(4, 4),
    "expanded rows": lambda: torch.arange(5.0).expand(3, 5),
    "expanded columns": lambda: torch.arange(5.0)[:, None].expand(5, 7),
    "expanded, larger than a tile": lambda: torch.arange(9.0)[:, None].expand(9, 300_000),
    "expanded parameter": lambda: torch.nn.Parameter(torch.ones(1, 1).expand(4, 4)),
    "transposed": lambda: WEIGHT.t(),
    "every other row": lambda: WEIGHT[::2],
    "every other element": lambda: WEIGHT[::2, 1::2],
    "overlapping rows": lambda: torch.arange(10.0).as_strided((4, 4), (2, 1)),
    "conjugate": COMPLEX.conj,
    "conjugate, transposed": lambda: COMPLEX.conj().t(),
    "negative": lambda: COMPLEX.conj().imag,
}
UNREAD: dict[str, Make] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3, 3), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.ones(3, 3, device="meta"),
    "unknown dtype": lambda: torch.empty(3, dtype=torch.bits8),
    "excessively expanded": lambda: torch.ones(1).expand(1 << 60),
}
OBJECTS: dict[str, Make] = {
    "deque": lambda: collections.deque([torch.ones(2)]),
    "Namespace": lambda: argparse.Namespace(x=torch.ones(2)),
    "SimpleNamespace": lambda: types.SimpleNamespace(x=torch.ones(2)),
    "tuple keys": lambda: {(i, j): torch.ones(1) for i in range(3) for j in range(3)},
}


def lightning(odd: object) -> dict[str, Any]:
    """Return what a Lightning checkpoint holds, with one thing that is odd."""
    model = {"net.weight": WEIGHT, "net.odd": odd}
    loops = {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 1}}}}
    return {"epoch": 1, "global_step": 10, "state_dict": model, "loops": loops}


def saved(folder: Path, odd: object) -> Path:
    torch.save(lightning(odd), folder / "step=10.ckpt")
    return folder / "step=10.ckpt"


def model_in(path: Path) -> dict[str, Any]:
    found = torch.load(path, weights_only=False)["state_dict"]
    assert isinstance(found, dict)
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("case", one_in(4, VIEWS))
def test_unusual_view_converts_with_same_values(tmp_path: Path, case: str) -> None:
    source = saved(tmp_path, VIEWS[case]())
    expected = model_in(source)["net.odd"].detach()
    assert ckptctl.verify(source, level="full").verdict == "complete"
    assert ckptctl.inspect(source).verdict == "complete"
    ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all")
    assert torch.equal(model_in(tmp_path / "out.pt")["net.odd"], expected)
    ckptctl.convert(source, tmp_path / "dcp", to="dcp", only="all")
    odd = torch.zeros(expected.shape, dtype=expected.dtype)
    stock_load({"state_dict": {"net.odd": odd}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(odd, expected)
    assert ckptctl.diff(source, tmp_path / "dcp").same


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", one_in(3, UNREAD))
def test_unreadable_tensor_makes_only_itself_unknown(tmp_path: Path, case: str) -> None:
    source = saved(tmp_path, UNREAD[case]())
    found = ckptctl.verify(source, level="full", nan=True)
    assert found.verdict == "unknown"
    assert [one.tensor for one in found.findings] == ["state_dict.net.odd"]
    said = ckptctl.inspect(source, stats=True)
    assert [t.name for t in said.tensors if t.unsupported] == ["state_dict.net.odd"]
    assert said.verdict == "unknown" and not said.problems
    for notes in (found.notes, said.notes):
        assert UNKNOWN_MODEL.removeprefix(STRUCTURE_COMPLETE) in notes
    assert any("net.odd" in note for note in said.notes)
    with pytest.raises(UnsupportedError, match="cannot be read") as caught:
        ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all")
    assert caught.value.exit_code == 9 and "--exclude" in str(caught.value.hint)
    assert not (tmp_path / "out.pt").exists()
    ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all", exclude=["*odd*"])
    kept = model_in(tmp_path / "out.pt")
    assert kept.keys() == {"net.weight"} and torch.equal(kept["net.weight"], WEIGHT)
    ckptctl.extract(source, "*net.weight", output=tmp_path / "one.safetensors")
    with pytest.raises(UnsupportedError, match="cannot be read"):
        ckptctl.extract(source, "*net.odd", output=tmp_path / "two.safetensors")
    state = {"net.weight": torch.zeros(6, 4)}
    ckptctl.load(state, source, root="state_dict", strict=False)
    assert torch.equal(state["net.weight"], WEIGHT)
    with pytest.raises(UnsupportedError, match="cannot be read"):
        ckptctl.diff(source, source)


@pytest.mark.parametrize("case", OBJECTS)
def test_tensor_inside_object_is_refused_unless_excluded(tmp_path: Path, case: str) -> None:
    source = saved(tmp_path, OBJECTS[case]())
    assert ckptctl.verify(source, level="full").verdict == "complete"
    assert any("net.odd" in note for note in ckptctl.inspect(source).notes)
    with pytest.raises(RefusedError, match="inside of objects"):
        ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all")
    ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all", exclude=["*odd*"])
    assert model_in(tmp_path / "out.pt").keys() == {"net.weight"}


def test_many_tuple_keys_are_preserved(tmp_path: Path) -> None:
    many = {(layer, -part): layer for layer in range(10_000) for part in range(3)}
    source = saved(tmp_path, many)
    assert ckptctl.verify(source, level="full").verdict == "complete"
    ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all")
    assert model_in(tmp_path / "out.pt")["net.odd"] == many


def test_key_that_prefixes_another_key_is_preserved(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.ones(2), "a.b": torch.zeros(3), "c": {"d": torch.ones(1)}}
    torch.save(state, tmp_path / "a.pt")
    assert ckptctl.verify(tmp_path / "a.pt").verdict == "complete"
    ckptctl.convert(tmp_path / "a.pt", tmp_path / "out.pt", to="torch", only="all")
    found = torch.load(tmp_path / "out.pt")
    assert found.keys() == state.keys()
    assert torch.equal(found["a"], state["a"]) and torch.equal(found["a.b"], state["a.b"])


def test_second_leaf_with_same_name_is_unsupported_unless_excluded(tmp_path: Path) -> None:
    torch.save({"a": {"b": torch.ones(2)}, "a.b": torch.zeros(3)}, tmp_path / "a.pt")
    found = ckptctl.verify(tmp_path / "a.pt")
    assert found.verdict == "unknown"
    assert [one.tensor for one in found.findings] == ["a.b (2)"]
    with pytest.raises(UnsupportedError, match="cannot be read"):
        ckptctl.convert(tmp_path / "a.pt", tmp_path / "out.pt", to="torch", only="all")
    ckptctl.convert(
        tmp_path / "a.pt", tmp_path / "out.pt", to="torch", only="all", exclude=["a.b (2)"]
    )
    assert torch.equal(torch.load(tmp_path / "out.pt")["a"]["b"], torch.ones(2))


def test_unindexed_tensor_is_read_and_noted(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "model-1.safetensors")
    index = {"metadata": {"total_size": 8}, "weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ckptctl.verify(tmp_path, level="full").verdict == "complete"
    said = ckptctl.inspect(tmp_path)
    assert [t.name for t in said.tensors] == ["a", "b"] and said.verdict == "complete"
    assert any("does not list" in note and "`b`" in note for note in said.notes)


@pytest.mark.parametrize("case", ["expanded rows", "transposed", "every other element"])
def test_dcp_views_convert_with_same_values(tmp_path: Path, case: str) -> None:
    view = VIEWS[case]()
    source = save_dcp(tmp_path / "dcp", {"model": {"w": WEIGHT, "odd": view}})
    assert ckptctl.verify(source, level="full").verdict == "complete"
    ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all")
    assert torch.equal(torch.load(tmp_path / "out.pt")["model"]["odd"], view)


def test_dcp_tensor_of_unknown_dtype_makes_only_itself_unknown(tmp_path: Path) -> None:
    """Stock DCP saves no such tensor yet: the metadata is changed as a later one would write it."""
    odd = torch.zeros(3, dtype=torch.uint8)
    source = save_dcp(tmp_path / "dcp", {"model": {"w": WEIGHT, "odd": odd}})
    metadata = pickle.loads((source / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.odd"].properties.dtype = torch.bits8
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    found = ckptctl.verify(source, level="full")
    assert found.verdict == "unknown"
    assert {one.tensor for one in found.findings} == {"model.odd"}
    assert [t.name for t in ckptctl.inspect(source).tensors if t.unsupported] == ["model.odd"]
    ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all", exclude=["*odd"])
    assert torch.equal(torch.load(tmp_path / "out.pt")["model"]["w"], WEIGHT)


def test_dcp_conjugate_view_makes_only_itself_unknown(tmp_path: Path) -> None:
    """Stock DCP writes a lazily conjugate tensor with its flag."""
    state = {"model": {"w": WEIGHT, "odd": COMPLEX.conj()}}
    source = save_dcp(tmp_path / "dcp", state)
    found = ckptctl.verify(source, level="full")
    assert found.verdict == "unknown"
    assert [one.tensor for one in found.findings] == ["model.odd"]
    said = {t.name: t.statistics for t in ckptctl.inspect(source, stats=True).tensors}
    assert said["model.odd"] is None and said["model.w"] is not None
    for call in (
        lambda: ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all"),
        lambda: ckptctl.diff(source, source),
        lambda: ckptctl.load({"model": {"odd": torch.zeros_like(COMPLEX)}}, source, strict=False),
    ):
        with pytest.raises(UnsupportedError, match=r"`model\.odd` cannot be read") as caught:
            call()
        assert "--exclude model.odd" in str(caught.value.hint)
    ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all", exclude=["*odd"])
    assert torch.equal(torch.load(tmp_path / "out.pt")["model"]["w"], WEIGHT)


HOLLOW = {
    "verl_dtensor/verl2": "model_world_size_2_rank_1.pt",
    "accelerate_fsdp2/nodcp": "pytorch_model_fsdp_0_rank1.bin",
    "torch_experimental/w2": "checkpoint_1.pt",
    "torch_checkpointing/two_rank": "model_1.pt",
}


@pytest.mark.parametrize("name", one_in(3, HOLLOW))
@pytest.mark.parametrize("root", [None, [1, 2]], ids=["nothing", "a list"])
def test_missing_elements_in_present_files_are_not_interrupted_writes(
    tmp_path: Path, data: Path, name: str, root: object
) -> None:
    """A rank's file is there, readable, and holds something else; without the file it is torn."""
    sample = SAMPLES[name]
    shutil.copytree(data / sample.folder / "ckpt", tmp_path / "run/step-2")
    source = sample.within(tmp_path / "run/step-2")
    (source / "metadata.pkl").unlink(missing_ok=True)
    torch.save(root, source / HOLLOW[name])
    found = ckptctl.verify(source)
    assert (found.verdict, found.exit_code) == ("damaged", 4)
    assert {(one.what, one.basis) for one in found.errors} == {("elements are missing", "index")}
    judged = check_health(source)
    assert (judged.verdict, judged.torn) == ("damaged", False)
    assert ckptctl.inspect(source).verdict == "damaged"
    with pytest.raises(DamagedError):
        ckptctl.convert(source, tmp_path / "out", to="dcp", only="all")
    (source / HOLLOW[name]).unlink()
    assert check_health(source).torn


ZEROS = ("step=1.ckpt", "a.pt", "a.pth", "a.bin", "a.safetensors", "consolidated.00.pth")


@pytest.mark.parametrize("name", ZEROS)
@pytest.mark.parametrize("size", [4, 1000, 300_000])
def test_zero_filled_file_is_damaged_by_interrupted_write(
    tmp_path: Path, name: str, size: int
) -> None:
    """A crash leaves it where room was made."""
    path = tmp_path / name
    path.write_bytes(bytes(size))
    assert ckptctl.verify(path).verdict == "damaged"
    assert check_health(path).torn
    with pytest.raises(DamagedError):
        ckptctl.convert(path, tmp_path / "out", to="dcp")
    path.write_bytes(bytes(size - 1) + b"x")
    if path.suffix in (".ckpt", ".pt"):
        assert check_health(path).verdict == "unknown"


def test_latest_and_prune_skip_zero_filled_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        torch.save(lightning(WEIGHT), tmp_path / f"epoch=0-step={step}.ckpt")
    zeros = tmp_path / "epoch=0-step=3.ckpt"
    zeros.write_bytes(bytes(200_000))
    os.utime(zeros, (time.time() + 1 - 3600, time.time() + 1 - 3600))
    for step in (1, 2):
        os.utime(tmp_path / f"epoch=0-step={step}.ckpt", (time.time() - 7200,) * 2)
    found = CliRunner().invoke(app, ["latest", str(tmp_path)])
    assert (found.exit_code, Path(found.stdout.strip()).name) == (0, "epoch=0-step=2.ckpt")
    words = ["prune", str(tmp_path), "--keep-last", "2", "--include-incomplete", "--yes"]
    words += ["--min-age", "10m"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert not zeros.exists() and len(list(tmp_path.glob("*.ckpt"))) == 2


LINKED = [name for name, sample in SAMPLES.items() if not sample.refused]


@pytest.mark.parametrize("name", one_in(4, LINKED))
def test_unfollowed_symlink_is_no_missing_file(tmp_path: Path, data: Path, name: str) -> None:
    """One that leads to itself or out of it; one that leads to nothing inside is a missing file."""
    sample = SAMPLES[name]
    shutil.copytree(data / sample.folder / "ckpt", tmp_path / "ckpt")
    source = sample.within(tmp_path / "ckpt")
    if check_health(source).verdict != "complete" or not source.is_dir():
        return
    files = [one for one in sorted(source.rglob("*")) if one.is_file()]
    kinds = {re.sub(r"\d+", "#", one.name): one for one in files if one.suffix != ".json"}
    for file in (one for one in kinds.values() if one.name != ".metadata"):
        content = file.read_bytes()
        verdicts = []
        for target in (file.name, "/nowhere/at/all", "nowhere"):
            file.unlink()
            file.symlink_to(target)
            verdicts.append(check_health(source).verdict)
        file.unlink()
        gone = check_health(source).verdict
        assert "damaged" not in verdicts[:2], (file.name, verdicts)
        assert verdicts[2] in (gone, "damaged"), (file.name, verdicts, gone)
        file.write_bytes(content)


def rewritten(content: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A file of ``torch.save`` with another pickle, as stock torch writes it."""
    with zipfile.ZipFile(io.BytesIO(content)) as held:
        records = {name.partition("/")[2]: held.read(name) for name in held.namelist()}
    made = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(made)
    for name, data in records.items():
        if name not in ("version", ".data/serialization_id"):
            data = change(data) if name == "data.pkl" else data
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return made.getvalue()


SET_AS_KEY = b"}cbuiltins\nfrozenset\n]\x85R"
OF_LATER: tuple[Callable[[bytes], bytes], ...] = (
    lambda data: data.replace(b"collections\nOrderedDict\n", b"collections\nLaterDict00\n"),
    lambda data: data.replace(b"FloatStorage\n", b"LaterStorage\n"),
    lambda data: data.replace(b"_rebuild_tensor_v2\n", b"_rebuild_tensor_v9\n"),
    lambda data: data[:2] + SET_AS_KEY + data[2:-1] + b"s.",
)


@pytest.mark.parametrize("name", one_in(9, SAMPLES))
def test_unknown_content_of_newer_writers_is_not_damage(
    tmp_path: Path, data: Path, name: str
) -> None:
    """Files that are complete, but in which something is not known."""
    sample = SAMPLES[name]
    shutil.copytree(data / sample.folder / "ckpt", tmp_path / "ckpt", symlinks=True)
    source = sample.within(tmp_path / "ckpt")
    if check_health(source).verdict == "damaged":
        return
    files = [one for one in (source, *sorted(source.rglob("*"))) if one.is_file()]
    named = {re.sub(r"\d+", "#", one.name): one for one in reversed(files)}
    kinds = {key: one for key, one in named.items() if one.suffix != ".distcp"}
    for file in kinds.values():
        content = file.read_bytes()
        if content[:2] == b"PK":
            changed = [rewritten(content, change) for change in OF_LATER]
        elif file.suffix == ".json":
            known = json.loads(content)
            changed = [json.dumps({**known, key: None}).encode() for key in known]
        else:
            continue
        for new in changed:
            file.write_bytes(new)
            assert check_health(source).verdict != "damaged", (
                file.name,
                check_health(source).problem,
            )
        file.write_bytes(content)
