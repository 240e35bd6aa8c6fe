"""Parts of checkpoints, references that cannot be copied, and files that only look alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl import formats
from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.conversion.laying_out import open_sharding_reference
from ckptctl.errors import CkptError, DamagedError, FormatError, UnsupportedError, UsageError
from ckptctl.formats import sidecar_files
from ckptctl.formats.base import OutputRequest, OutputTensor
from ckptctl.formats.dcp import metadata as dcp_metadata
from ckptctl.formats.shared import stored_leaves
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.zips.zip_reader import StoredTensor, TorchArchive
from tests.checkpoints import (
    differences,
    load_any_reference,
    save_bin,
    save_dcp,
    save_hf,
    save_meta,
    save_torch,
    tiny_llama,
)
from tests.contract.damaged import CONFIG, STATE
from tests.contract.support import message

# ------------------------------------------------------------------------------- parts of a set


@pytest.mark.parametrize("case", ["alone", "two", "named", "named-bin"])
def test_shard_without_index_is_damaged(tmp_path: Path, case: str) -> None:
    save = save_bin if case == "named-bin" else save_hf
    source = save(tmp_path / "in", STATE, CONFIG, shards=3)
    shards = sorted(file for file in source.iterdir() if "-of-" in file.name)
    path = shards[0] if "named" in case else source
    if "named" not in case:
        next(source.glob("*.index.json")).unlink()
        for shard in shards[1:] if case == "alone" else shards[2:]:
            shard.unlink()
    with pytest.raises(DamagedError) as caught:
        formats.open_checkpoint(path)
    assert shards[2].name in message(caught.value)
    assert "index" in str(caught.value.hint)


def test_zero_based_shard_names_open_through_index(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "in", STATE, CONFIG, shards=3)
    index = next(source.glob("*.index.json"))
    text = index.read_text()
    for number in (1, 2, 3):
        new = f"model-{number - 1:05d}-of-00002.safetensors"
        (source / f"model-{number:05d}-of-00003.safetensors").rename(source / new)
        text = text.replace(f"model-{number:05d}-of-00003.safetensors", new)
    index.write_text(text)
    assert formats.open_checkpoint(source).tensors.keys() == STATE.keys()


def test_missing_indexed_shard_is_damaged(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "in", STATE, CONFIG, shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(DamagedError, match="1 of 3") as caught:
        formats.open_checkpoint(source)
    assert "model-00002-of-00003" in message(caught.value)


# ------------------------------------------------------------------------------------- references


def test_like_bin_reference_writes_safetensors_names(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "in", STATE, CONFIG)
    for shards, names in (
        (1, ["model.safetensors"]),
        (2, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
    ):
        like = save_bin(tmp_path / f"like{shards}", STATE, CONFIG, shards=shards)
        out = tmp_path / f"out{shards}"
        ckptctl.convert(source, out, to="hf", like=like)
        assert sorted(file.name for file in out.glob("*model*.safetensors")) == names
        assert not list(out.glob("*.bin"))
        assert not differences(load_any_reference(out), STATE)


def test_like_single_file_keeps_tied_tensors() -> None:
    tensors = [
        OutputTensor("a", "int8", (4,), ("a",)),
        OutputTensor("b", "int8", (4,), ("b",), "a"),
    ]
    request = OutputRequest("out", tensors, like={"a": 0, "b": 0}, like_files=("m.safetensors",))
    (file,) = formats.get_writable_format("hf").lay_out(request).files
    header = b"".join(content for _, content in file.frame(lambda _: 0))
    assert json.loads(header[8:])["__metadata__"] == {"format": "pt", "b": "a"}


def test_like_reference_with_split_tensor_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = tuple(Extent(Box((n,), (1,)), f"__{n}_0.distcp", 0, 4) for n in (0, 1))
    entry = TensorEntry("w", "float32", (2,), parts, ("w",))
    files = {part.file: 4 for part in parts}
    catalog = Catalog(tmp_path, tmp_path, "dcp", files, {"w": entry})
    monkeypatch.setattr(formats, "open_checkpoint", lambda path: catalog)
    with pytest.raises(UsageError, match="cannot reuse") as caught:
        open_sharding_reference(tmp_path, formats.get_writable_format("dcp"))
    assert "`w`" in message(caught.value)


def test_like_skips_reference_files_without_tensors() -> None:
    tensors = [OutputTensor("a", "int8", (4,), ("a",))]
    names = ("__0_0.distcp", "__1_0.distcp")
    request = OutputRequest("out", tensors, like={"a": 0}, like_files=names)
    found = formats.get_writable_format("dcp").lay_out(request).files
    assert [file.path for file in found] == ["__0_0.distcp", "__0_1.distcp", ".metadata"]


# --------------------------------------------------------------------------------------- expected


@pytest.mark.parametrize(
    ("format", "name", "word"),
    [
        ("dcp", "m.pt", ".metadata"),
        ("dcp", "", ".metadata"),
        ("torch", "", "torch.save"),
        ("hf", "config.json", "safetensors"),
        ("hf", "", "safetensors"),
        ("meta", "", "consolidated.00.pth"),
        ("meta", "m.pt", "consolidated.00.pth"),
    ],
)
def test_wrong_format_option_is_a_format_error(
    tmp_path: Path, format: str, name: str, word: str
) -> None:
    save_torch(tmp_path / "m.pt", {"a": torch.ones(2)})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FormatError) as caught:
        formats.open_checkpoint(tmp_path / name, format)
    assert word in str(caught.value.why)


def test_names_resembling_other_formats_open_as_torch(tmp_path: Path) -> None:
    for name in ("consolidated.final.pt", "pytorch_model_fsdp.bin"):
        path = save_torch(tmp_path / name, {"a": torch.ones(2)})
        assert formats.open_checkpoint(path).format == "torch"


# ------------------------------------------------------------------------------------------- torch


def test_partially_shared_storage_is_written_separately_with_note(tmp_path: Path) -> None:
    base = torch.arange(4, dtype=torch.int32).reshape(2, 2)
    state = {"a": base, "tied": base, "b": base.t(), "c": base[1]}
    path = save_torch(tmp_path / "in.pt", state | {"alone": torch.ones(2)})
    found = formats.open_checkpoint(path)
    assert {n: t.alias_of for n, t in found.tensors.items() if t.alias_of} == {"tied": "a"}
    (note,) = [note for note in found.notes if "share part of their memory" in note]
    assert note.endswith("written separately: `a`, `b`, `c`")
    ckptctl.convert(path, tmp_path / "out", to="dcp")
    assert not differences(
        load_any_reference(tmp_path / "out"), torch.load(path, weights_only=True)
    )


def test_storage_shared_by_two_dtypes_is_not_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = [
        StoredTensor(dtype, (2,), None, 0, 8, None, "0", False) for dtype in ("float32", "int32")
    ]
    archive = TorchArchive(dict(zip("ab", stored, strict=True)), True, {}, 100)
    monkeypatch.setattr(stored_leaves, "read_archive", lambda files, name, **_: archive)
    found = stored_leaves.read_leaves(source_files(Path()), "x.pt")
    assert found.tensors["b"].alias_of is None


# --------------------------------------------------------------------------------------------- dcp


def test_oversized_dcp_metadata_is_unsupported_without_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_dcp(tmp_path / "in", {"a": torch.ones(2)})
    with (source / ".metadata").open("r+b") as file:
        file.truncate(dcp_metadata.MAX_METADATA + 1)
    monkeypatch.setattr(SourceFiles, "read", None)
    with pytest.raises(UnsupportedError, match="too large"):
        formats.open_checkpoint(source)


# -------------------------------------------------------------------------------------------- meta


def _meta(folder: Path, ranks: int, heads: int, **options: bool) -> Path:
    state, config = tiny_llama(
        "llama3", layers=1, hidden=64, heads=ranks, kv_heads=heads, vocab=64, ffn=96
    )
    if options.get("zeros"):
        state = {n: v.zero_() if "k_proj" in n or "v_proj" in n else v for n, v in state.items()}
    save_meta(folder, state, config, mp=ranks)
    if options.get("config"):
        (folder / "config.json").write_text(json.dumps(config))
    if options.get("nested"):
        params = json.loads((folder / "params.json").read_text())
        (folder / "params.json").write_text(json.dumps({"model": params}))
    return folder


@pytest.mark.parametrize(
    ("stored", "config", "zeros", "read"),
    [
        (4, True, True, 4),
        (4, False, True, 4),
        (2, True, True, 2),
        (2, True, False, 2),
        (2, False, False, 2),
        (1, True, False, 1),
        (1, False, False, 4),
    ],
)
def test_duplicated_meta_kv_heads_are_read_once(
    tmp_path: Path, stored: int, config: bool, zeros: bool, read: int
) -> None:
    source = _meta(tmp_path / "in", 4, stored, config=config, zeros=zeros)
    found = formats.open_checkpoint(source)
    assert found.tensors["layers.0.attention.wk.weight"].shape == (16 * read, 64)
    assert found.documents["params.json"].get("n_kv_heads", 4) == read


def test_config_contradicting_rank_head_count_is_unsupported(tmp_path: Path) -> None:
    source = _meta(tmp_path / "in", 4, 4, config=True)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
    with pytest.raises(UnsupportedError, match=r"attention\.w"):
        formats.open_checkpoint(source)


def test_nested_params_json_keeps_nesting_with_new_head_count(tmp_path: Path) -> None:
    source = _meta(tmp_path / "in", 4, 2, nested=True)
    for ranks in (1, 4):
        out = tmp_path / f"out{ranks}"
        ckptctl.convert(source, out, to="meta", mp=ranks)
        written = json.loads((out / "params.json").read_text())
        assert list(written) == ["model"]
        assert written["model"]["n_kv_heads"] == max(2, ranks)
        assert formats.open_checkpoint(out).documents["params.json"]["model"] == (
            written["model"] | {"n_kv_heads": 2}
        )


def test_two_files_of_one_meta_rank_are_unsupported(copy: Callable[[str], Path]) -> None:
    source = copy("meta")
    (source / "consolidated.pth").write_bytes((source / "consolidated.00.pth").read_bytes())
    with pytest.raises(UnsupportedError) as caught:
        formats.open_checkpoint(source)
    assert "`consolidated.00.pth` and `consolidated.pth`" in message(caught.value)


def test_huge_meta_rank_number_is_damaged(copy: Callable[[str], Path]) -> None:
    source = copy("meta")
    (source / f"consolidated.{10**30}.pth").write_bytes(b"")
    with pytest.raises(DamagedError, match="shards are missing") as caught:
        formats.open_checkpoint(source)
    assert "consolidated.02.pth" in message(caught.value)


# -------------------------------------------------------------------------------------- side files


def test_skipped_sidecar_files_are_noted_with_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_files, "MAX_SIDECAR_BYTES", 10_000_000)
    source = save_hf(tmp_path / "in", STATE, CONFIG)
    (source / "original").mkdir()
    (source / ".cache").mkdir()
    (source / "notes.txt").touch()
    with (source / "tokenizer.json").open("wb") as file:
        file.truncate(10_000_001)
    expected = {"tokenizer.json": "larger than 10 MB", "original/": "folder"}
    expected |= {"notes.txt": "unknown kind of file"}
    assert formats.open_checkpoint(source).others == expected
    weights = save_torch(tmp_path / "w.pt", STATE)
    done = ckptctl.convert(weights, tmp_path / "out", to="hf", assets=source)
    assert done.plan.not_carried == expected
    for name, why in expected.items():
        assert any(f"not copied ({why}): `{name}`" in note for note in done.plan.notes)


def test_infinity_is_kept_in_config_but_refused_in_index(tmp_path: Path) -> None:
    config = CONFIG | {"time_step_limit": [0.0, float("inf")]}
    source = save_hf(tmp_path / "in", STATE, config, shards=2)
    ckptctl.convert(source, tmp_path / "out", to="dcp", dtype="fp32")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["time_step_limit"] == config["time_step_limit"]
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"total_size": ', '"total_size": Infinity, "x": '))
    with pytest.raises(CkptError, match="malformed JSON"):
        formats.open_checkpoint(source)
