"""``verify`` on every format that can be written: complete ones pass, and damage is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ckptctl
from ckptctl import formats
from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.cli.app import app
from ckptctl.errors import CkptError, FormatError, RefusedError, UsageError
from ckptctl.formats.base import OutputTensor, TensorPlace
from ckptctl.formats.dcp import METADATA
from ckptctl.formats.dcp.metadata import Item, decode_metadata
from ckptctl.formats.dcp.metadata_writer import encode_metadata
from ckptctl.storage import crc
from ckptctl.verbs.verification import data
from ckptctl.verbs.verification.verify_options import Level
from ckptctl.verbs.verification.verify_result import Verification
from tests.checkpoints import save_bin, save_dcp, tiny_llama
from tests.contract.support import WRITABLE, build, place, snapshot
from tests.sweeps import one_in

STATE, CONFIG = tiny_llama("llama3", layers=1)
NORM = "model.norm.weight"
SMALL = ((data, "BLOCK_BYTES", 100), (crc, "WINDOW_BYTES", 30), (data, "BATCH_BLOCKS", 3))
SAMPLES = (
    "dcp",
    "dcp-rank-local",
    "deepspeed",
    "hf-rank-shards",
    "rank_files",
    "torch_checkpointing",
)
REFUSED = ("universal_z2_rr", "fsdp1_local")
DATA = (".safetensors", ".distcp", ".pt", ".pth", ".bin", ".metadata")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return one checkpoint per format that others wrote, and one that we wrote."""
    folder = tmp_path_factory.mktemp("made")
    found = {name: build(name, folder, STATE, CONFIG) for name in WRITABLE}
    found["bin"] = save_bin(folder / "bin", STATE, CONFIG, shards=2)
    for name in WRITABLE:
        found[f"our-{name}"] = place(folder, name, f"our-{name}")
        ckptctl.convert(found["hf"], found[f"our-{name}"], to=name)
    return found


@pytest.fixture
def copied(made: dict[str, Path], tmp_path: Path) -> Any:
    """Return the function that copies one of them to be damaged."""

    def copy(name: str) -> Path:
        return clone(made[name], tmp_path)

    return copy


def clone(source: Path, folder: Path) -> Path:
    target = folder / source.name
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
    return target


def whats(found: Verification) -> list[str]:
    return [one.what for one in (*found.errors, *found.unknown)]


KINDS = (*WRITABLE, "bin", *(f"our-{name}" for name in WRITABLE))


@pytest.mark.parametrize("level", one_in(5, get_args(Level)))
@pytest.mark.parametrize("kind", KINDS)
def test_complete_checkpoint_has_no_findings(made: dict[str, Path], kind: str, level: Any) -> None:
    before = snapshot(made[kind])
    found = ckptctl.verify(made[kind], level=level)
    assert found.verdict == "complete" and not found.findings
    assert found.format == kind.removeprefix("our-").replace("bin", "hf")
    assert found.tensors == len(formats.open_checkpoint(made[kind]).tensors)
    assert snapshot(made[kind]) == before
    if level == "full":
        size = formats.open_checkpoint(made[kind]).nbytes
        assert found.verified_bytes is not None
        assert found.verified_bytes >= (0 if kind in ("hf", "mistral", "deepseek") else size)
    else:
        assert found.verified_bytes is None


@pytest.mark.parametrize("kind", ["hf", *(f"our-{name}" for name in WRITABLE)])
@pytest.mark.parametrize("how", ["gone", "empty", "short"])
def test_missing_or_truncated_data_file_is_damaged(copied: Any, kind: str, how: str) -> None:
    path = copied(kind)
    for name in sorted(formats.open_checkpoint(path).files):
        target = path if path.is_file() else path / name
        content = target.read_bytes()
        if how == "gone":
            target.unlink()
        else:
            target.write_bytes(b"" if how == "empty" else content[:-1])
        try:
            found = ckptctl.verify(path, level="fast")
        except CkptError as error:
            assert error.exit_code == 3, error
            assert path.is_file() or len(formats.sniff_formats(path)) == 0 or how == "empty"
        else:
            assert found.verdict == "damaged"
            assert any(name in f"{f.file} {f.what} {f.why}" for f in found.errors), found.findings
        target.write_bytes(content)


