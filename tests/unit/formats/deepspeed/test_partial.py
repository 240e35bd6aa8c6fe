"""DeepSpeed checkpoints that are not whole: what is lost, what is left, and what ranks repeat."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import ckptctl
from ckptctl import formats
from ckptctl.catalog import Catalog, Extent
from ckptctl.errors import (
    CkptError,
    CoverageError,
    DamagedError,
    FormatError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptctl.formats import deepspeed, deepspeed_universal
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.deepspeed.states import read_optim_state
from ckptctl.formats.deepspeed.zero import fill_missing_optims
from ckptctl.planner.boxes import compute_coverage
from ckptctl.storage.files import source_files
from ckptctl.storage.schema import MalformedError
from tests.checkpoints.readers import differences
from tests.sweeps import one_in
from tests.unit.formats.damage import converted, refused_or_right

ZERO = (
    "lightning",
    "z1_bf16opt",
    "z1_frozen_fp32",
    "z2_align",
    "z2_elastic",
    "z2_rr",
    "z2_tiny_w4",
    "z3_fp32",
    "z3_sub_w3",
)
UNIVERSAL = ("universal_z2_w3", "universal_z3_sub_w3")
FOLDER = "global_step2_universal"
BUFFERS = ("mask", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked")
Weights = Literal["master", "module"] | None


def sample(data: Path, name: str) -> Path:
    return data / "deepspeed" / name / "ckpt"


def read(path: Path, weights: Weights = None, *, part: bool = True) -> Catalog:
    known: Any = deepspeed_universal if "universal" in str(path) else deepspeed
    found: Catalog = known.FORMAT.read(
        path, ReadOptions(weights=weights, partial=part, replicas=True)
    )
    return found


def files_of(source: Path, end: str) -> list[str]:
    return sorted(str(path.relative_to(source)) for path in source.rglob(f"*{end}"))


def damaged(source: Path, folder: Path, end: str) -> Iterator[tuple[str, Path]]:
    """Yield copies without one of the files called so, or with a part of it."""
    for name in files_of(source, end):
        for length in (None, 0, 5000):
            copy = folder / f"{source.parent.name}-damaged"
            shutil.copytree(source, copy)
            if length is None:
                (copy / name).unlink()
            else:
                os.truncate(copy / name, length)
            yield name, copy
            shutil.rmtree(copy)


def model_of(catalog: Catalog) -> dict[str, Sequence[Extent]]:
    return {n: entry.extents for n, entry in catalog.tensors.items() if n.startswith("module.")}


def moments_of(catalog: Catalog) -> dict[str, Sequence[Extent]]:
    return {n: entry.extents for n, entry in catalog.tensors.items() if "exp_avg" in n}


def held(extents: Sequence[Extent], file: str) -> tuple[Any, ...]:
    return tuple((extent.box, extent.file) for extent in extents if extent.file == file)


# ------------------------------------------------------------------------------------ partitions


@pytest.mark.parametrize("name", one_in(3, [*ZERO, *UNIVERSAL, "z0_bf16"]))
def test_partial_read_of_complete_checkpoint_is_identical(data: Path, name: str) -> None:
    assert read(sample(data, name)) == read(sample(data, name), part=False)
    assert not read(sample(data, name)).findings
    assert not read(sample(data, name)).lost


@pytest.mark.parametrize("weights", [None, "module"])
@pytest.mark.parametrize("name", one_in(4, ZERO))
def test_missing_optim_file_loses_only_its_extents(
    data: Path, tmp_path: Path, name: str, weights: Weights
) -> None:
    """Where every byte of the whole checkpoint lies is proven against DeepSpeed's own tools."""
    if weights and "z3" in name:
        return
    source = sample(data, name)
    whole = read(source, weights)
    for gone, copy in damaged(source, tmp_path, "optim_states.pt"):
        found = read(copy, weights)
        (finding,) = found.findings
        assert (finding.file, finding.severity, finding.tensor) == (gone, "error", None)
        for tensor, extents in {**model_of(whole), **moments_of(whole)}.items():
            left = tuple(e for e in extents if e.file != gone)
            assert found.tensors[tensor].extents == left, tensor
            assert found.lost.get(tensor, ()) == held(extents, gone), tensor
        assert found.tensors.keys() == whole.tensors.keys()
        assert gone not in found.files
        lost = any(tensor.startswith("module.") for tensor in found.lost)
        assert lost == (weights is None)
        with pytest.raises(CkptError):
            formats.open_checkpoint(copy, options=ReadOptions(weights=weights))


