"""What the options of ``convert`` promise, held against other people's implementations."""

from __future__ import annotations

import json
import shutil
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open

import ckptctl
from ckptctl import formats
from ckptctl.planner import balance
from ckptctl.storage.execution.worker import Worker
from tests.checkpoints import (
    differences,
    load_any_reference,
    save_hf,
    save_meta,
    save_torch,
    tiny_llama,
)
from tests.contract.support import (
    WRITABLE,
    build,
    message,
    place,
    read,
    refused,
    single_file,
    snapshot,
)
from tests.sweeps import one_in

STATE, CONFIG = tiny_llama("llama3")
BLOCKS = [n for n in WRITABLE if not single_file(n)]
LIKE = [n for n in WRITABLE if "--like" in formats.get_writable_format(n).sharding_options]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("hf", tmp_path_factory.mktemp("source"), STATE, CONFIG)


# ------------------------------------------------------------------------------------- selection


def test_include_and_exclude_select_tensors(tmp_path: Path, source: Path) -> None:
    done = ckptctl.convert(
        source,
        tmp_path / "out",
        to="dcp",
        include=["*.mlp.*", "model.norm.weight"],
        exclude=["*.1.*"],
    )
    expected = {
        name: value
        for name, value in STATE.items()
        if ".0.mlp." in name or name == "model.norm.weight"
    }
    assert not differences(load_any_reference(tmp_path / "out"), expected)
    assert set(done.plan.left_out) == STATE.keys() - expected.keys()


def test_included_tensors_are_converted_to_new_layout(tmp_path: Path, source: Path) -> None:
    from tests.checkpoints import rename, to_meta_names

    chosen = [name for name in STATE if ".1.self_attn." in name]
    ckptctl.convert(
        source, tmp_path / "o.pt", to="torch", to_layout="torchtune", include=["*.1.self_attn.*"]
    )
    whole = rename(to_meta_names(STATE, CONFIG), "meta", "torchtune")
    new = dict(zip(STATE, rename(STATE, "hf", "torchtune"), strict=True))
    expected = {new[name]: whole[new[name]] for name in chosen}
    assert not differences(load_any_reference(tmp_path / "o.pt"), expected)


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_pattern_matching_nothing_is_refused(tmp_path: Path, source: Path, option: Any) -> None:
    with refused(source, tmp_path / "out", 5) as caught:
        options: dict[str, Any] = {option: ["*.norm.wieght"]}
        ckptctl.convert(source, tmp_path / "out", to="dcp", **options)
    assert "*.norm.wieght" in message(caught.value)


# ----------------------------------------------------------------------------------------- dtype


@pytest.mark.parametrize("target", WRITABLE)
def test_dtype_option_casts_tensors_and_updates_config(
    tmp_path: Path, source: Path, target: str
) -> None:
    out = place(tmp_path, target)
    ckptctl.convert(source, out, to=target, dtype="fp32", verify=True)
    expected = {name: value.float() for name, value in STATE.items()}
    assert not differences(read(out, CONFIG), expected)
    if target == "hf":
        written = json.loads((out / "config.json").read_text())
        assert written == CONFIG | {"torch_dtype": "float32"}


def test_integers_are_not_cast(tmp_path: Path) -> None:
    state = {"w": torch.randn(3), "n": torch.arange(3), "mask": torch.tensor([True])}
    state["c"] = torch.tensor([1j])
    source = save_torch(tmp_path / "in.pt", state)
    ckptctl.convert(source, tmp_path / "out", to="dcp", dtype="float16")
    expected = state | {"w": state["w"].half()}
    assert not differences(load_any_reference(tmp_path / "out"), expected)


