"""Damaged and contradictory input: the right exit code, a message that names things, no traces."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError
from tests.checkpoints import (
    differences,
    load_any_reference,
    save_bin,
    save_dcp,
    save_hf,
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

READABLE = formats.names()
STATE, CONFIG = tiny_llama("llama3", layers=1, hidden=32, heads=2, kv_heads=2, vocab=64, ffn=96)
DAMAGE = (3, 4, 5)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return one healthy checkpoint per writable format, and one of ``.bin`` shards."""
    folder = tmp_path_factory.mktemp("originals")
    found = {name: build(name, folder, STATE, CONFIG) for name in WRITABLE}
    found["bin"] = save_bin(folder / "bin", STATE, CONFIG, shards=2)
    return found


@pytest.fixture
def copy(tmp_path: Path, originals: dict[str, Path]) -> Callable[[str], Path]:
    """Return the function that copies a healthy checkpoint into a folder of its own."""

    def make(name: str) -> Path:
        target = tmp_path / "in" / originals[name].name
        target.parent.mkdir(exist_ok=True)
        (tmp_path / "outputs").mkdir(exist_ok=True)
        original = originals[name]
        if original.is_dir():
            return Path(shutil.copytree(original, target))
        return Path(shutil.copy(original, target))

    return make


def convert(source: Path, folder: Path, to: str = "torch", **options: Any) -> Path:
    target = place(folder / "outputs", to)
    ckptctl.convert(source, target, to=to, **options)
    return target


def data_files(source: Path) -> list[Path]:
    """Return the files that hold tensors or say where they are."""
    if source.is_file():
        return [source]
    papers = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model")
    return sorted(item for item in source.iterdir() if item.name not in papers)


KINDS = (*WRITABLE, "bin")


@pytest.mark.parametrize("name", KINDS)
def test_every_file_is_needed(
    tmp_path: Path, copy: Callable[[str], Path], originals: dict[str, Path], name: str
) -> None:
    """Without any one of its files a checkpoint is refused, or is whole all the same."""
    for file in data_files(originals[name]):
        if file.suffix == ".json":
            continue
        source = copy(name)
        damaged = source if source.is_file() else source / file.name
        damaged.unlink()
        with refused(source, tmp_path / "outputs" / "out", *DAMAGE) as caught:
            convert(source, tmp_path)
        said = message(caught.value)
        assert file.name in said or "a shard may be missing" in said or caught.value.exit_code == 3
        assert not whole(source), file.name
        shutil.rmtree(source.parent)


def whole(path: Path) -> bool:
    """Return whether ``inspect`` takes *path* for a complete checkpoint."""
    try:
        return ckptctl.inspect(path).complete
    except CkptError:
        return False