def test_checksum_across_many_blocks_detects_flip(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room, name, size in SMALL:
        monkeypatch.setattr(room, name, size)
    path = clone(data / "dcp/dcp_2d/ckpt", tmp_path)
    assert ckptctl.verify(path, level="full", jobs=4).verdict == "complete"
    extent = (
        formats.resolve_codecs(formats.open_checkpoint(path)).tensors["model.l1.weight"].extents[1]
    )
    flip(path / extent.file, extent.offset + extent.nbytes - 1)
    (found,) = ckptctl.verify(path, level="full", jobs=4).errors
    assert (found.tensor, found.file) == ("model.l1.weight", extent.file)


@pytest.mark.parametrize(
    "kind", one_in(3, [*(f"our-{name}" for name in WRITABLE), "torch", "dcp", "bin"])
)
def test_full_finds_a_flipped_byte_in_every_tensor(copied: Any, kind: str) -> None:
    path = copied(kind)
    catalog = formats.resolve_codecs(formats.open_checkpoint(path))
    for entry in list(catalog.tensors.values())[::3]:
        extent = entry.extents[-1]
        target = path if path.is_file() else path / extent.file
        flip(target, extent.offset + extent.nbytes // 2)
        assert ckptctl.verify(path).verdict == "complete"
        found = ckptctl.verify(path, level="full", jobs=2)
        assert {(f.tensor, f.file) for f in found.errors} == {(entry.name, extent.file)}
        assert "CRC-32" in str(found.errors[0].why)
        flip(target, extent.offset + extent.nbytes // 2)
    assert ckptctl.verify(path, level="full").verdict == "complete"


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_headers_level_finds_swapped_items(copied: Any) -> None:
    """Two items of equal length are swapped: the index still holds together."""
    path = copied("our-dcp")
    entries = formats.open_checkpoint(path).tensors
    a, b = (
        entries["model.layers.0.mlp.up_proj.weight"],
        entries["model.layers.0.mlp.down_proj.weight"],
    )
    (x,), (y,) = a.extents, b.extents
    assert a.shape != b.shape and x.nbytes == y.nbytes
    first, second = (path / e.file for e in (x, y))
    one = first.read_bytes()[x.offset : x.offset + x.nbytes]
    two = second.read_bytes()[y.offset : y.offset + y.nbytes]
    for file, extent, content in ((first, x, two), (second, y, one)):
        whole = bytearray(file.read_bytes())
        whole[extent.offset : extent.offset + extent.nbytes] = content
        file.write_bytes(whole)
    assert ckptctl.verify(path, level="fast").verdict == "complete"
    assert {f.tensor for f in ckptctl.verify(path).errors} == {a.name, b.name}


def test_headers_level_finds_every_bad_item(data: Path, tmp_path: Path) -> None:
    path = clone(data / "dcp/dcp_2d/ckpt", tmp_path)
    entry = formats.open_checkpoint(path).tensors["model.l1.weight"]
    for extent in entry.extents[1:]:
        flip(path / extent.file, extent.offset)  # the signature of the zip
    found = ckptctl.verify(path)
    assert {(f.tensor, f.box) for f in found.unknown} == {
        (entry.name, extent.box) for extent in entry.extents[1:]
    }
    assert ckptctl.verify(path, level="fast").verdict == "complete"
    full = ckptctl.verify(path, level="full")
    assert full.verified_bytes
    assert full.findings == found.findings


def rewrite(path: Path, change: Any) -> None:
    """Write `.metadata` again with other items; *change* maps ``{(name, box): item}``."""
    leaves = decode_metadata((path / METADATA).read_bytes(), "").leaves
    tensors = [OutputTensor(n, x.dtype, x.shape, x.path) for n, x in leaves.items() if x.dtype]
    items = {
        (name, extent.box): Item(extent.file, extent.offset, extent.nbytes)
        for name, leaf in leaves.items()
        for extent in leaf.extents
    }
    items = change(items)
    boxes: dict[str, list[TensorPlace]] = {tensor.name: [] for tensor in tensors}
    for name, box in items:
        boxes[name].append(TensorPlace(box, 0))
    flat = {(name, box.offsets): item for (name, box), item in items.items()}
    (path / METADATA).write_bytes(encode_metadata(tensors, [], boxes, flat))


@pytest.fixture
def sharded(data: Path, tmp_path: Path) -> Path:
    """Return a copy of what four ranks saved."""
    path = clone(data / "dcp/dcp_2d/ckpt", tmp_path)
    rewrite(path, lambda items: items)
    assert ckptctl.verify(path, level="full").verdict == "complete"
    return path


def test_missing_chunk_error_names_its_rank(sharded: Path) -> None:
    chosen: list[tuple[str, Box]] = []

    def drop(items: dict[tuple[str, Box], Item]) -> dict[tuple[str, Box], Item]:
        per_rank: dict[str, dict[int, tuple[str, Box]]] = {}
        for (name, box), item in items.items():
            per_rank.setdefault(name, {})[int(item.file.split("_")[2])] = (name, box)
        name = next(name for name, ranks in per_rank.items() if set(ranks) == {0, 1, 2, 3})
        chosen.append(per_rank[name][2])
        return {key: item for key, item in items.items() if key != per_rank[name][2]}

    rewrite(sharded, drop)
    (found,) = ckptctl.verify(sharded, level="fast").errors
    assert (found.tensor, found.box, found.basis) == (*chosen[0], "index")
    assert "every rank except 2 has a chunk" in str(found.why)


def test_overlapping_chunks_are_errors(sharded: Path) -> None:
    def grow(items: dict[tuple[str, Box], Item]) -> dict[tuple[str, Box], Item]:
        (name, box), item = next((k, i) for k, i in items.items() if len(k[1].sizes) == 2)
        return (
            {**items, (name, Box((0, 0), (1, 1))): item}
            if any(box.offsets)
            else {
                **{k: i for k, i in items.items() if k != (name, box)},
                (name, Box(box.offsets, (box.sizes[0] + 1, box.sizes[1]))): item,
            }
        )

    rewrite(sharded, grow)
    found = ckptctl.verify(sharded, level="fast")
    assert "elements are stored more than once" in whats(found)
    assert all(f.tensor and f.box for f in found.errors)


def test_items_overlapping_in_file_are_errors(sharded: Path) -> None:
    def shift(items: dict[tuple[str, Box], Item]) -> dict[tuple[str, Box], Item]:
        key, item = sorted(items.items(), key=lambda pair: (pair[1].file, pair[1].offset))[0]
        return {**items, key: Item(item.file, item.offset, item.nbytes + 1)}

    rewrite(sharded, shift)
    assert "two tensors overlap in a file" in whats(ckptctl.verify(sharded, level="fast"))


def test_missing_dcp_file_lists_every_lost_chunk(data: Path, tmp_path: Path) -> None:
    path = clone(data / "dcp/dcp_2d/ckpt", tmp_path)
    catalog = formats.open_checkpoint(path)
    gone = "__2_0.distcp"
    lost = {(e.name, x.box) for e in catalog.tensors.values() for x in e.extents if x.file == gone}
    (path / gone).unlink()
    found = ckptctl.verify(path, level="full")
    assert len(lost) > 10
    holes = [f for f in found.errors if f.what == "elements are missing"]
    assert {(f.tensor, f.box) for f in holes} == lost
    assert all("(rank 2)" in str(f.why) and f.file == gone for f in holes)
    assert "a data file is missing" in whats(found)
    other = path / "__1_0.distcp"
    other.write_bytes(other.read_bytes()[:-400])
    again = ckptctl.verify(path)
    assert {f.file for f in again.errors} == {gone, other.name}


def test_missing_hf_shards_list_every_lost_tensor(tiny_llama3_hf: Path, tmp_path: Path) -> None:
    path = clone(tiny_llama3_hf, tmp_path)
    lost: dict[str, str] = {}
    for number in (1, 3):
        shard = path / f"model-0000{number}-of-00003.safetensors"
        lost |= dict.fromkeys(load_file(shard), shard.name)
        shard.unlink()
    found = ckptctl.verify(path)
    named = {f.tensor: f.file for f in found.errors if f.what == "a tensor is missing"}
    assert named == lost
    assert len(found.errors) == len(lost) + 2


def test_orphan_and_leftover_files_are_warnings(sharded: Path) -> None:
    (sharded / "__9_0.distcp").write_bytes(b"x")
    (sharded / ".metadata.tmp").write_bytes(b"x")
    (sharded / "model.safetensors.partial").write_bytes(b"")
    (sharded.parent / f".{sharded.name}.ckptctl-staging").mkdir()
    found = ckptctl.verify(sharded, level="fast")
    assert found.verdict == "complete"
    assert {Path(f.file).name for f in found.findings if f.file} == {
        "__9_0.distcp",
        ".metadata.tmp",
        "model.safetensors.partial",
        f".{sharded.name}.ckptctl-staging",
    }


def test_surplus_hf_shard_is_a_warning(copied: Any) -> None:
    path = copied("our-meta")
    shutil.copy(path / "consolidated.00.pth", path / "optimizer.pth")
    assert not ckptctl.verify(path, level="fast").findings
    path = copied("hf")
    save_file({"x": torch.ones(1)}, path / "model-00009-of-00009.safetensors")
    found = ckptctl.verify(path, level="fast")
    assert found.verdict == "complete"
    assert [f.file for f in found.findings] == ["model-00009-of-00009.safetensors"]


def samples(data: Path) -> Iterator[Path]:
    for form in SAMPLES:
        yield from (path / "ckpt" for path in sorted((data / form).iterdir()) if path.is_dir())


@pytest.mark.slow
@pytest.mark.parametrize("level", get_args(Level))
def test_sharded_samples_are_complete(data: Path, level: Any) -> None:
    count = 0
    for path in samples(data):
        if path.parent.name in REFUSED or path.parent.name == "torchtitan":
            continue
        found = ckptctl.verify(path, level=level)
        assert found.verdict == "complete" and not found.findings, (path, found.findings)
        count += 1
    assert count >= 20


def is_described_as_complete(path: Path) -> bool:
    try:
        return ckptctl.inspect(path).verdict == "complete"
    except CkptError as error:
        assert error.exit_code in (4, 9)
        return False


def test_damaged_checkpoint_is_inspected_with_all_tensors(data: Path, tmp_path: Path) -> None:
    sample = data / "dcp/dcp_2d/ckpt"
    path = clone(sample, tmp_path)
    (path / "__2_0.distcp").unlink()
    whole, found = ckptctl.inspect(sample), ckptctl.inspect(path)
    assert whole.verdict == "complete" and found.verdict == "damaged"
    assert [(t.name, t.shape) for t in found.tensors] == [(t.name, t.shape) for t in whole.tensors]
    parts = "it contains parts of `model.vec`, `model.l1.weight` and 25 more"
    assert found.problems[0] == f"a data file is missing: __2_0.distcp ({parts})"
    verified = ckptctl.verify(path)
    assert len(found.problems) == len(verified.errors + verified.unknown)
    assert found.model_type == whole.model_type
    with pytest.raises(CkptError, match="missing"):
        ckptctl.convert(path, tmp_path / "out", to="dcp")


@pytest.mark.slow
def test_sharded_sample_with_any_file_deleted_is_damaged(data: Path, tmp_path: Path) -> None:
    """Without any of its files a sample is damaged, or no checkpoint that we read."""
    for number, sample in enumerate(samples(data)):
        if sample.parent.name in (*REFUSED, "torchtitan"):
            continue
        path = tmp_path / str(number)
        shutil.copytree(sample, path)
        root = Path(formats.open_checkpoint(path).root)
        for name in ckptctl.verify(sample, level="fast").files:
            content = (root / name).read_bytes()
            (root / name).unlink()
            try:
                found = ckptctl.verify(path)
            except CkptError as error:
                assert error.exit_code in (3, 5), (sample, name, error)
            else:
                if "torch_checkpointing" in sample.parts and not name.startswith(("model", "opt")):
                    pass  # its metadata speaks of no other items
                elif any("missing last ranks cannot be detected" in note for note in found.notes):
                    assert name == "shard-00002-model-00001-of-00001.safetensors"
                else:
                    assert found.verdict == "damaged", (sample, name)
                    assert any(f.why or f.tensor or f.file for f in found.errors)
                    around = found.errors[0].what == "a folder is empty"
                    assert around or not is_described_as_complete(path), (sample, name)
            (root / name).write_bytes(content)
        assert ckptctl.verify(path).verdict == "complete"


def test_latest_pointer_to_missing_save_is_reported(data: Path, tmp_path: Path) -> None:
    path = clone(data / "deepspeed/z2_rr/ckpt", tmp_path)
    (path / "latest").write_text("global_step9")
    assert ckptctl.verify(path).verdict == "unknown"
    inside = ckptctl.verify(path / "global_step2")
    assert inside.verdict == "complete"
    assert [f.what for f in inside.findings] == ["the pointer names a save that does not exist"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nan_option_names_tensors_with_nan_or_inf(tmp_path: Path) -> None:
    state = {
        "good": torch.ones(5),
        "nan": torch.tensor([1.0, float("nan")]),
        "inf": torch.tensor([float("-inf"), 2.0], dtype=torch.bfloat16),
        "eight": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn),
        "ints": torch.ones(3, dtype=torch.int64),
    }
    save_file(state, tmp_path / "model.safetensors")
    save_dcp(tmp_path / "dcp", state)
    for path in (tmp_path / "model.safetensors", tmp_path / "dcp"):
        assert ckptctl.verify(path).verdict == "complete"
        found = ckptctl.verify(path, level="fast", nan=True)
        assert {f.tensor: str(f.why)[:15] for f in found.unknown} == {
            "nan": "1 NaN and 0 Inf",
            "inf": "0 NaN and 1 Inf",
            "eight": "1 NaN and 0 Inf",
        }


@pytest.mark.parametrize("kind", ["hf", "our-dcp", "torch", "our-meta"])
def test_manifest_passes_sha256sum_check(copied: Any, kind: str) -> None:
    path = copied(kind)
    odd = "odd\nname" if path.is_dir() else None
    if odd:
        (path / odd).write_bytes(b"x")
        (path / "sub").mkdir()
        (path / "sub" / "file").write_bytes(b"y")
    found = ckptctl.verify(path, level="full", manifest=True)
    assert found.verdict == "complete" and found.manifest
    sums = Path(found.manifest)
    checked = subprocess.run(
        ["sha256sum", "--strict", "-c", sums.name], cwd=sums.parent, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file() and f != sums]
    assert checked.stdout.count(": OK") == len(files)
    with pytest.raises(RefusedError):
        ckptctl.verify(path, level="full", manifest=True)
    if odd:
        again = ckptctl.verify(path, level="full")
        assert again.verdict == "complete"
        assert again.structure_only_bytes == 0
        (path / odd).write_bytes(b"z")
        (path / "sub" / "file").unlink()
        (path / "config.json").unlink(missing_ok=True)
        said = {f"{f.what} {f.file}" for f in ckptctl.verify(path, level="full").errors}
        assert any(odd in text for text in said) and any("sub/file" in text for text in said)


def test_manifest_of_damaged_checkpoint_is_not_written(copied: Any) -> None:
    path = copied("our-dcp")
    extent = formats.resolve_codecs(formats.open_checkpoint(path)).tensors[NORM].extents[0]
    flip(path / extent.file, extent.offset)
    found = ckptctl.verify(path, level="full", manifest=True)
    assert found.verdict == "damaged" and found.manifest is None
    assert not (path / "SHA256SUMS").exists()
    assert "not written" in found.notes[-1]
    with pytest.raises(UsageError):
        ckptctl.verify(path, manifest=True)


def test_meta_checklist_checksums_are_verified(copied: Any) -> None:
    path = copied("meta")
    names = [file.name for file in sorted(path.glob("*.pth"))]
    printed = subprocess.run(["md5sum", *names], cwd=path, capture_output=True, check=True).stdout
    (path / "checklist.chk").write_bytes(printed)
    assert ckptctl.verify(path, level="full").structure_only_bytes == 0
    (path / "checklist.chk").write_bytes(printed.replace(b"0", b"1"))
    assert ckptctl.verify(path, level="full").verdict == "damaged"


def test_require_verified_exits_9_without_checksums(made: dict[str, Path]) -> None:
    words = ["verify", str(made["hf"]), "--level", "full", "--require-verified", "--quiet"]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stdout) == (9, "data not verifiable: no checksums recorded\n")
    done = CliRunner().invoke(app, [*words[:1], str(made["our-hf"]), *words[2:]])
    assert (done.exit_code, done.stdout) == (0, "")


def test_manifest_of_other_tensors_is_a_warning(copied: Any) -> None:
    path = copied("our-hf")
    state = load_file(path / "model.safetensors")
    save_file({"other": torch.ones(3), **state}, path / "model.safetensors", {"format": "pt"})
    found = ckptctl.verify(path)
    assert found.verdict == "complete"
    assert [f.file for f in found.findings] == ["ckptctl.manifest.json"]


def test_path_without_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CkptError) as caught:
        ckptctl.verify(tmp_path / "nothing")
    assert caught.value.exit_code == 3
    with pytest.raises(FormatError):
        ckptctl.verify(tmp_path)


def test_shared_storage_in_torch_file_is_no_overlap(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    torch.save({"a": base[:12], "b": base[6:18], "t": base.view(4, 6).T}, tmp_path / "m.pt")
    assert not ckptctl.verify(tmp_path / "m.pt", level="full").findings


@pytest.mark.slow
def test_verify_full_does_not_import_torch(made: dict[str, Path]) -> None:
    code = (
        "import sys, ckptctl; found = ckptctl.verify(sys.argv[1], level='full'); "
        "assert found.verdict == 'complete'; sys.exit('torch' in sys.modules)"
    )
    for kind in ("hf", "our-dcp", "meta"):
        assert subprocess.run([sys.executable, "-c", code, made[kind]], check=False).returncode == 0


def test_chunk_of_wrong_length_is_an_error() -> None:
    from ckptctl.verbs.verification.structure import _check_lengths

    entry = TensorEntry("w", "float32", (2,), (Extent(Box((0,), (2,)), "f", 0, 7),), ("w",))
    (found,) = _check_lengths(entry)
    assert "7 bytes are stored, but 8 are required" in str(found.why)
    assert not list(_check_lengths(replace(entry, dtype="bfloat16", extents=())))