@pytest.mark.parametrize("name", ["z3_fp32", "z3_sub_w3"])
def test_missing_model_states_lose_frozen_shards_and_buffers(
    data: Path, tmp_path: Path, name: str
) -> None:
    source = sample(data, name)
    whole = read(source)
    for gone, copy in damaged(source, tmp_path, "model_states.pt"):
        found = read(copy)
        frozen = found.tensors["module.frz.weight"]
        assert found.lost["module.frz.weight"] == held(model_of(whole)["module.frz.weight"], gone)
        assert compute_coverage(frozen.shape, [e.box for e in frozen.extents]).holes
        first = "rank_0_" in gone
        buffers = {f"module.{buffer}" for buffer in BUFFERS if first}
        assert found.lost.keys() == {"module.frz.weight", *buffers}
        unknown = {"module.head.weight"} if first else set()
        assert whole.tensors.keys() - found.tensors.keys() - unknown <= whole.tensors.keys()
        assert model_of(whole).keys() - model_of(found).keys() == unknown
        assert {f.tensor for f in found.findings} == {None, *unknown}
        assert found.findings[0].file == gone


def test_missing_partitions_are_not_replaced_by_module_weights(data: Path, tmp_path: Path) -> None:
    """What the module has is not what the partitions had, so it does not stand for that."""
    for name in ("z1_bf16", "z3_fp32"):
        copy = tmp_path / name
        shutil.copytree(sample(data, name), copy)
        for file in files_of(copy, "optim_states.pt"):
            (copy / file).unlink()
        found = read(copy)
        missing = {finding.tensor for finding in found.findings}
        assert missing >= {"module.emb.weight", "module.scale", "module.head.weight"}
        assert "module.emb.weight" not in found.tensors
        assert found.tensors["module.mask"].extents
    assert not read(tmp_path / "z1_bf16", "module").lost


def test_single_remaining_rank_keeps_its_extents(data: Path, tmp_path: Path) -> None:
    for kept in range(3):
        copy = tmp_path / str(kept)
        shutil.copytree(sample(data, "z3_sub_w3"), copy)
        for file in files_of(copy, "optim_states.pt"):
            if f"rank_{kept}_" not in file:
                (copy / file).unlink()
        found, whole = read(copy), read(sample(data, "z3_sub_w3"))
        for tensor, extents in model_of(whole).items():
            left = tuple(e for e in extents if f"rank_{kept}_" in e.file or "model" in e.file)
            assert model_of(found)[tensor] == left


def test_legacy_torch_optim_files_are_refused(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sample(data, "z1_bf16"), copy)
    for name in files_of(copy, "optim_states.pt"):
        torch.save({}, copy / name, _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match="legacy torch file"):
        read(copy)


def test_contradicting_or_missing_model_states_are_refused(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sample(data, "z2_tiny_w4"), copy)
    folder = copy / "global_step2"
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    states = folder / "mp_rank_00_model_states.pt"
    content = torch.load(states, weights_only=True)
    content["param_shapes"][0]["more"] = torch.Size([4000])
    torch.save(content, states)
    with pytest.raises(UnsupportedError, match="do not match"):
        read(copy)
    states.unlink()
    with pytest.raises(DamagedError, match="mp_rank_00_model_states"):
        read(copy)


def test_partition_length_mismatch_is_malformed(data: Path) -> None:
    with source_files(sample(data, "z1_bf16")) as files:
        first = read_optim_state(
            files, "global_step2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
        )
    numel = first.partitions[0].numel
    for shape in ((2 * numel + 4,), (2 * numel - 5,)):
        with pytest.raises(MalformedError, match="element"):
            fill_missing_optims([first, None], ["a", "b"], [{"w": shape}])
    assert len(fill_missing_optims([first, None], ["a", "b"], [{"w": (2 * numel - 1,)}])) == 2


def test_swapped_rank_files_are_both_lost(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sample(data, "z3_fp32"), copy)
    first, second = (copy / name for name in files_of(copy, "optim_states.pt"))
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    found = read(copy)
    assert [finding.what for finding in found.findings] == [
        f"`{first.name}` belongs to another rank"
    ]
    second.write_bytes(contents[0])
    assert "module.emb.weight" not in read(copy).tensors


# -------------------------------------------------------------------------------------- replicas


def test_replicas_are_listed_with_box_and_checksum(data: Path) -> None:
    found = read(sample(data, "z3_sub_w3"), part=False)
    assert {n: len(copies) for n, copies in found.replicas.items() if "module" in n} == {
        "module.mask": 2,
        "module.bn.num_batches_tracked": 2,
    }
    assert len(found.replicas["optimizer.state.scale.step"]) == 2
    for name, copies in found.replicas.items():
        (extent,) = found.tensors[name].extents
        assert {copy.box for copy in copies} == {extent.box}
        assert {copy.crc32 for copy in copies} == {extent.crc32}
        assert extent.file not in {copy.file for copy in copies}
    assert not formats.open_checkpoint(sample(data, "z3_sub_w3")).replicas


