"""What ``--allow-missing``, ``--verify-replicas`` and ``--tied`` write, and what they do not.

Which tensors a file holds is asked of torch and safetensors, not of the readers under test.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import ckptctl
from ckptctl.errors import CkptError, DamagedError, UnsupportedError, UsageError
from ckptctl.formats.shared import stored_leaves
from ckptctl.verdict import STRUCTURE_COMPLETE
from tests.checkpoints import differences, load_any_reference, save_dcp, save_hf, tiny_llama
from tests.contract.samples import SAMPLES
from tests.contract.samples import expected as truth_of
from tests.contract.support import message, refused, snapshot
from tests.sweeps import one_in

STATE, CONFIG = tiny_llama("llama3")
TWO_D = "dcp/dcp_2d/ckpt"
RANKS = "dcp-rank-local/w2/ckpt"
SHARDS = "hf-rank-shards/hf_sharded/ckpt"


@pytest.fixture
def copied(data: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return the function that copies a sample to be damaged."""

    def copy(sample: str) -> Path:
        target = tmp_path / "in" / "source"
        shutil.copytree(data / sample, target, copy_function=shutil.copyfile)
        target.chmod(0o755)
        return target

    return copy


def partly(source: Path, target: Path, to: str = "hf", **options: Any) -> Any:
    """Convert what is whole."""
    return ckptctl.convert(source, target, to=to, allow_missing=True, **options)


def inside(path: Path, file: str) -> set[str]:
    """Return the names of which torch says that a part lies in *file*."""
    stored = FileSystemReader(path).read_metadata().storage_data
    return {index.fqn for index, info in stored.items() if info.relative_path == file}


# ----------------------------------------------------------------------------------- allow_missing


@pytest.mark.parametrize("to", one_in(3, ["hf", "dcp", "torch"]))
@pytest.mark.parametrize("level", ["gone", "cut"])
def test_allow_missing_skips_tensors_of_missing_dcp_file(
    copied: Callable[[str], Path], tmp_path: Path, to: str, level: str
) -> None:
    source = copied(TWO_D)
    whole = load_any_reference(source)
    file = source / "__2_0.distcp"
    lost = inside(source, file.name)
    if level == "gone":
        file.unlink()
    else:
        file.write_bytes(b"PK")
    before = snapshot(source)
    with refused(source, tmp_path / "out", 4):
        ckptctl.convert(source, tmp_path / "out", to=to)
    done = partly(source, tmp_path / "out", to)
    assert not any(note.startswith(STRUCTURE_COMPLETE) for note in done.plan.notes)
    names = {name.removeprefix("model."): name for name in whole if name.startswith("model.")}
    expected = {short: whole[name] for short, name in names.items() if name not in lost}
    assert expected and lost
    assert not differences(load_any_reference(tmp_path / "out"), expected)
    assert done.missing.keys() == {name for name in lost if name.startswith("model.")}
    assert all(file.name in why for why in done.missing.values())
    assert snapshot(source) == before


