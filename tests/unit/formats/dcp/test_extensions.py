"""DCP whose items went through an extension of torch's writer: Zstandard is read, others named."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader

import ckptctl
from ckptctl import formats
from ckptctl.distributed import LoadPlanner, Reader
from ckptctl.errors import (
    CkptError,
    DamagedError,
    MissingPackageError,
    StorageError,
    UnsupportedError,
)
from ckptctl.formats.dcp import metadata
from ckptctl.formats.dcp.dcp_reader import build_catalog
from ckptctl.formats.shared.findings import FaultCollector
from ckptctl.numerics.kinds import unpacked
from ckptctl.storage import zstd
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.verbs.consolidate_metadata import plan_metadata
from tests.checkpoints import compression, save_hf, tiny_llama
from tests.checkpoints.adapters import random_adapter, save_peft
from tests.checkpoints.dcp import save_dcp
from tests.checkpoints.readers import differences, flatten, load_any_reference
from tests.unit.formats.damage import converted

STATE: dict[str, Any] = {
    "model": {
        "w": torch.arange(330_000, dtype=torch.float32).reshape(3, -1),
        "t": torch.arange(15, dtype=torch.bfloat16).reshape(3, 5).t(),
        "scale": torch.tensor(3.5),
        "none": torch.zeros(0, 3),
    },
    "step": 7,
    "rates": [0.1, {"decay": "cosine"}],
}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(folder: Path, extension: Any = None, state: Any = None) -> Path:
    return save_dcp(folder, state or STATE, _extensions=[extension or compression.Extension()])


def like(state: dict[str, Any]) -> dict[str, Any]:
    model = {name: torch.full_like(tensor, 9) for name, tensor in state["model"].items()}
    return {"model": model, "step": 0, "rates": [0.0, {"decay": ""}]}


def test_compressed_dcp_verifies_and_converts_exactly(extension: Any, tmp_path: Path) -> None:
    source = save(tmp_path / "in", extension)
    found = ckptctl.verify(source, level="full")
    assert found.verdict == "complete" and found.verified_tensors == 4, found.findings
    assert ckptctl.verify(source, level="full", nan=True).verdict == "complete"
    expected = flatten(STATE)
    assert not differences(converted(source, tmp_path, only="all"), expected)
    ckptctl.convert(source, tmp_path / "dcp", to="dcp", only="all", verify=True)
    assert not differences(load_any_reference(tmp_path / "dcp"), expected)
    assert ckptctl.diff(source, tmp_path / "dcp").same


def test_compressed_float8_tensor_is_copied_unchanged(alone: None, tmp_path: Path) -> None:
    state = {"w": torch.arange(0, 126, dtype=torch.uint8).view(torch.float8_e4m3fn)}
    source = save(tmp_path / "in", state=state)
    assert not differences(converted(source, tmp_path, only="all"), state)


def test_compressed_dcp_loads_through_api_and_torch_reader(extension: Any, tmp_path: Path) -> None:
    source = save(tmp_path / "in", extension)
    for way in range(3):
        state = like(STATE)
        if way == 0:
            ckptctl.load(state, source)
        else:
            planner = LoadPlanner() if way == 1 else None
            reader = Reader(source)
            state_dict_loader.load(state, storage_reader=reader, planner=planner, no_dist=True)
        assert not differences(flatten(state), flatten(STATE)), way


def test_compressed_dcp_lazy_slices_match(alone: None, tmp_path: Path) -> None:
    with ckptctl.open(save(tmp_path / "in")) as found:
        w = STATE["model"]["w"]
        assert torch.equal(found["model.w"][1:, 100_000:], w[1:, 100_000:])
        assert torch.equal(found["model.t"][:], STATE["model"]["t"])


def test_compressed_items_are_decompressed_once(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "in")
    begun: list[int] = []

    def counted(files: SourceFiles, name: str, offset: int, nbytes: int) -> Iterator[bytes]:
        begun.append(offset)
        return zstd.iterate_decompressed(files, name, offset, nbytes)

    monkeypatch.setattr(unpacked, "iterate_decompressed", counted)
    contents = []
    for jobs, kept in ((1, 64), (4, 64), (4, 1)):
        begun.clear()
        monkeypatch.setattr(unpacked, "CACHE_ITEMS", kept)
        target = tmp_path / f"{jobs}-{kept}" / "out.pt"
        target.parent.mkdir()
        ckptctl.convert(source, target, to="torch", jobs=jobs)
        contents.append(target.read_bytes())
        assert len(begun) == len(set(begun)) == 3 or kept == 1, (jobs, kept)
    assert len(set(contents)) == 1


def test_missing_zstandard_package_still_allows_reading_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "in")
    monkeypatch.setattr(zstd, "MODULES", ("there_is_no_such_module",))
    assert ckptctl.inspect(source).verdict == "complete"
    assert formats.open_checkpoint(source).tensors["model.t"].shape == (5, 3)
    assert ckptctl.verify(source, level="fast").verdict == "complete"
    only = save(tmp_path / "tensors", state={"model": STATE["model"]})
    for path in (source, only):
        with pytest.raises(MissingPackageError, match="zstandard"):
            ckptctl.verify(path)
        with pytest.raises(MissingPackageError, match="zstandard"):
            ckptctl.convert(path, tmp_path / "out", to="dcp")
    assert not (tmp_path / "out").exists()


def test_merge_into_uncompressed_dcp_needs_no_zstandard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed of a plain checkpoint was not written through Zstandard."""
    state, config = tiny_llama("llama3", "float32")
    base = save_hf(tmp_path / "hf", state, config)
    ckptctl.convert(base, tmp_path / "dcp", to="dcp")
    folder = save_peft(tmp_path / "adapter", random_adapter(state, ("q_proj",)))
    monkeypatch.setattr(zstd, "MODULES", ("there_is_no_such_module",))
    ckptctl.merge(tmp_path / "dcp", folder, tmp_path / "out", to="hf")
    assert (tmp_path / "out" / "config.json").exists()