@pytest.mark.parametrize("name", KINDS)
def test_every_file_is_needed_to_its_end(
    tmp_path: Path, copy: Callable[[str], Path], originals: dict[str, Path], name: str
) -> None:
    for file in data_files(originals[name]):
        size = file.stat().st_size
        for length in {0, 1, 7, 8, 100, size // 2, max(size - 200, 0), size - 1}:
            source = copy(name)
            os.truncate(source if source.is_file() else source / file.name, length)
            with refused(source, tmp_path / "outputs" / "out", *DAMAGE) as caught:
                convert(source, tmp_path)
            assert file.name in message(caught.value), (file.name, length)
            assert not whole(source), (file.name, length)
            shutil.rmtree(source.parent)


@pytest.mark.parametrize("name", KINDS)
def test_flipped_bits(
    tmp_path: Path, copy: Callable[[str], Path], originals: dict[str, Path], name: str
) -> None:
    """A flip is found, or it is harmless; only bare safetensors data has nothing to find it by."""
    source = copy(name)
    for file in data_files(source):
        content = file.read_bytes()
        checked = file.suffix != ".safetensors"
        stop = len(content) if checked else 8 + struct.unpack("<Q", content[:8])[0]
        # A step without a factor in common with 64, the alignment of data.
        for position in range(0, stop, max(stop // 24, 1) | 1):
            changed = bytearray(content)
            changed[position] ^= 1 << position % 8
            file.write_bytes(changed)
            _found_or_harmless(source, tmp_path, originals["hf"], f"{file.name} {position}")
        file.write_bytes(content)


def _found_or_harmless(source: Path, folder: Path, assets: Path, what: str) -> None:
    try:
        target = convert(source, folder, "meta", assets=assets)
    except CkptError as error:
        assert error.exit_code in DAMAGE, what
    else:
        assert not differences(read(target, CONFIG), STATE), what
        shutil.rmtree(target)
    assert not list((folder / "outputs").iterdir()), what


@pytest.mark.parametrize("name", [name for name in KINDS if name != "hf"])
def test_a_flip_in_the_data_is_found(
    tmp_path: Path, copy: Callable[[str], Path], name: str
) -> None:
    source = copy(name)
    needle = STATE["model.norm.weight"].view(torch.uint8).numpy().tobytes()
    holders = [file for file in data_files(source) if needle in file.read_bytes()]
    file = holders[0]
    content = bytearray(file.read_bytes())
    content[content.index(needle) + 5] ^= 4
    file.write_bytes(content)
    with refused(source, tmp_path / "outputs" / "out", 4) as caught:
        convert(source, tmp_path)
    assert "norm.weight" in message(caught.value)
    assert file.name in message(caught.value)


# ------------------------------------------------------------------------------------------- hf


def _shard(source: Path, key: str) -> Path:
    index = json.loads((source / "model.safetensors.index.json").read_text())
    return source / index["weight_map"][key]


def _index(source: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


NORM = "model.norm.weight"


def _drop_norm(source: Path) -> None:
    path = _shard(source, NORM)
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if k != NORM}, path, {"format": "pt"})


def _norm_twice(source: Path) -> None:
    first = _shard(source, NORM)
    other = next(path for path in sorted(source.glob("*.safetensors")) if path != first)
    save_file(load_file(other) | {NORM: STATE[NORM]}, other, {"format": "pt"})


def _misplaced(source: Path) -> None:
    def move(index: dict[str, Any]) -> None:
        files = sorted(set(index["weight_map"].values()) - {index["weight_map"][NORM]})
        index["weight_map"][NORM] = files[0]

    _index(source, move)


def _unlisted(source: Path) -> None:
    _index(source, lambda index: index["weight_map"].pop(NORM))


def _ghost(source: Path) -> None:
    _index(source, lambda i: i["weight_map"].update(ghost=i["weight_map"][NORM]))


def _wrong_shape(source: Path) -> None:
    path = _shard(source, NORM)
    save_file(load_file(path) | {NORM: torch.ones(33)}, path, {"format": "pt"})


def _shared_name(source: Path) -> None:
    for path in source.glob("*.index.json"):
        path.unlink()
    first = sorted(source.glob("*.safetensors"))
    tensors = load_file(first[0])
    tensors.update({next(iter(load_file(first[1]))): torch.ones(2)})
    save_file(tensors, first[0], {"format": "pt"})


HF = {
    "header-lacks": (_drop_norm, 4, NORM),
    "in-two-shards": (_norm_twice, 4, NORM),
    "in-two-shards-no-index": (_shared_name, 4, "two shards"),
    "in-another-shard": (_misplaced, 4, NORM),
    "index-lacks": (_unlisted, 4, NORM),
    "index-invents": (_ghost, 4, "ghost"),
    "shape-contradicts-config": (_wrong_shape, 5, NORM),
}


@pytest.mark.parametrize("case", HF)
def test_index_and_headers_that_disagree(
    tmp_path: Path, copy: Callable[[str], Path], case: str
) -> None:
    source = copy("hf")
    damage, code, word = HF[case]
    damage(source)
    with refused(source, tmp_path / "outputs" / "out", code) as caught:
        convert(source, tmp_path, "meta")
    assert word in message(caught.value)


ESCAPES = {
    "parent": "../secret.safetensors",
    "absolute": "/{}/secret.safetensors",
    "deep": "a/../../secret.safetensors",
    "link": "link.safetensors",
    "folder-link": "folder/secret.safetensors",
}


@pytest.mark.parametrize("case", ESCAPES)
def test_weight_map_stays_inside(tmp_path: Path, copy: Callable[[str], Path], case: str) -> None:
    source = copy("hf")
    outside = tmp_path / "in"
    shutil.copy(_shard(source, NORM), outside / "secret.safetensors")
    old = _shard(source, NORM).name
    if case == "link":
        (source / "link.safetensors").symlink_to(outside / "secret.safetensors")
    if case == "folder-link":
        (source / "folder").symlink_to(outside)
    name = ESCAPES[case].format(str(outside).strip("/"))

    def change(index: dict[str, Any]) -> None:
        found = index["weight_map"]
        found.update({key: name for key, file in found.items() if file == old})

    _index(source, change)
    (source / old).unlink()
    with refused(source, tmp_path / "outputs" / "out", 4) as caught:
        convert(source, tmp_path)
    assert "secret" in message(caught.value) or name in message(caught.value)
    assert not whole(source)


def test_a_hub_cache_of_links_is_read(tmp_path: Path, originals: dict[str, Path]) -> None:
    """Snapshots of the Hub's cache link to ``../../blobs``."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (tmp_path / "outputs").mkdir()
    for number, item in enumerate(originals["hf"].iterdir()):
        shutil.copy(item, blobs / f"{number:064x}")
        (snapshot / item.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    target = convert(snapshot, tmp_path)
    assert not differences(load_any_reference(target), STATE)


def test_the_offer_of_nearest_names(tmp_path: Path) -> None:
    state = dict(STATE)
    state["model.layers.0.self_attn.q_prox.weight"] = state.pop(
        "model.layers.0.self_attn.q_proj.weight"
    )
    source = save_hf(tmp_path / "source", state, CONFIG)
    with refused(source, tmp_path / "out", 5) as caught:
        ckptctl.convert(source, tmp_path / "out", to="meta")
    said = message(caught.value)
    assert "q_prox" in said
    assert "model.layers.0.self_attn.q_proj.weight" in said


@pytest.mark.parametrize("key", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_missing_keys_are_named(tmp_path: Path, key: str) -> None:
    state = {name: value for name, value in STATE.items() if name != key}
    source = save_hf(tmp_path / "source", state, CONFIG)
    with refused(source, tmp_path / "out", 5) as caught:
        ckptctl.convert(source, tmp_path / "out", to="meta")
    assert key in message(caught.value)


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "heads": {"num_attention_heads": 3},
    "kv-heads": {"num_key_value_heads": 1},
    "hidden": {"hidden_size": 64},
    "layers": {"num_hidden_layers": 2},
    "vocab": {"vocab_size": 65},
    "ffn": {"intermediate_size": 97},
    "head-dim": {"head_dim": 8},
    "text": {"num_attention_heads": "two"},
    "negative": {"num_attention_heads": -2},
    "zero": {"num_attention_heads": 0, "head_dim": None},
    "huge": {"num_hidden_layers": 10**9},
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_config_that_contradicts_the_shapes(tmp_path: Path, case: str) -> None:
    source = save_hf(tmp_path / "source", STATE, CONFIG | CONTRADICTIONS[case])
    with refused(source, tmp_path / "out", 5) as caught:
        ckptctl.convert(source, tmp_path / "out", to="meta")
    assert message(caught.value)


def test_no_config_where_heads_are_needed(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "source", STATE)
    with refused(source, tmp_path / "out", 5) as caught:
        ckptctl.convert(source, tmp_path / "out", to="meta", model_type="llama3")
    assert "config.json" in message(caught.value)
    assert "--assets" in message(caught.value)


# ----------------------------------------------------------------------------------------- meta


def _ranks(source: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(path, weights_only=True) for path in sorted(source.glob("*.pth"))]


def _store(source: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    for path in source.glob("*.pth"):
        path.unlink()
    for rank, shard in enumerate(shards):
        torch.save(shard, source / f"consolidated.{rank:02d}.pth")


def _other_norm(shards: list[dict[str, torch.Tensor]]) -> None:
    shards[1]["norm.weight"] = shards[1]["norm.weight"] + 1


def _other_dtype(shards: list[dict[str, torch.Tensor]]) -> None:
    name = "layers.0.attention.wq.weight"
    shards[1][name] = shards[1][name].float()


def _other_shape(shards: list[dict[str, torch.Tensor]]) -> None:
    name = "layers.0.attention.wq.weight"
    shards[1][name] = shards[1][name][:-1].clone()


def _other_keys(shards: list[dict[str, torch.Tensor]]) -> None:
    del shards[1]["norm.weight"]


RANKS = {
    "norm": (_other_norm, "norm.weight"),
    "dtype": (_other_dtype, "wq"),
    "shape": (_other_shape, "wq"),
    "keys": (_other_keys, "norm.weight"),
    "last-missing": (lambda shards: shards.pop(), "a shard may be missing"),
    "one-too-many": (lambda shards: shards.append(shards[0]), "shard"),
}


@pytest.mark.parametrize("case", RANKS)
def test_ranks_that_disagree(tmp_path: Path, copy: Callable[[str], Path], case: str) -> None:
    source = copy("meta")
    shards = _ranks(source)
    change, word = RANKS[case]
    change(shards)
    _store(source, shards)
    with refused(source, tmp_path / "outputs" / "out", 4, 5) as caught:
        convert(source, tmp_path, "hf")
    assert word in message(caught.value)
    assert not whole(source)


# ------------------------------------------------------------------------------------------ dcp


def _metadata(source: Path) -> Any:
    with (source / ".metadata").open("rb") as file:
        return pickle.load(file)


def _save_metadata(source: Path, metadata: Any) -> None:
    (source / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.fixture
def chunked(tmp_path: Path) -> Path:
    """Return a DCP directory whose ``weight`` lies in two chunks of rows."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    source = tmp_path / "in" / "chunked"
    state = {"weight": torch.arange(32.0).reshape(8, 4), "other": torch.ones(3), "n": 5}
    save_dcp(source, {**state, "tail": torch.arange(32.0).reshape(8, 4)[4:].clone()})
    metadata = _metadata(source)
    weight = metadata.state_dict_metadata["weight"]
    first, size = torch.Size([0, 0]), torch.Size([4, 4])
    tail = metadata.storage_data.pop(MetadataIndex("tail", first))
    del metadata.state_dict_metadata["tail"]
    metadata.planner_data.pop("tail")
    save_dcp(tmp_path / "half", {"weight": torch.arange(16.0).reshape(4, 4)})
    shutil.move(tmp_path / "half" / "__0_0.distcp", source / "__1_0.distcp")
    half = next(iter(_metadata(tmp_path / "half").storage_data.values()))
    shutil.rmtree(tmp_path / "half")
    weight.chunks[:] = [
        ChunkStorageMetadata(first, size),
        ChunkStorageMetadata(torch.Size([4, 0]), size),
    ]
    half.relative_path = "__1_0.distcp"
    del metadata.storage_data[MetadataIndex("weight", first)]
    metadata.storage_data[MetadataIndex("weight", first, 0)] = half
    metadata.storage_data[MetadataIndex("weight", torch.Size([4, 0]), 1)] = tail
    _save_metadata(source, metadata)
    (tmp_path / "outputs").mkdir()
    return source


def test_the_chunks_are_healthy_before(tmp_path: Path, chunked: Path) -> None:
    found = load_any_reference(convert(chunked, tmp_path))
    assert torch.equal(found["weight"], torch.arange(32.0).reshape(8, 4))
    assert not differences(found, load_any_reference(chunked))


def _chunks(metadata: Any) -> Any:
    return metadata.state_dict_metadata["weight"].chunks


def _set_offset(metadata: Any, row: int) -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    chunk = _chunks(metadata)[1]
    old = MetadataIndex("weight", chunk.offsets, 1)
    chunk.offsets = torch.Size([row, 0])
    info = metadata.storage_data.pop(old)
    metadata.storage_data[MetadataIndex("weight", chunk.offsets, 1)] = info


def _lose(metadata: Any) -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    del _chunks(metadata)[1]
    del metadata.storage_data[MetadataIndex("weight", torch.Size([4, 0]))]


def _lose_item(metadata: Any) -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    del metadata.storage_data[MetadataIndex("weight", torch.Size([4, 0]))]


def _other_size(metadata: Any) -> None:
    _chunks(metadata)[1].sizes = torch.Size([3, 4])


def _global_size(metadata: Any) -> None:
    metadata.state_dict_metadata["weight"].size = torch.Size([9, 4])


def _global_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["weight"].properties.dtype = torch.int32


def _path(metadata: Any, path: str) -> None:
    for info in metadata.storage_data.values():
        if info.relative_path == "__1_0.distcp":
            info.relative_path = path


def _beyond(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.length += 10_000


def _negative(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.offset = -1


def _swap_items(metadata: Any) -> None:
    items = list(metadata.storage_data.items())
    other = next(info for index, info in items if index.fqn == "other")
    for index, _ in items:
        if index.fqn == "weight":
            metadata.storage_data[index] = other


DCP: dict[str, tuple[Callable[[Any], None], str]] = {
    "hole": (lambda m: _set_offset(m, 5), "weight"),
    "overlap": (lambda m: _set_offset(m, 3), "weight"),
    "same-place": (lambda m: _set_offset(m, 0), "weight"),
    "chunk-missing": (_lose, "weight"),
    "item-missing": (_lose_item, "weight"),
    "chunk-size": (_other_size, "weight"),
    "global-size": (_global_size, "weight"),
    "global-dtype": (_global_dtype, "weight"),
    "another-item": (_swap_items, "weight"),
    "beyond": (_beyond, ".distcp"),
    "negative": (_negative, ".metadata"),
    "parent": (lambda m: _path(m, "../half/__1_0.distcp"), "__1_0.distcp"),
    "absolute": (lambda m: _path(m, "/etc/passwd"), "/etc/passwd"),
    "folder": (lambda m: _path(m, "."), "`.`"),
    "nothing": (lambda m: _path(m, ""), ""),
}


@pytest.mark.parametrize("case", DCP)
def test_chunks_that_disagree(tmp_path: Path, chunked: Path, case: str) -> None:
    metadata = _metadata(chunked)
    change, word = DCP[case]
    change(metadata)
    _save_metadata(chunked, metadata)
    with refused(chunked, tmp_path / "outputs" / "out", 4) as caught:
        convert(chunked, tmp_path)
    assert word in message(caught.value), message(caught.value)


def test_a_link_out_of_the_directory(tmp_path: Path, chunked: Path) -> None:
    (chunked / "__1_0.distcp").rename(tmp_path / "in" / "secret")
    (chunked / "__1_0.distcp").symlink_to(tmp_path / "in" / "secret")
    with refused(chunked, tmp_path / "outputs" / "out", 4) as caught:
        convert(chunked, tmp_path)
    assert "__1_0.distcp" in message(caught.value)


# ------------------------------------------------------------------------------------ elsewhere


@pytest.mark.parametrize("name", KINDS)
def test_a_pipe_in_place_of_a_file_does_not_hang(
    tmp_path: Path, copy: Callable[[str], Path], originals: dict[str, Path], name: str
) -> None:
    source = copy(name)
    for file in data_files(source):
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        if file.suffix == ".json":
            _found_or_harmless(source, tmp_path, originals["hf"], file.name)
        else:
            with pytest.raises(CkptError) as caught:
                convert(source, tmp_path)
            assert caught.value.exit_code in DAMAGE, file.name
            assert not list((tmp_path / "outputs").iterdir())
            assert not whole(source)
        file.unlink()
        file.write_bytes(content)


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("pickle")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))


def _legacy(path: Path) -> None:
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)


def _folder(name: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        (path / name).write_bytes(b"x")

    return make


FOREIGN: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "legacy": ("old.pt", _legacy, "legacy"),
    "tar": ("old.tar", _tar, "tar"),
    "tar-pt": ("old.pt", _tar, "tar"),
    "gguf": ("m.gguf", lambda p: p.write_bytes(b"GGUF\3\0\0\0"), "GGUF"),
    "onnx": ("m.onnx", lambda p: p.write_bytes(b"\x08\x07"), "ONNX"),
    "hdf5": ("m.h5", lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n"), "HDF5"),
    "tensorflow": ("saved", _folder("saved_model.pb"), "TensorFlow"),
    "tensorflow-index": ("tf", _folder("model.ckpt.index"), "TensorFlow"),
    "gguf-folder": ("gguf", _folder("model.gguf"), "GGUF"),
    "flax": ("flax", _folder("flax_model.msgpack"), "Flax"),
    "empty-folder": ("empty", lambda p: p.mkdir(), "no checkpoint"),
    "empty-file": ("empty.pt", lambda p: p.write_bytes(b""), "no checkpoint"),
    "text": ("note.txt", lambda p: p.write_bytes(b"hello"), "no checkpoint"),
    "pickle": ("state.pkl", lambda p: p.write_bytes(pickle.dumps({"a": 1})), "pickle"),
    "nothing": ("nowhere", lambda p: None, "no such"),
    "pipe": ("pipe", os.mkfifo, ""),
    "device": ("device", lambda p: p.symlink_to("/dev/zero"), ""),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_what_is_something_else(tmp_path: Path, case: str) -> None:
    name, make, word = FOREIGN[case]
    (tmp_path / "in").mkdir()
    (tmp_path / "outputs").mkdir()
    make(tmp_path / "in" / name)
    for call in (
        lambda path: convert(path, tmp_path),
        lambda path: ckptctl.inspect(path),
    ):
        with pytest.raises(CkptError) as caught:
            call(tmp_path / "in" / name)
        assert caught.value.exit_code == 3, message(caught.value)
        assert word.lower() in message(caught.value).lower()
        assert name in message(caught.value)
    assert not list((tmp_path / "outputs").iterdir())


@pytest.mark.parametrize("source_format", READABLE)
@pytest.mark.parametrize("case", ["exists", "same", "inside", "around", "file", "link"])
def test_destinations(
    tmp_path: Path, copy: Callable[[str], Path], source_format: str, case: str
) -> None:
    source = copy(source_format)
    outputs = tmp_path / "outputs"
    (outputs / "there").mkdir()
    (outputs / "file").write_text("mine")
    (outputs / "link").symlink_to(outputs / "there")
    if source.is_file() and case == "inside":
        source = source.parent / source.name
    target = {
        "exists": outputs / "there",
        "same": source,
        "inside": source / "deep" / "out" if source.is_dir() else source,
        "around": source.parent,
        "file": outputs / "file",
        "link": outputs / "link",
    }[case]
    for overwrite in {False, case in ("same", "inside", "around", "file")}:
        with refused(source, target, 6) as caught:
            ckptctl.convert(source, target, to="dcp", overwrite=overwrite)
        assert target.name in message(caught.value)


@pytest.mark.parametrize("target", WRITABLE)
def test_not_enough_disk(
    tmp_path: Path, copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    source = copy("hf")
    real = os.statvfs

    def full(path: Any) -> Any:
        found = real(path)
        values = list(found)
        values[3] = values[4] = 1
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", full)
    with refused(source, tmp_path / "outputs" / "out", 6) as caught:
        convert(source, tmp_path, target)
    assert "space" in message(caught.value)


@pytest.mark.parametrize("case", ["missing-shard", "flip", "exists"])
def test_the_command_shows_no_traceback(
    tmp_path: Path, copy: Callable[[str], Path], case: str
) -> None:
    from typer.testing import CliRunner

    from ckptctl.cli.app import app

    source = copy("dcp")
    needle = STATE[NORM].view(torch.uint8).numpy().tobytes()
    data = next(file for file in source.glob("*.distcp") if needle in file.read_bytes())
    target = tmp_path / "outputs" / "out"
    if case == "missing-shard":
        data.unlink()
    elif case == "flip":
        content = bytearray(data.read_bytes())
        content[content.index(needle)] ^= 1
        data.write_bytes(content)
    else:
        target.mkdir()
    before = snapshot(source)
    result = CliRunner().invoke(app, ["convert", str(source), str(target), "--to", "hf"])
    assert result.exit_code == (6 if case == "exists" else 4), result.output
    assert result.stdout == ""
    assert "error: " in result.stderr
    assert "Traceback" not in result.output
    assert (data.name in result.stderr) == (case != "exists")
    assert snapshot(source) == before
    assert [item.name for item in target.parent.iterdir()] == (["out"] if case == "exists" else [])


def test_single_files_are_files(originals: dict[str, Path]) -> None:
    assert {name for name in WRITABLE if originals[name].is_file()} == {
        name for name in WRITABLE if single_file(name)
    }