def test_optimizer_state_is_written_only_with_its_parameter(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copied(TWO_D)
    before = FileSystemReader(source).read_metadata().state_dict_metadata
    lost = inside(source, "__3_0.distcp")
    (source / "__3_0.distcp").unlink()
    done = partly(source, tmp_path / "out", "dcp", only="all")
    written = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert written.keys() | done.missing.keys() == before.keys()
    assert not written.keys() & done.missing.keys()
    assert lost <= done.missing.keys()
    states = {name.split(".state.")[1] for name in written if ".state." in name}
    parameters = {name.removeprefix("model.") for name in written if name.startswith("model.")}
    owners = {state.rpartition(".")[0] for state in states}
    assert owners <= parameters
    for owner in owners:
        assert {f"{owner}.{slot}" for slot in ("step", "exp_avg", "exp_avg_sq")} <= states
    plain = [name for name, one in before.items() if isinstance(one, BytesStorageMetadata)]
    kept = set(plain) - lost
    assert kept and kept <= written.keys() | done.missing.keys()


def test_allow_missing_on_complete_checkpoint_changes_nothing(data: Path, tmp_path: Path) -> None:
    ckptctl.convert(data / TWO_D, tmp_path / "a", to="hf")
    done = partly(data / TWO_D, tmp_path / "b", verify_replicas=True)
    assert not done.missing
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


def test_allow_missing_skips_corrupt_dcp_item(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its zip is not one: neither the index nor the length of the file shows it."""
    source = copied(TWO_D)
    stored = FileSystemReader(source).read_metadata().storage_data
    index, info = next((i, s) for i, s in stored.items() if i.fqn == "model.l1.weight")
    content = bytearray((source / info.relative_path).read_bytes())
    content[info.offset + info.length - 10] ^= 255
    (source / info.relative_path).write_bytes(content)
    done = partly(source, tmp_path / "out")
    assert done.missing.keys() == {index.fqn}
    assert "l1.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("damage", ["gone", "cut", "stale"])
def test_allow_missing_skips_tensors_of_damaged_hf_shard(tmp_path: Path, damage: str) -> None:
    source = save_hf(tmp_path / "in" / "source", STATE, CONFIG, shards=3)
    shard = sorted(source.glob("*.safetensors"))[1]
    with safe_open(shard, "pt") as opened:
        lost = set(opened.keys())
    if damage == "gone":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        shutil.copyfile(sorted(source.glob("*.safetensors"))[0], shard)
    with refused(source, tmp_path / "never", 4):
        ckptctl.convert(source, tmp_path / "never", to="dcp")
    done = partly(source, tmp_path / "out", "dcp")
    expected = {name: value for name, value in STATE.items() if name not in lost}
    assert not differences(load_any_reference(tmp_path / "out"), expected)
    assert done.missing.keys() == lost
    manifest = json.loads((tmp_path / "out" / "ckptctl.manifest.json").read_text())
    assert set(manifest["source"]["missing"]) == lost


def test_shard_missing_an_indexed_tensor_is_skipped_entirely(tmp_path: Path) -> None:
    """It lacks one tensor of the index: nothing says that the others are those of this save."""
    from safetensors.torch import save_file

    source = save_hf(tmp_path / "in" / "source", STATE, CONFIG, shards=3)
    shard = sorted(source.glob("*.safetensors"))[2]
    tensors = load_file(shard)
    lost = set(tensors)
    tensors.popitem()
    save_file(tensors, shard, {"format": "pt"})
    assert partly(source, tmp_path / "out", "dcp").missing.keys() == lost


def test_tied_name_is_missing_with_its_tensor(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = tmp_path / "in" / "source"
    source.mkdir(parents=True)
    for number, name in enumerate("ac", 1):
        save_file(
            {name: torch.ones(3)},
            source / f"model-0000{number}-of-00002.safetensors",
            {"format": "pt"},
        )
    index = {
        "metadata": {"b": "a"},
        "weight_map": {n: f"model-0000{i}-of-00002.safetensors" for i, n in ((1, "a"), (2, "c"))},
    }
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ckptctl.plan_conversion(source, tmp_path / "out", to="dcp").tensors == 3
    (source / "model-00001-of-00002.safetensors").unlink()
    done = partly(source, tmp_path / "out", "dcp")
    assert done.missing.keys() == {"a", "b"}
    assert load_any_reference(tmp_path / "out").keys() == {"c"}


def test_allow_missing_still_converts_layout(tmp_path: Path) -> None:
    from tests.checkpoints import rename, to_meta_names

    source = save_dcp(tmp_path / "in" / "source", STATE, thread_count=2, single_file_per_rank=False)
    (source / "config.json").write_text(json.dumps(CONFIG))
    file = max(source.glob("*.distcp"), key=lambda one: len(inside(source, one.name)))
    lost = {min(inside(source, file.name))}
    keep_all_but(source, lost)
    done = partly(source, tmp_path / "o.pt", "torch", to_layout="torchtune")
    assert done.missing.keys() == lost and done.plan.from_layout == "hf"
    whole = rename(to_meta_names(STATE, CONFIG), "meta", "torchtune")
    new = dict(zip(STATE, rename(STATE, "hf", "torchtune"), strict=True))
    expected = {new[name]: whole[new[name]] for name in STATE if name not in lost}
    assert not differences(load_any_reference(tmp_path / "o.pt"), expected)


def keep_all_but(source: Path, lost: set[str]) -> None:
    """Let the metadata place *lost* in a file that is not there."""
    metadata: Metadata = pickle.loads((source / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn in lost:
            info.relative_path = "__9_0.distcp"
    (source / ".metadata").write_bytes(pickle.dumps(metadata))


def test_missing_lists_only_selected_tensors(copied: Callable[[str], Path], tmp_path: Path) -> None:
    source = copied(TWO_D)
    lost = {name for name in inside(source, "__2_0.distcp") if name.startswith("model.")}
    (source / "__2_0.distcp").unlink()
    assert not partly(source, tmp_path / "out", exclude=sorted(lost)).missing
    some = sorted(lost)[0]
    assert partly(source, tmp_path / "o", include=[some, "emb.*"]).missing.keys() == {some}


def test_allow_missing_without_any_data_file_is_damaged(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copied(TWO_D)
    for file in source.glob("*.distcp"):
        file.unlink()
    with refused(source, tmp_path / "out", 4) as caught:
        partly(source, tmp_path / "out")
    assert "complete" in message(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("file", ["__{}.metadata", "__{}_0.distcp"])
def test_allow_missing_skips_tensors_of_missing_rank_file(
    copied: Callable[[str], Path], data: Path, tmp_path: Path, rank: int, file: str
) -> None:
    """What the other rank has a copy of is whole; of its parts nothing is written."""
    source = copied(RANKS)
    own = pickle.loads((source / f"__{1 - rank}.metadata").read_bytes())
    truth = load_file(data / "dcp-rank-local" / "w2" / "expected.safetensors")
    (source / file.format(rank)).unlink()
    done = partly(source, tmp_path / "out")
    full = {
        name.removeprefix("model.")
        for name, entry in own.state_dict_metadata.items()
        if name.startswith("model.") and [c.sizes for c in entry.chunks] == [entry.size]
    }
    expected = {name: truth[name] for name in full}
    assert full and not differences(load_file(tmp_path / "out" / "model.safetensors"), expected)
    assert {n.removeprefix("model.") for n in done.missing if n.startswith("model.")} == (
        truth.keys() - full
    )
    # What only that rank had has no name when its metadata is gone.
    assert (f"__{rank}.metadata" in done.missing) == file.endswith("metadata")


@pytest.mark.parametrize("length", [0, 100])
def test_truncated_rank_metadata_is_missing_and_damaged(
    copied: Callable[[str], Path], tmp_path: Path, length: int
) -> None:
    source = copied(RANKS)
    (source / "__1.metadata").write_bytes((source / "__1.metadata").read_bytes()[:length])
    done = partly(source, tmp_path / "out", "torch")
    assert "__1.metadata" in done.missing
    found = ckptctl.verify(source)
    assert any(f.file == "__1.metadata" for f in found.errors)
    assert any(f.what == "elements are missing" for f in found.errors)


def test_allow_missing_still_refuses_ranks_of_two_saves(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copied(RANKS)
    shutil.copyfile(source / "__0.metadata", source / "__1.metadata")
    with refused(source, tmp_path / "out", 9):
        partly(source, tmp_path / "out")


def test_only_scalars_survive_missing_first_rank_shard(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    """Only 0-d tensors are surely whole: how far the others reach is said by their shards alone."""
    source = copied(SHARDS)
    first, second = sorted(source.glob("shard-*"))
    with safe_open(second, "pt") as opened:
        names = list(opened.keys())
        scalars = {name for name in names if not opened.get_slice(name).get_shape()}
    first.unlink()
    if scalars:
        done = partly(source, tmp_path / "out", "torch")
        assert load_any_reference(tmp_path / "out").keys() == scalars
        assert first.name in done.missing
    else:
        with refused(source, tmp_path / "out", 4):
            partly(source, tmp_path / "out", "torch")
    found = ckptctl.verify(source)
    assert found.errors[0].file == first.name
    assert any(f.what == "elements are missing" for f in found.errors)


@pytest.mark.parametrize(
    ("sample", "folder", "root"),
    [("torchsnapshot", "snap", "model.module"), ("bytecheckpoint", "global_step_1/model", None)],
)
def test_allow_missing_with_each_file_deleted(
    data: Path, tmp_path: Path, sample: str, folder: str, root: str | None
) -> None:
    """Each file in turn: what is written is right, and what is not written is listed."""
    truth = load_file(data / "wrappers" / sample / "expected.safetensors")
    origin = data / "wrappers" / sample / "ckpt" / folder
    catalog = ckptctl.plan_conversion(origin, tmp_path / "none", to="hf", root=root).source
    top, losses = Path(catalog.root), 0
    for number, name in enumerate(sorted(catalog.files)):
        source = tmp_path / str(number) / "source"
        shutil.copytree(top, source)
        source.chmod(0o755)
        (source / name).parent.chmod(0o755)
        (source / name).unlink()
        try:
            done = partly(source, tmp_path / str(number) / "out.pt", "torch", root=root)
        except DamagedError as error:
            assert "complete" in error.what
            continue
        written = load_any_reference(tmp_path / str(number) / "out.pt")
        prefix = done.plan.recognition.root
        lost = {n.removeprefix(prefix) for n in done.missing if n.startswith(prefix)}
        losses += len(lost)
        assert written.keys() | lost >= truth.keys() and not written.keys() & lost
        assert not differences(written, {n: v for n, v in truth.items() if n in written})
    assert losses


UNKNOWABLE = ("dcp_hf_sharded/hf_sharded", "shard-00002-model-00001-of-00001.safetensors")
"""No shard records the size of the whole: without its last ranks a checkpoint looks like one."""


@pytest.mark.parametrize("how", ["gone", "half"])
@pytest.mark.parametrize(
    "name", one_in(9, [n for n, sample in SAMPLES.items() if not sample.refused])
)
def test_allow_missing_output_of_damaged_sample_is_exact(
    data: Path, tmp_path: Path, name: str, how: str
) -> None:
    """Each file of each sample in turn, whether its format reads a part or refuses."""
    sample, truth = SAMPLES[name], truth_of(data, name)
    top = tmp_path / "in" / "ckpt"
    shutil.copytree(data / sample.folder / "ckpt", top, copy_function=shutil.copyfile)
    for folder in (top, *(item for item in top.rglob("*") if item.is_dir())):
        folder.chmod(0o755)
    options: dict[str, Any] = {"root": sample.root, "exclude": sample.exclude}
    files = {item.name for item in top.rglob("*") if item.is_file()}
    for file in sorted(item for item in top.rglob("*") if item.is_file()):
        if (name, file.name) == UNKNOWABLE and how == "gone":
            continue
        content = file.read_bytes()
        if how == "gone":
            file.unlink()
        else:
            file.write_bytes(content[: len(content) // 2])
        try:
            done = partly(
                sample.within(top), tmp_path / "out.pt", "torch", overwrite=True, **options
            )
        except CkptError as error:
            assert error.exit_code in (3, 4, 5, 9), (file, message(error))
        else:
            written = {
                n: v for n, v in load_any_reference(tmp_path / "out.pt").items() if n in truth
            }
            assert not differences(written, {n: truth[n] for n in written}), file
            root = done.plan.recognition.root
            absent = {n for n in truth.keys() - written.keys() if root + n not in done.missing}
            assert not absent or files & done.missing.keys(), (file, sorted(absent)[:3])
        file.write_bytes(content)


# --------------------------------------------------------------------------------- verify_replicas


def flip_copy(source: Path, *, recorded: bool = True) -> tuple[str, str]:
    """Change a replicated tensor in rank 1's file; return name and file.

    *recorded*: with its checksum.
    """
    metadata = pickle.loads((source / "__1.metadata").read_bytes())
    index, info = next((i, s) for i, s in metadata.storage_data.items() if i.fqn == "model.count")
    file = source / info.relative_path
    content = bytearray(file.read_bytes())
    item = content[info.offset : info.offset + info.length]
    value = torch.load(io.BytesIO(item), weights_only=True)
    raw = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    start = bytes(item).index(raw)
    item[start] ^= 1
    content[info.offset : info.offset + info.length] = with_crc(item) if recorded else item
    file.write_bytes(content)
    return index.fqn, info.relative_path


def with_crc(item: bytearray) -> bytes:
    """Return a zip with the checksums of what it holds, in the same number of bytes."""
    with zipfile.ZipFile(io.BytesIO(bytes(item))) as archive:
        infos = archive.infolist()
    for info in infos:
        fields = item[info.header_offset + 26 : info.header_offset + 30]
        name_length = int.from_bytes(fields[:2], "little")
        extra = int.from_bytes(fields[2:], "little")
        begin = info.header_offset + 30 + name_length + extra
        crc = zlib.crc32(item[begin : begin + info.file_size]).to_bytes(4, "little")
        old = info.CRC.to_bytes(4, "little")
        if crc != old:
            item = bytearray(bytes(item).replace(old, crc))
    return bytes(item)


def test_verify_replicas_refuses_differing_replicas(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copied(RANKS)
    assert ckptctl.verify(source, level="full").verdict == "complete"
    name, file = flip_copy(source)
    assert ckptctl.verify(source).verdict == "complete"  # a matter of the data
    (found,) = ckptctl.verify(source, level="full").unknown
    assert (found.tensor, found.file, found.what) == (name, file, "replicas have different values")
    ckptctl.convert(source, tmp_path / "unasked", to="hf")
    with refused(source, tmp_path / "out", 9) as caught:
        ckptctl.convert(source, tmp_path / "out", to="hf", verify_replicas=True)
    assert name in message(caught.value) and file in message(caught.value)
    assert "__0_0.distcp" in message(caught.value)


def test_verify_replicas_reads_replicas_with_matching_checksums(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copied(RANKS)
    name, file = flip_copy(source, recorded=False)
    with refused(source, tmp_path / "out", 9) as caught:
        ckptctl.convert(source, tmp_path / "out", to="hf", verify_replicas=True)
    assert name in message(caught.value) and file in message(caught.value)


def test_verify_replicas_reads_replicas_without_checksums(
    copied: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = copied(RANKS)
    real = stored_leaves.make_extent

    def unchecked(*args: Any) -> Any:
        return replace(real(*args), crc32=None, within=None)

    monkeypatch.setattr("ckptctl.formats.dcp.locating.make_extent", unchecked)
    ckptctl.convert(source, tmp_path / "equal", to="hf", verify_replicas=True)
    flip_copy(source)
    with pytest.raises(UnsupportedError, match="replicas"):
        ckptctl.convert(source, tmp_path / "out", to="hf", verify_replicas=True)


# -------------------------------------------------------------------------------------------- tied


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    weight = torch.arange(12.0).view(3, 4)
    path = tmp_path / "in" / "m.pt"
    path.parent.mkdir()
    torch.save({"emb": weight, "head": weight, "norm": torch.ones(3)}, path)
    return path


@pytest.mark.parametrize("to", ["hf", "dcp", "torch"])
def test_tied_option_copies_or_drops_tied_tensor(shared: Path, tmp_path: Path, to: str) -> None:
    whole = torch.load(shared, weights_only=True)
    both = ckptctl.convert(shared, tmp_path / "copy", to=to, tied="copy")
    assert not differences(load_any_reference(tmp_path / "copy"), whole)
    one = ckptctl.convert(shared, tmp_path / "drop", to=to, tied="drop")
    expected = {name: value for name, value in whole.items() if name != "head"}
    assert not differences(load_any_reference(tmp_path / "drop"), expected)
    assert one.plan.dropped.keys() == {"head"} and "emb" in one.plan.dropped["head"]
    assert one.plan.nbytes < both.plan.nbytes and not both.plan.dropped
    if to == "torch":
        copied = torch.load(tmp_path / "copy", weights_only=True)
        assert copied["emb"].data_ptr() != copied["head"].data_ptr()
    if to == "hf":  # as safetensors records what it leaves out
        with safe_open(tmp_path / "drop" / "model.safetensors", "pt") as opened:
            assert opened.metadata()["head"] == "emb"


def test_tied_option_without_tied_tensors_changes_nothing(data: Path, tmp_path: Path) -> None:
    for how in ("drop", "copy"):
        ckptctl.convert(data / TWO_D, tmp_path / how, to="hf", tied=how)
    assert snapshot(tmp_path / "drop") == snapshot(tmp_path / "copy")


# ---------------------------------------------------------------------------------- contradictions


@pytest.mark.parametrize(
    "options",
    [
        {"tied": "both"},
        {"tied": "drop", "untie": True},
        {"allow_missing": True, "dequantize": "bf16"},
    ],
    ids=str,
)
def test_conflicting_or_invalid_tied_options_are_refused(
    data: Path, tmp_path: Path, options: Any
) -> None:
    with pytest.raises(UsageError):
        ckptctl.plan_conversion(data / TWO_D, tmp_path / "out", to="hf", **options)