def test_buffers_that_differ_by_rank_are_kept_per_rank(data: Path, tmp_path: Path) -> None:
    source = sample(data, "z3_sub_w3")
    found = converted(source, tmp_path, only="all")
    for rank in (1, 2):
        file = source / f"global_step2/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        live = torch.load(file, weights_only=True)["module"]["bn.running_mean"]
        name = "bn.running_mean"
        assert not differences({name: found[f"rank_{rank}.module.{name}"]}, {name: live})
    assert any("under `rank_N.`" in note for note in formats.open_checkpoint(source).notes)


def test_differing_trainer_values_are_kept_per_rank(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sample(data, "z3_fp32"), copy)
    for rank in (0, 1):
        path = copy / f"global_step2/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        state = {"rng": torch.tensor([rank]), "seed": rank, "same": torch.ones(2), "epoch": 1}
        torch.save({**torch.load(path, weights_only=True), **state}, path)
    found = converted(copy, tmp_path, only="all")
    assert (found["seed"], found["rank_1.seed"], found["epoch"]) == (0, 1, 1)
    assert not differences({"rng": found["rank_1.rng"]}, {"rng": torch.tensor([1])})
    assert not {"rank_1.same", "rank_1.epoch"} & found.keys()
    assert any("`rng`" in note or "`seed`" in note for note in read(copy).notes)


# ------------------------------------------------------------------------------------- universal


@pytest.mark.parametrize("name", UNIVERSAL)
def test_missing_universal_parameter_file_loses_one_tensor(
    data: Path, tmp_path: Path, name: str
) -> None:
    whole = read(sample(data, name))
    for key in ("fp32", "exp_avg", "exp_avg_sq"):
        tensor = "module.emb.weight" if key == "fp32" else f"optimizer.state.emb.weight.{key}"
        for gone, copy in damaged(sample(data, name), tmp_path, f"/emb.weight/{key}.pt"):
            found = read(copy)
            assert tensor in found.lost
            shared = {"module.head.weight"} if key == "fp32" and "z3" in name else set()
            assert found.lost.keys() == {tensor, *shared}
            entry = found.tensors[tensor]
            assert (entry.shape, entry.dtype, entry.extents) == ((37, 13), "float32", ())
            assert {finding.file for finding in found.findings} == {gone}
            assert found.tensors.keys() == whole.tensors.keys()


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step"])
def test_missing_optimizer_state_fails_full_convert(data: Path, tmp_path: Path, key: str) -> None:
    copy = tmp_path / "universal"
    shutil.copytree(sample(data, "universal_z2_w3"), copy)
    (copy / FOLDER / "zero/scale" / f"{key}.pt").unlink()
    found = converted(copy, tmp_path)
    assert "scale" in found
    with pytest.raises(CoverageError, match=rf"optimizer\.state\.scale\.{key}"):
        ckptctl.convert(copy, tmp_path / "out.pt", to="torch", only="all")
    checked = ckptctl.verify(copy)
    assert {finding.tensor for finding in checked.errors} == {f"optimizer.state.scale.{key}"}


def test_missing_universal_parameter_folder_loses_all_its_tensors(
    data: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "universal"
    shutil.copytree(sample(data, "universal_z2_w3"), copy)
    shutil.rmtree(copy / FOLDER / "zero/fc1.bias")
    found = read(copy)
    keys = ("exp_avg", "exp_avg_sq", "step")
    states = {f"optimizer.state.fc1.bias.{key}" for key in keys}
    assert found.lost.keys() == {"module.fc1.bias", *states}
    assert len(found.findings) == 4
    for name in ("zero/optimizer_state.pt", "mp_rank_00_model_states.pt"):
        (copy / FOLDER / name).write_bytes(b"PK\3\4")
        if "mp" in name:
            with pytest.raises(DamagedError):
                read(copy)
        else:
            assert f"{FOLDER}/{name}" in {finding.file for finding in read(copy).findings}


# ------------------------------------------------------------------------------------ flipped bits


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", one_in(3, ["z1_bf16opt", "z2_rr", "z3_sub_w3", "universal_z3_sub_w3"])
)
def test_flipped_bits_in_records_are_refused_or_harmless(
    data: Path, tmp_path: Path, name: str
) -> None:
    """Parameters are parts of records; their checksums are checked all the same."""
    copy = tmp_path / name
    shutil.copytree(sample(data, name), copy)
    expected: Any = {
        key: value
        for key, value in converted(copy, tmp_path, only="all").items()
        if isinstance(value, torch.Tensor)
    }
    refused = 0
    for path in sorted(copy.rglob("*_states.pt")):
        content = path.read_bytes()
        for at in list(_middles(path))[:12]:
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            error = refused_or_right(copy, tmp_path, expected, f"{path.name} at {at}")
            refused += error is not None
        path.write_bytes(content)
    assert refused > 5