def test_unknown_extension_is_unsupported_and_named(tmp_path: Path) -> None:
    source = save(tmp_path / "in", compression.Unknown())
    assert ckptctl.inspect(source).verdict == "unknown"
    found = ckptctl.verify(source)
    assert found.verdict == "unknown" and not found.errors
    assert all("stream.secret@example.org/3" in f"{f.what} {f.why}" for f in found.unknown)
    with pytest.raises(UnsupportedError) as caught:
        ckptctl.convert(source, tmp_path / "out", to="dcp")
    assert "stream.secret@example.org/3" in f"{caught.value} {caught.value.why}"
    with pytest.raises(UnsupportedError, match="is not supported"):
        ckptctl.load({"step": 0, "rates": [0.0, {"decay": ""}]}, source, strict=False)
    raw = pickle.loads((source / ".metadata").read_bytes())
    next(iter(raw.storage_data.values())).transform_descriptors = ["stream.zstd/1", "a/1"]
    (leaf, *_) = metadata.decode_metadata(pickle.dumps(raw), "here").leaves.values()
    assert leaf.extension


def test_damaged_compressed_item_is_detected(extension: Any, tmp_path: Path) -> None:
    source = save(tmp_path / "in", extension)
    items = pickle.loads((source / ".metadata").read_bytes()).storage_data
    place = next(one for index, one in items.items() if index.fqn == "model.w")
    start, end = place.offset, place.offset + place.length
    whole = (source / place.relative_path).read_bytes()
    for begin, content, verdict in (
        (start + place.length // 2, b"\xff\xfe\xfd\xfc\xfb", "damaged"),
        (start, bytes(place.length), "damaged"),
        (end - 10, bytes(10), "damaged"),
        (start, b"else" * 10, "unknown"),
    ):
        data = whole[:begin] + content + whole[begin + len(content) :]
        (source / place.relative_path).write_bytes(data)
        found = ckptctl.verify(source, level="full")
        assert found.verdict == verdict, (begin, found.findings)
        assert [one.tensor for one in found.findings] == ["model.w"]
        with pytest.raises(CkptError):
            ckptctl.convert(source, tmp_path / "out", to="dcp")


def test_swapped_or_oversized_compressed_items_are_rejected(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "in")
    raw = pickle.loads((source / ".metadata").read_bytes())
    places = {index.fqn: one for index, one in raw.storage_data.items()}
    scale, t = places["model.scale"], places["model.t"]
    scale.offset, scale.length, t.offset, t.length = t.offset, t.length, scale.offset, scale.length
    (source / ".metadata").write_bytes(pickle.dumps(raw))
    with pytest.raises(DamagedError, match=r"a chunk of `model\.scale` does not match"):
        ckptctl.convert(source, tmp_path / "out", to="dcp", include=["*scale"])
    monkeypatch.setattr(unpacked, "MAX_EXTRA_BYTES", 0)
    with pytest.raises(UnsupportedError, match="too long"):
        ckptctl.convert(source, tmp_path / "out", to="dcp", include=["*scale"])
    monkeypatch.setattr(zstd, "MAX_DECOMPRESSED_BYTES", 10)
    with pytest.raises(UnsupportedError, match="more than 10 bytes"):
        ckptctl.load(like(STATE), source)


def test_extension_in_bytecheckpoint_is_unsupported(tmp_path: Path) -> None:
    source = save(tmp_path / "in")
    leaves = metadata.decode_metadata((source / ".metadata").read_bytes(), "here").leaves
    with source_files(source) as files, pytest.raises(UnsupportedError, match="an extension"):
        build_catalog(files, leaves, "bytecheckpoint", FaultCollector(source, False), zips=False)


def test_compressed_item_too_short_for_shape_is_unsupported(alone: None, tmp_path: Path) -> None:
    source = save(tmp_path / "in", state={"w": torch.zeros(4)})
    with (source / ".metadata").open("rb") as file:
        content = pickle.load(file)
    leaf = content.state_dict_metadata["w"]
    leaf.size = leaf.chunks[0].sizes = torch.Size([1 << 46])
    (source / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(UnsupportedError) as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="dcp")
    assert "too short for the shape" in (caught.value.why or "")


def test_zstd_window_too_large_is_unsupported_not_damaged(tmp_path: Path) -> None:
    module = pytest.importorskip("zstandard")
    window = module.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    stream = module.ZstdCompressor(compression_params=window).compressobj()
    content = stream.compress(bytes(99)) + stream.flush()
    (tmp_path / "a").write_bytes(content)
    with source_files(tmp_path) as files, pytest.raises(UnsupportedError, match="too large"):
        list(zstd.iterate_decompressed(files, "a", 0, len(content)))


def test_full_temp_dir_is_storage_error_with_tmpdir_hint(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "in")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ckptctl.numerics.kinds.unpacked.os.write", full)
    with pytest.raises(StorageError, match="ENOSPC") as caught:
        ckptctl.load(like(STATE), source)
    assert "TMPDIR" in str(caught.value.hint)


def test_consolidating_metadata_of_compressed_dcp_is_unsupported(
    alone: None, tmp_path: Path
) -> None:
    source = save(tmp_path / "in")
    (source / ".metadata").rename(source / "__0.metadata")
    assert formats.open_checkpoint(source).format == "dcp-rank-local"
    with pytest.raises(UnsupportedError, match="compressed"):
        plan_metadata(source)
    assert not differences(converted(source, tmp_path, only="all"), flatten(STATE))