# ---------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("size", ["1KB", "20KB", "33KB", "100KB", "1GB"])
def test_hf_shards_match_huggingface_hub_split(tmp_path: Path, source: Path, size: str) -> None:
    out = tmp_path / "out"
    ckptctl.convert(source, out, to="hf", max_shard_size=size)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    ordered = {name: STATE[name] for name in index["weight_map"]}
    theirs = split_torch_state_dict_into_shards(
        ordered, max_shard_size=size, filename_pattern="model{suffix}.safetensors"
    )
    ours: dict[str, list[str]] = {}
    for file in sorted(out.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            ours[file.name] = sorted(opened.keys())
            assert opened.metadata() == {"format": "pt"}
    assert ours == {file: sorted(names) for file, names in theirs.filename_to_tensors.items()}
    if theirs.is_sharded:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == theirs.tensor_to_filename
        assert index["metadata"]["total_size"] == theirs.metadata["total_size"]
    assert not differences(load_any_reference(out), STATE)


def test_dcp_files_respect_max_shard_size(tmp_path: Path, source: Path) -> None:
    ckptctl.convert(source, tmp_path / "out", to="dcp", max_shard_size="50KB")
    files = sorted((tmp_path / "out").glob("*.distcp"))
    assert len(files) > 4
    largest = max(value.nbytes for value in STATE.values())
    assert all(file.stat().st_size < max(50_000, largest) * 1.5 for file in files)
    assert not differences(load_any_reference(tmp_path / "out"), STATE)


@pytest.mark.parametrize("target", LIKE)
def test_like_copies_file_layout_of_reference(tmp_path: Path, source: Path, target: str) -> None:
    """The reference has other values, and its own way of putting keys into files."""
    other = {name: value + 1 for name, value in reversed(STATE.items())}
    if target == "meta":
        reference = save_meta(tmp_path / "reference", other, CONFIG, mp=2)
    elif target == "hf":
        reference = save_hf(tmp_path / "reference", other, CONFIG, shards=4)
    else:
        reference = build(target, tmp_path, other, CONFIG)
    out = tmp_path / "out"
    ckptctl.convert(source, out, to=target, like=reference)
    assert not differences(read(out, CONFIG), STATE)
    theirs, ours = (
        {key: extents(tensor) for key, tensor in _catalog(path).items()}
        for path in (reference, out)
    )
    if target == "dcp":  # the files' names belong to ranks; what lies together does
        assert _groups(theirs) == _groups(ours)
    else:
        assert theirs == ours


def _catalog(path: Path) -> Any:
    return formats.open_checkpoint(path).tensors


def extents(tensor: Any) -> list[str]:
    return sorted({extent.file for extent in tensor.extents})


def _groups(files: dict[str, list[str]]) -> set[frozenset[str]]:
    by_file: dict[str, set[str]] = {}
    for key, (file,) in files.items():
        by_file.setdefault(file, set()).add(key)
    return {frozenset(keys) for keys in by_file.values()}


def test_like_with_different_keys_is_refused(tmp_path: Path, source: Path) -> None:
    other = {name: value for name, value in STATE.items() if name != "lm_head.weight"}
    reference = save_hf(tmp_path / "reference", other, CONFIG, shards=2)
    with refused(source, tmp_path / "out", 5) as caught:
        ckptctl.convert(source, tmp_path / "out", to="hf", like=reference)
    assert "lm_head.weight" in message(caught.value)


def test_mp_that_does_not_divide_heads_is_refused(tmp_path: Path, source: Path) -> None:
    with refused(source, tmp_path / "out", 5, 6) as caught:
        ckptctl.convert(source, tmp_path / "out", to="meta", mp=3)
    assert "3" in message(caught.value)


CONTRADICTIONS: list[dict[str, Any]] = [
    {"to": "hf", "mp": 2},
    {"to": "torch", "max_shard_size": "1GB"},
    {"to": "hf", "only": "all"},
    {"to": "hf", "verify": True, "checksum": False},
    {"to": "meta", "to_layout": "torchtune"},
    {"to": "hf", "dtype": "int8"},
    {"to": "hf", "max_shard_size": "nine"},
    {"to": "hf", "jobs": 0},
    {"to": "hf", "model_type": "lama3"},
    {"to": "dcp", "to_layout": "torchtun"},
    {"to": "dcp", "from_layout": "mteta"},
    {"to": "dcp", "from_layout": "meta"},
    {"to": "meta", "from_layout": "torchtune"},
    {"to": "zip"},
    {"to": "hf", "from_format": "dpc"},
]


@pytest.mark.parametrize("options", CONTRADICTIONS, ids=str)
def test_invalid_or_conflicting_options_are_refused(
    tmp_path: Path, source: Path, options: Any
) -> None:
    with refused(source, tmp_path / "out", 2, 5):
        ckptctl.convert(source, tmp_path / "out", **options)


# ----------------------------------------------------------------------------------- side files


@pytest.mark.parametrize("target", BLOCKS)
def test_assets_copy_config_and_tokenizer_but_no_weights(tmp_path: Path, target: str) -> None:
    weights = save_torch(tmp_path / "weights.pt", STATE)
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text(json.dumps(CONFIG))
    (assets / "tokenizer.json").write_bytes(b"{}")
    (assets / "pytorch_model.bin").write_bytes(b"not carried")
    ckptctl.convert(weights, tmp_path / "out", to=target, assets=assets)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    with refused(weights, tmp_path / "none", 3):
        ckptctl.convert(weights, tmp_path / "none", to=target, assets=tmp_path / "nowhere")


# ----------------------------------------------------------------------------- checksums, verify


@pytest.mark.parametrize("target", WRITABLE)
def test_no_checksum_writes_readable_output_without_crcs(
    tmp_path: Path, source: Path, target: str
) -> None:
    """CRC 0 is what torch itself writes when told to compute none."""
    out = place(tmp_path, target)
    ckptctl.convert(source, out, to=target, checksum=False)
    assert not differences(read(out, CONFIG), STATE)
    assert not list(tmp_path.rglob("ckptctl.manifest.json"))
    back = tmp_path / "back"
    assets = source if out.is_file() else None
    ckptctl.convert(out, back, to="hf", assets=assets)
    assert not differences(load_any_reference(back), STATE)
    for file in [out] if out.is_file() else out.glob("*.pth"):
        with zipfile.ZipFile(file) as archive:
            data = [info for info in archive.infolist() if "/data/" in info.filename]
            assert {info.CRC for info in data} == {0}
            assert len(data) > 10


@pytest.mark.parametrize("target", ["torch", "meta"])
def test_zip_crcs_of_output_are_correct(tmp_path: Path, source: Path, target: str) -> None:
    out = place(tmp_path, target)
    ckptctl.convert(source, out, to=target)
    for file in [out] if out.is_file() else out.glob("*.pth"):
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None


@pytest.mark.parametrize("target", WRITABLE)
def test_convert_verify_detects_corruption_before_publish(
    tmp_path: Path, source: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptctl.errors import StorageError
    from ckptctl.storage.publish import Staging

    real = Staging.publish
    needle = STATE["model.norm.weight"].view(torch.uint8).numpy().tobytes()

    def publish(staging: Staging) -> Any:
        for file in staging.data.rglob("*"):
            content = bytearray(file.read_bytes())
            if needle in content:
                content[content.index(needle) + 3] ^= 16
                file.write_bytes(content)
        return real(staging)

    monkeypatch.setattr(Staging, "publish", publish)
    with pytest.raises(StorageError) as caught:
        ckptctl.convert(source, place(tmp_path, target), to=target, verify=True)
    assert "norm.weight" in message(caught.value)


# ------------------------------------------------------------------------------ overwrite, resume


@pytest.mark.parametrize("before", WRITABLE)
def test_overwrite_replaces_checkpoints(tmp_path: Path, source: Path, before: str) -> None:
    out = tmp_path / "out"
    ckptctl.convert(source, out, to=before)
    with refused(source, out, 6) as caught:
        ckptctl.convert(source, out, to="hf")
    assert "overwrite=True" in message(caught.value)
    ckptctl.convert(source, out, to="hf", overwrite=True)
    assert not differences(load_any_reference(out), STATE)
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_overwrite_refuses_paths_that_are_not_checkpoints(tmp_path: Path, source: Path) -> None:
    for name, make in (
        ("thesis", lambda path: (path.mkdir(), (path / "chapter.tex").write_text("x"))),
        ("file.txt", lambda path: path.write_text("x")),
    ):
        make(tmp_path / name)
        with refused(source, tmp_path / name, 6) as caught:
            ckptctl.convert(source, tmp_path / name, to="hf", overwrite=True)
        assert "not a checkpoint" in message(caught.value)


def test_failed_overwrite_keeps_old_checkpoint(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    ckptctl.convert(source, out, to="dcp")
    before = snapshot(tmp_path)
    monkeypatch.setattr(Worker, "execute_unit", _fail)
    with pytest.raises(RuntimeError, match="killed"):
        ckptctl.convert(source, out, to="hf", overwrite=True)
    assert snapshot(tmp_path) == before


def _fail(_first: object, _second: object) -> Any:
    raise RuntimeError("killed")


@pytest.mark.parametrize("target", one_in(3, WRITABLE))
@pytest.mark.parametrize("moment", ["copying", "publishing"])
def test_resume_after_failure_writes_same_output(
    tmp_path: Path, source: Path, target: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the journal of a failed run names is not written again; the result is the same."""
    from ckptctl.storage.execution.execution_options import ExecutionOptions
    from ckptctl.storage.publish import Staging

    often = partial(ExecutionOptions, journal_every=4096)
    monkeypatch.setattr("ckptctl.storage.execution.execution_options.ExecutionOptions", often)
    out, plain = place(tmp_path, target), place(tmp_path / "plain", target)
    ckptctl.convert(source, plain, to=target, jobs=1)
    real, count = Worker.execute_unit, 0

    def do(worker: Worker, unit: Any) -> Any:
        nonlocal count
        count += 1
        return _fail(worker, unit) if count > 9 else real(worker, unit)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="killed"):
        if moment == "copying":
            patched.setattr(Worker, "execute_unit", do)
        else:
            patched.setattr(Staging, "publish", lambda staging: _fail(staging, None))
        ckptctl.convert(source, out, to=target, jobs=1, resume=True)
    assert not out.exists()
    done = ckptctl.convert(source, out, to=target, jobs=1, resume=True, verify=True)
    if moment == "publishing":
        assert done.resumed_bytes >= sum(value.nbytes for value in STATE.values())
    assert snapshot(out) == snapshot(plain)
    assert {item.name for item in tmp_path.iterdir()} == {"plain", out.name}


def test_resume_with_changed_source_writes_new_values(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    shutil.copytree(source, other)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="killed"):
        patched.setattr(Worker, "execute_unit", _fail)
        ckptctl.convert(other, tmp_path / "out", to="dcp", resume=True)
    shutil.rmtree(other)
    changed = {name: value + 1 for name, value in STATE.items()}
    save_hf(other, changed, CONFIG, shards=3)
    ckptctl.convert(other, tmp_path / "out", to="dcp", resume=True)
    assert not differences(load_any_reference(tmp_path / "out"), changed)


def test_default_file_count_depends_on_source_and_format(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file of tensors for a small model, unless the source has several or the format always."""
    monkeypatch.setattr(balance, "MIN_SHARD_BYTES", 1)
    several = data / "tiny-llama3-hf"
    ckptctl.convert(several, tmp_path / "one", to="hf", max_shard_size="5GB")

    def files(source: Path, to: str, **options: Any) -> int:
        plan = ckptctl.plan_conversion(source, tmp_path / "x", to=to, **options)
        return sum(path.endswith((".safetensors", ".distcp")) for path, _ in plan.files)

    assert files(tmp_path / "one", "hf") == 1
    assert files(several, "hf") > 8
    assert files(tmp_path / "one", "dcp") > 8
    assert files(several, "hf", max_shard_size="5GB") == 1