def _middles(path: Path) -> Iterator[int]:
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            if "/data/" in info.filename and info.file_size:
                file.seek(info.header_offset + 26)
                lengths = file.read(4)
                head = 30 + int.from_bytes(lengths[:2], "little")
                head += int.from_bytes(lengths[2:], "little")
                yield info.header_offset + head + info.file_size // 2


# ----------------------------------------------------------------------------------------- leaves


class Custom:
    """Stands for a class of a training script."""

    def __init__(self, value: object = None) -> None:
        self.value = value


@pytest.mark.parametrize("value", [Custom(), Custom(torch.ones(2)), print])
def test_unknown_classes_are_noted_and_refused_on_write(
    data: Path, tmp_path: Path, value: object
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sample(data, "z1_bf16"), copy)
    path = copy / "global_step2/mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=True)
    torch.save({**content, "mine": {"a": value, "b": 1}}, path)
    catalog = formats.open_checkpoint(copy)
    assert catalog.blobs["mine.b"].value == 1
    assert any("`mine.a: " in note for note in catalog.notes)
    expected: Any = converted(sample(data, "z1_bf16"), tmp_path)
    assert not differences(converted(copy, tmp_path), expected)
    with pytest.raises(UnsafePickleError, match=r"`mine\.a`"):
        ckptctl.convert(copy, tmp_path / "out.pt", to="torch", only="all")
    assert converted(copy, tmp_path, only="all", exclude=("mine.a",))["mine.b"] == 1


def numbered(data: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    copy = tmp_path / "copy"
    shutil.copytree(sample(data, "z0_bf16"), copy)
    path = copy / "global_step2/mp_rank_00_model_states.pt"
    return path, torch.load(path, weights_only=True)


def test_stage_0_optimizer_state_uses_recorded_parameter_names(data: Path, tmp_path: Path) -> None:
    path, content = numbered(data, tmp_path)
    inner = content["optimizer"]["optimizer_state_dict"]
    assert any("numbered" in note for note in formats.open_checkpoint(path.parents[1]).notes)
    names = [n for n in content["module"] if n not in BUFFERS and n != "head.weight"]
    shapes = [{name: content["module"][name].shape for name in names}]
    inner["param_groups"][0]["param_names"] = names
    for change in ({}, {"param_shapes": shapes}):
        torch.save({**content, **change}, path)
        catalog = formats.open_checkpoint(path.parents[1], options=ReadOptions(weights="module"))
        assert not [note for note in catalog.notes if "numbered" in note]
        found = converted(path.parents[1], tmp_path, only="all", weights="module")
        expected = {
            f"optimizer.state.{name}.{key}": value
            for number, name in enumerate(names)
            for key, value in inner["state"][number].items()
        }
        assert not differences({key: found[key] for key in expected}, expected)
        assert catalog.blobs["optimizer.param_groups.0.params"].value == names
        inner["param_groups"][0].pop("param_names", None)


@pytest.mark.parametrize("names", [["scale"], ["scale"] * 9, [1] * 9, None])
def test_stage_0_with_invalid_names_stays_numbered(data: Path, tmp_path: Path, names: Any) -> None:
    path, content = numbered(data, tmp_path)
    content["optimizer"]["optimizer_state_dict"]["param_groups"][0]["param_names"] = names
    torch.save(content, path)
    catalog = formats.open_checkpoint(path.parents[1])
    assert any("numbered" in note for note in catalog.notes)
    assert "optimizer.optimizer_state_dict.state.0.step" in catalog.tensors


def test_parameter_names_in_wrong_order_are_ignored(data: Path, tmp_path: Path) -> None:
    path, content = numbered(data, tmp_path)
    names = [n for n in content["module"] if n not in BUFFERS and n != "head.weight"]
    content["optimizer"]["optimizer_state_dict"]["param_groups"][0]["param_names"] = names[::-1]
    torch.save(content, path)
    assert any("numbered" in n for n in formats.open_checkpoint(path.parents[1]).notes)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"mp_world_size": 2}, "tensor parallelism"), ({"module": None}, "pipeline")],
)
def test_unsupported_parallelism_is_refused_in_partial_reads(
    data: Path, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sample(data, "z1_bf16"), copy)
    path = copy / "global_step2/mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=True), **change}, path)
    with pytest.raises(FormatError) as caught:
        read(copy)
    assert said in f"{caught.value.what} {caught.value.why}"
    (copy / "global_step2/mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(FormatError, match="tensor parallelism"):
        read(copy)
