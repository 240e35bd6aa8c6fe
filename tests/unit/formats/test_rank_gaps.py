"""What is left of ranks' files when some of them cannot be used, and what they hold twice."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch

from ckptctl import formats
from ckptctl.catalog import Box, Catalog
from ckptctl.errors import CkptError, DamagedError
from ckptctl.formats.base import ReadOptions
from ckptctl.planner.boxes import compute_coverage
from tests.sweeps import one_in
from tests.unit.formats.test_rank_files import save_ranks

SAMPLES = {
    "verl": "rank_files/verl/ckpt",
    "accelerate": "rank_files/accelerate/ckpt",
    "fsdp1": "rank_files/fsdp1_sharded/ckpt",
    "experimental": "rank_files/torch_experimental/ckpt/step-2",
    "torch_checkpointing": "torch_checkpointing/two_rank/ckpt",
}
PARTIAL, REPLICAS = ReadOptions(partial=True), ReadOptions(replicas=True)


def read(path: Path, asked: ReadOptions) -> Catalog:
    return formats.detect_format(path).read(path, asked)


def held(catalog: Catalog, file: str) -> dict[str, set[Box]]:
    """Return the boxes that *file* has, whether they are used or further copies."""
    found = {
        name: {
            extent.box
            for extent in (*entry.extents, *catalog.replicas.get(name, ()))
            if extent.file == file and extent.box.numel
        }
        for name, entry in catalog.tensors.items()
    }
    return {name: boxes for name, boxes in found.items() if boxes}


def spoiled(source: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    for name in read(source, ReadOptions()).files:
        for what in ("missing", "empty", "cut"):
            copy = folder / "copy"
            shutil.copytree(source, copy)
            data = (copy / name).read_bytes()
            (copy / name).unlink()
            if what != "missing":
                (copy / name).write_bytes(data[: len(data) // 2 if what == "cut" else 0])
            yield name, copy
            shutil.rmtree(copy)


@pytest.mark.parametrize("sample", one_in(3, SAMPLES))
def test_unusable_rank_file_loses_only_its_boxes(data: Path, tmp_path: Path, sample: str) -> None:
    source = data / SAMPLES[sample]
    whole = read(source, REPLICAS)
    for name, copy in spoiled(source, tmp_path):
        found = read(copy, PARTIAL)
        if name.startswith(("raw", "config", "step", "train_state")) and not found.findings:
            continue  # bytes of any length are fine, and rank 0 may be alone in having an item
        assert [one.file for one in found.findings] == [name]
        gone = only(whole, [name])
        lost = {key: {box for box, file in boxes} for key, boxes in found.lost.items()}
        sharded = {key for key in gone if len(whole.tensors[key].extents) > 1}
        assert sharded <= lost.keys()
        for key in lost:
            assert lost[key] == gone.get(key, set())
        for key, entry in found.tensors.items():
            holes = compute_coverage(entry.shape, [extent.box for extent in entry.extents]).holes
            assert set(holes) <= lost.get(key, set())
        assert not any(
            extent.file == name for entry in found.tensors.values() for extent in entry.extents
        )
        assert found.tensors.keys() == whole.tensors.keys() - set(_own(whole, name))


def only(whole: Catalog, files: Collection[str]) -> dict[str, set[Box]]:
    """Return the boxes that no other files than *files* have."""
    mine = [held(whole, file) for file in files]
    others = [held(whole, file) for file in whole.files if file not in files]
    found = {
        key: {box for one in mine for box in one.get(key, ())}
        - {box for other in others for box in other.get(key, ())}
        for key in whole.tensors
    }
    return {key: boxes for key, boxes in found.items() if boxes}


def _own(whole: Catalog, file: str) -> Iterator[str]:
    """Yield the tensors of which *file* alone knows: values of another rank than the first."""
    for name, entry in whole.tensors.items():
        if name.startswith("rank_") and {extent.file for extent in entry.extents} == {file}:
            yield name
        elif f"rank_1.{name}" in whole.tensors and file == entry.extents[0].file:
            yield f"rank_1.{name}"  # it takes the place of the first one's


@pytest.mark.parametrize("sample", SAMPLES)
def test_partial_read_of_complete_checkpoint_is_identical(data: Path, sample: str) -> None:
    source = data / SAMPLES[sample]
    assert read(source, PARTIAL) == read(source, ReadOptions())
    assert not read(source, ReadOptions()).replicas


def test_replicas_have_same_boxes_as_used_extents(data: Path) -> None:
    found = read(data / SAMPLES["torch_checkpointing"], REPLICAS)
    assert {"model.extra.i64", "model.extra.repl_dtensor"} <= found.replicas.keys()
    assert "model.l0.weight" not in found.replicas
    for name, copies in found.replicas.items():
        used = {extent.box: extent.file for extent in found.tensors[name].extents}
        assert all(used[copy.box] != copy.file for copy in copies)


def test_large_values_are_compared_only_with_replicas_option(
    tmp_path: Path,
) -> None:
    one, other = torch.zeros(3 << 20), torch.zeros(3 << 20)
    other[-2] = 1
    source = save_ranks(tmp_path / "x", *({"w": w[1:], "s": torch.ones(1)} for w in (one, other)))
    assert "rank_1.w" not in read(source, ReadOptions()).tensors
    assert any("not compared" in note for note in read(source, ReadOptions()).notes)
    found = read(source, REPLICAS)
    assert "rank_1.w" in found.tensors and "w" not in found.replicas


def test_copies_matched_by_recorded_checksum_are_noted_unread(tmp_path: Path) -> None:
    """A flip below an unchanged checksum: nothing may be said of copies that nobody reads."""
    state = {"w": torch.arange(9.0) + 1}
    source = save_ranks(tmp_path / "x", state, state)
    path = sorted(source.iterdir())[-1]
    content = bytearray(path.read_bytes())
    content[content.index(state["w"].numpy().tobytes())] ^= 1
    path.write_bytes(content)
    found = read(source, ReadOptions())
    assert not found.replicas
    (note,) = (note for note in found.notes if "`w`" in note)
    assert "equal recorded checksums" in note
    listed = read(source, REPLICAS)
    assert listed.replicas["w"] and not any("`w`" in note for note in listed.notes)


def test_missing_rank_file_is_detected_from_another_group(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    for rank in range(3):
        torch.save({"w": torch.full((2,), rank)}, folder / f"rank_{rank}_optimizer_states.pt")
        torch.save({f"w{rank}": torch.ones(2)}, folder / f"rank_{rank}_model_states.pt")
    assert read(folder, ReadOptions())
    (folder / "rank_2_model_states.pt").unlink()
    with pytest.raises(DamagedError, match="1 of 3 ranks' files are missing") as caught:
        read(folder, ReadOptions())
    assert caught.value.why == "`rank_2_model_states.pt`"
    assert [one.file for one in read(folder, PARTIAL).findings] == ["rank_2_model_states.pt"]


def test_file_only_on_rank_0_is_not_missing_elsewhere(tmp_path: Path) -> None:
    folder = save_ranks(
        tmp_path / "x",
        *({f"w{n}": torch.ones(2)} for n in range(2)),
        name="rank_{}_model_states.pt",
    )
    torch.save({"step": 3}, folder / "extra_state_rank_0.pt")
    assert read(folder, ReadOptions()).blobs["extra_state.step"].value == 3


def test_plain_tensors_note_possibly_missing_last_ranks(data: Path, tmp_path: Path) -> None:
    source = save_ranks(tmp_path / "x", *({f"w{n}": torch.ones(2)} for n in range(2)))
    assert any("missing last ranks" in note for note in read(source, ReadOptions()).notes)
    for sample in ("verl", "fsdp1", "experimental"):
        assert not any(
            "missing last ranks" in n for n in read(data / SAMPLES[sample], ReadOptions()).notes
        )


def test_swapped_rank_file_is_refused_in_partial_read(data: Path, tmp_path: Path) -> None:
    source = tmp_path / "copy"
    shutil.copytree(data / SAMPLES["verl"], source)
    names = [source / f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1)]
    names[0].write_bytes(names[1].read_bytes())
    with pytest.raises(CkptError, match="is not the file of rank 0"):
        read(source, PARTIAL)


def test_huge_world_size_is_damaged(tmp_path: Path) -> None:
    source = tmp_path / "x"
    source.mkdir()
    torch.save({"w": torch.ones(1)}, source / "model_world_size_9999999_rank_0.pt")
    with pytest.raises(DamagedError, match="9,999,998 of 9,999,999"):
        read(source, PARTIAL)


def test_tensors_without_usable_files_keep_shapes_from_metadata(data: Path, tmp_path: Path) -> None:
    source = tmp_path / "copy"
    shutil.copytree(data / SAMPLES["torch_checkpointing"], source)
    whole = read(source, ReadOptions())
    for rank in (0, 1):
        (source / f"model_{rank}.pt").unlink()
    found = read(source, PARTIAL)
    assert found.tensors.keys() == whole.tensors.keys()
    assert found.tensors["model.l0.weight"].shape == whole.tensors["model.l0.weight"].shape
    assert not found.tensors["model.l0.weight"].extents
    assert found.lost["model.l0.weight"][0][1] == "model_0.pt"


def test_partial_read_ignores_damaged_metadata(data: Path, tmp_path: Path) -> None:
    source = tmp_path / "copy"
    shutil.copytree(data / SAMPLES["torch_checkpointing"], source)
    whole = read(source, ReadOptions())
    (source / "metadata.pkl").write_bytes(b"\x80\x04")
    found = read(source, PARTIAL)
    assert found.tensors == whole.tensors
    assert [one.file for one in found.findings] == ["metadata.pkl"]
