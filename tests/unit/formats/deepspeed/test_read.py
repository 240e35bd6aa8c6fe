"""DeepSpeed checkpoints against DeepSpeed's own tools, file by file, and what is refused."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError, DamagedError, FormatError, UnsupportedError, UsageError
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.deepspeed.partitions import FlatLocation, FlatVector, Segment, locate_extents
from ckptctl.storage.zips.zip_reader import StoredTensor
from tests.checkpoints.readers import differences
from tests.sweeps import one_in
from tests.unit.formats.damage import converted, damaged, refused_or_right

ZERO = (
    "z1_bf16",
    "z1_bf16opt",
    "z1_frozen_fp32",
    "z2_align",
    "z2_bf16_frozen_tied",
    "z2_elastic",
    "z2_rr",
    "z2_tiny_w4",
    "z3_fp32",
    "z3_sub_w3",
)
BUFFERS = ("mask", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked")
FROZEN = ("z1_frozen_fp32", "z2_bf16_frozen_tied", "z3_fp32", "z3_sub_w3")
TIED = ("z1_bf16opt",)
ROOT = "module."

State = dict[str, torch.Tensor]


def sample(data: Path, name: str) -> Path:
    return data / "deepspeed" / name / "ckpt"


def stored(data: Path, name: str, file: str) -> State:
    return load_file(data / "deepspeed" / name / f"{file}.safetensors")


def master(data: Path, name: str) -> State:
    """What the partitions hold: DeepSpeed's tools, where they do not change dtypes.

    They widen buffers and frozen parameters, and take a tied parameter from the module.
    """
    expected, live = stored(data, name, "expected"), stored(data, name, "live")
    kept = (*BUFFERS, *(("frz.weight",) if name in FROZEN else ()))
    tied = {"head.weight": expected["emb.weight"]} if name in TIED else {}
    return {**expected, **{key: live[key] for key in kept}, **tied}


def chosen(
    source: Path,
    folder: Path,
    weights: Literal["master", "module"] | None = None,
    tag: str | None = None,
) -> State:
    """Return what stock torch finds after a conversion with a choice of weights or tag."""
    target = folder / "chosen.pt"
    ckptctl.convert(source, target, to="torch", weights=weights, tag=tag)
    found: State = torch.load(target, weights_only=True)
    target.unlink()
    return found


def copied(source: Path, folder: Path) -> Path:
    copy = folder / "copy"
    shutil.copytree(source, copy)
    return copy


def error_of(source: Path, *args: Any) -> CkptError:
    with pytest.raises(CkptError) as caught:
        formats.open_checkpoint(source, *args)
    assert caught.value.exit_code in (2, 3, 4, 9)
    return caught.value


def resaved(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Save *path* anew after *change*; nothing of DeepSpeed is needed for model states."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


# ---------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("to", ["torch", "hf"])
@pytest.mark.parametrize("name", one_in(5, ZERO))
def test_master_weights_match_reference(data: Path, tmp_path: Path, name: str, to: str) -> None:
    source = sample(data, name)
    assert list(formats.sniff_formats(source)) == ["deepspeed"]
    assert not differences(converted(source, tmp_path, to), master(data, name))
    assert ckptctl.inspect(source).verdict == "complete"


@pytest.mark.parametrize("name", one_in(4, ZERO))
def test_optimizer_moments_match_reference(data: Path, tmp_path: Path, name: str) -> None:
    found = converted(sample(data, name), tmp_path, only="all")
    moments = stored(data, name, "moments")
    names = {key.rpartition(".")[0] for key in moments}
    steps = {f"optimizer.state.{key}.step": torch.tensor(2.0) for key in names}
    expected = {f"optimizer.state.{key}": value for key, value in moments.items()}
    held = {key: value for key, value in found.items() if key.startswith("optimizer.state.")}
    assert not differences(held, {**expected, **steps})
    model = {key: value for key, value in found.items() if key.startswith(ROOT)}
    assert not differences(model, {ROOT + key: value for key, value in master(data, name).items()})


@pytest.mark.parametrize("name", ["z0_bf16", *(name for name in ZERO if "z3" not in name)])
def test_module_weights_match_reference(data: Path, tmp_path: Path, name: str) -> None:
    found = chosen(sample(data, name), tmp_path, "module")
    assert not differences(found, stored(data, name, "live"))


def test_param_groups_list_parameter_names(data: Path) -> None:
    for name in ("z2_rr", "z3_sub_w3", "universal_z3_sub_w3"):
        blobs = formats.open_checkpoint(sample(data, name)).blobs
        first, second = (blobs[f"optimizer.param_groups.{n}.params"].value for n in (0, 1))
        assert isinstance(first, list)
        assert isinstance(second, list)
        assert set(first) >= {"emb.weight", "fc1.weight", "fc2.weight"}
        assert set(second) == {"scale", "fc1.bias", "bn.weight", "bn.bias", "fc2.bias"}
        assert blobs["optimizer.param_groups.1.weight_decay"].value == 0.0


def test_stage_0_converts_but_has_no_master_weights(data: Path, tmp_path: Path) -> None:
    source, live = sample(data, "z0_bf16"), stored(data, "z0_bf16", "live")
    assert not differences(converted(source, tmp_path), live)
    everything = converted(source, tmp_path, only="all")
    groups: Any = everything["optimizer.fp32_groups"]
    assert [copy.dtype for copy in groups[0]] == [torch.float32] * 9
    with pytest.raises(UsageError, match="stage 0 does not have fp32 partitions"):
        formats.open_checkpoint(source, options=ReadOptions(weights="master"))


def test_stage_3_module_weights_are_a_usage_error(data: Path) -> None:
    with pytest.raises(UsageError, match="stage 3 does not store weights") as caught:
        formats.open_checkpoint(sample(data, "z3_fp32"), options=ReadOptions(weights="module"))
    assert "placeholders" in str(caught.value.why)


def test_tied_weights_are_aliases(data: Path) -> None:
    for name in ("z1_bf16", "z2_bf16_frozen_tied", "z3_fp32"):
        tensors = formats.open_checkpoint(sample(data, name)).tensors
        assert tensors["module.head.weight"].alias_of == "module.emb.weight"
    module = formats.open_checkpoint(
        sample(data, "z1_bf16"), options=ReadOptions(weights="module")
    ).tensors
    assert module["module.head.weight"].alias_of == "module.emb.weight"


def test_client_state_and_loss_scale_are_read(data: Path) -> None:
    catalog = formats.open_checkpoint(sample(data, "z1_bf16"))
    assert catalog.blobs["note"].value == "client"
    assert catalog.blobs["global_steps"].value == 2
    assert catalog.blobs["optimizer.loss_scaler.cur_scale"].value == 1.0
    assert catalog.notes == ()


# --------------------------------------------------------------------------------------- wrappers


def test_lightning_deepspeed_converts_with_hyperparameters(data: Path, tmp_path: Path) -> None:
    source, expected = sample(data, "lightning"), stored(data, "lightning", "expected")
    for path in (source, source / "checkpoint"):
        assert list(formats.sniff_formats(path)) == ["deepspeed"]
        assert not differences(converted(path, tmp_path), expected)
    blobs = formats.open_checkpoint(source).blobs
    assert blobs["pytorch-lightning_version"].value == "2.6.6"
    assert blobs["hyper_parameters.width"].value == 13


def test_hf_trainer_and_accelerate_folders_are_read(data: Path, tmp_path: Path) -> None:
    copy = copied(sample(data, "z3_fp32"), tmp_path)
    (copy / "config.json").write_text("{}")
    (copy / "zero_to_fp32.py").write_text("")
    (copy / "rng_state_0.pth").write_bytes(b"")
    catalog = formats.open_checkpoint(copy)
    assert set(catalog.assets) == {"config.json"}
    assert [note for note in catalog.notes if "bn.running_mean" not in note] == [
        "copies on several ranks have equal recorded checksums (data not compared); the lowest "
        "rank's is used: `module.mask`, `module.bn.running_var`, `module.bn.num_batches_tracked`"
    ]
    (copy / "global_step2").rename(copy / "pytorch_model")
    (copy / "latest").write_text("pytorch_model")
    assert not differences(converted(copy, tmp_path), master(data, "z3_fp32"))
    (copy / "model.safetensors").write_bytes(b"")
    assert list(formats.sniff_formats(copy)) == ["hf"]


# ------------------------------------------------------------------------------------------- tags


def test_tag_selects_save_in_run(data: Path, tmp_path: Path) -> None:
    copy = copied(sample(data, "z1_bf16"), tmp_path)
    shutil.copytree(sample(data, "z2_align") / "global_step2", copy / "global_step10")
    assert formats.open_checkpoint(copy).others == {"global_step10/": "folder"}
    found = chosen(copy, tmp_path, tag="global_step10")
    assert not differences(found, master(data, "z2_align"))
    with pytest.raises(UsageError, match="unknown tag `global_step3`") as caught:
        formats.open_checkpoint(copy, options=ReadOptions(tag="global_step3"))
    assert "global_step10" in str(caught.value.why)
    (copy / "latest").unlink()
    error = error_of(copy)
    assert "2 checkpoints" in error.what
    error = error_of(copy, "deepspeed")
    assert "`latest` is missing" in error.what
    assert "global_step10" in str(error.why)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "`latest` is empty"),
        (b"global_st", "points to `global_st`, which does not exist"),
        (b"../other", "not a path inside"),
        (b"\xff\x00\x00", "not the name of a save"),
        (b"global_step2" * 1000, "not the name of a save"),
    ],
)
def test_invalid_latest_pointer_is_unsupported(
    data: Path, tmp_path: Path, content: bytes, said: str
) -> None:
    copy = copied(sample(data, "z1_bf16"), tmp_path)
    (copy / "latest").write_bytes(content)
    error = error_of(copy)
    assert isinstance(error, UnsupportedError)
    assert said in error.what
    assert not (error.hint and "--tag" not in error.hint)


# ------------------------------------------------------------------------------- ranks and worlds


@pytest.mark.parametrize("name", one_in(3, ["z1_bf16opt", "z2_rr", "z3_sub_w3"]))
def test_damaged_files_never_convert_silently_wrong(data: Path, tmp_path: Path, name: str) -> None:
    source = sample(data, name) / "global_step2"
    expected = {ROOT + key: value for key, value in master(data, name).items()}
    count = 0
    for what, copy in damaged(source, tmp_path):
        error = refused_or_right(copy, tmp_path, expected, what)
        if what.endswith("missing"):
            assert error is not None, what
            assert what.split()[0] in f"{error.what} {error.why}", (what, error.to_json())
        count += 1
    assert count > 30


@pytest.mark.parametrize("name", ["z1_bf16opt", "z3_fp32"])
def test_file_of_another_rank_is_an_error(data: Path, tmp_path: Path, name: str) -> None:
    copy = copied(sample(data, name), tmp_path) / "global_step2"
    first, second = sorted(copy.glob("*optim_states.pt"))
    first.write_bytes(second.read_bytes())
    error = error_of(copy)
    assert f"`{first.name}` belongs to another rank" in error.what
    assert second.name in str(error.why)


def renamed_zip(path: Path, old: str, new: str) -> None:
    """Change the folder that the entries of a zip are in; both names are equally long."""
    path.write_bytes(path.read_bytes().replace(f"{old}/".encode(), f"{new}/".encode()))


def test_swapped_partitions_with_plain_archive_names_are_an_error(
    data: Path, tmp_path: Path
) -> None:
    copy = copied(sample(data, "z1_bf16opt"), tmp_path) / "global_step2"
    for path in copy.glob("*_optim_states.pt"):
        renamed_zip(path, path.stem, "archive".ljust(len(path.stem), "_"))
    assert not differences(converted(copy, tmp_path), master(data, "z1_bf16opt"))
    first, second = sorted(copy.glob("*optim_states.pt"))
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    error = error_of(copy)
    assert "belongs to another rank" in error.what
    assert "rank 1" in str(error.why)


def test_swapped_short_partition_is_an_error(data: Path, tmp_path: Path) -> None:
    copy = copied(sample(data, "lightning"), tmp_path) / "checkpoint"
    first, second = sorted(copy.glob("*optim_states.pt"))
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    for path, other in ((first, second), (second, first)):
        renamed_zip(path, other.stem, path.stem)
    error = error_of(copy)
    assert "partitions are not in the order of their ranks" in error.what


def test_stale_files_of_larger_world_are_several_saves(data: Path, tmp_path: Path) -> None:
    copy = copied(sample(data, "z1_bf16"), tmp_path) / "global_step2"
    stale = copy / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    shutil.copy(copy / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", stale)
    renamed_zip(stale, stale.stem.replace("_2_", "_1_"), stale.stem)
    error = error_of(copy)
    assert "several saves" in error.what
    assert stale.name in str(error.why)
    stale.rename(copy / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    assert "belong to the same rank" in str(error_of(copy).why)


def test_missing_middle_and_last_ranks_are_named(data: Path, tmp_path: Path) -> None:
    copy = copied(sample(data, "z2_tiny_w4"), tmp_path) / "global_step2"
    names = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)]
    (copy / names[3]).unlink()
    (copy / names[1]).unlink()
    assert names[1] in str(error_of(copy).why)
    shutil.copy(sample(data, "z2_tiny_w4") / "global_step2" / names[1], copy / names[1])
    error = error_of(copy)
    assert "1 of 4 files of optim states are missing" in error.what
    assert names[3] in str(error.why)


def test_missing_rank_file_is_found_in_sibling_save(data: Path, tmp_path: Path) -> None:
    for name in ("loss=0.1", "loss=0.2"):
        shutil.copytree(sample(data, "z1_bf16"), tmp_path / name)
    gone = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (tmp_path / "loss=0.1/global_step2" / gone).unlink()
    assert "loss=0.2" not in str(error_of(tmp_path / "loss=0.1").why)
    os.remove(tmp_path / "loss=0.2/global_step2" / gone.replace("rank_1", "rank_0"))
    assert "loss=0.2" in str(error_of(tmp_path / "loss=0.1").why)


def test_rank_files_of_different_saves_are_refused(data: Path, tmp_path: Path) -> None:
    copy = copied(sample(data, "z3_fp32"), tmp_path) / "global_step2"
    model = copy / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    resaved(model, lambda content: content.update(global_steps=1))
    error = error_of(copy)
    assert "do not belong to one save" in error.what
    assert "step counts" in str(error.why)
    resaved(model, lambda content: content.update(global_steps=2, dp_world_size=3))
    assert "do not belong to one save" in error_of(copy).what


@pytest.mark.parametrize("name", ["z1_bf16", "z2_rr"])
@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("bn.weight", "bn.bias"), "the order of the parameters"),
        (("bn.weight", "other"), "the numbers of elements of `bn.weight`, `other` differ"),
    ],
)
def test_parameter_names_contradicting_the_optimizer_are_refused(
    data: Path, tmp_path: Path, name: str, names: tuple[str, str], why: str
) -> None:
    def rename(content: dict[str, Any]) -> None:
        old, new = names
        swapped = {old: new, new: old}
        content["param_shapes"] = [
            {swapped.get(key, key): shape for key, shape in group.items()}
            for group in content["param_shapes"]
        ]

    copy = copied(sample(data, name), tmp_path)
    resaved(copy / "global_step2" / "mp_rank_00_model_states.pt", rename)
    error = error_of(copy)
    assert "`param_shapes` contradicts `param_slice_mappings`" in error.what
    assert why in str(error.why)
    assert ckptctl.verify(copy, level="fast").verdict == "unknown"


@pytest.mark.parametrize("name", ["z0_bf16", "z2_align", "z3_fp32"])
def test_missing_buffer_is_refused(data: Path, tmp_path: Path, name: str) -> None:
    copy = copied(sample(data, name), tmp_path)
    for file in copy.rglob("*model_states.pt"):
        resaved(file, lambda content: content["module"].pop("bn.running_var"))
    assert error_of(copy).what == "the buffer `bn.running_var` is missing"
    result = ckptctl.verify(copy, level="fast")
    assert [finding.tensor for finding in result.unknown] == ["module.bn.running_var"]


def test_state_dict_without_buffers_is_noted(data: Path, tmp_path: Path) -> None:
    copy = copied(sample(data, "z2_align"), tmp_path)
    file = copy / "global_step2" / "mp_rank_00_model_states.pt"
    resaved(file, lambda content: [content["module"].pop(buffer) for buffer in BUFFERS])
    result = ckptctl.verify(copy, level="fast")
    assert result.verdict == "complete"
    assert any(note.startswith("buffers that were not saved: ") for note in result.notes)


def test_files_of_two_zero_stages_are_several_saves(data: Path, tmp_path: Path) -> None:
    copy = copied(sample(data, "z3_fp32"), tmp_path) / "global_step2"
    shutil.copy(
        sample(data, "z1_bf16") / "global_step2/mp_rank_00_model_states.pt",
        copy / "mp_rank_00_model_states.pt",
    )
    assert "several saves" in error_of(copy).what


class StandIn:
    """Stands for DeepSpeed's loss scaler, which is not installed."""


class PlainUnpickler(pickle.Unpickler):
    """Read DeepSpeed's enums as integers, and its other objects as stand-ins."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("deepspeed."):
            return int if "Enum" in name else StandIn
        return super().find_class(module, name)


PLAIN_PICKLE = SimpleNamespace(Unpickler=PlainUnpickler, __name__="plain_pickle")


def inner_optimizer(content: dict[str, Any]) -> dict[str, Any]:
    state = content["optimizer_state_dict"]
    inner: dict[str, Any] = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    return inner


@pytest.mark.parametrize("name", ["z1_bf16", "z3_fp32"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda inner: inner["state"][0].pop("exp_avg_sq"), "has no `exp_avg_sq`"),
        (lambda inner: inner["state"].clear(), "has no `exp_avg`"),
        (lambda inner: inner["param_groups"][0].update(lr=0.5), "`lr` differs"),
    ],
)
def test_optimizer_that_differs_between_ranks_is_refused(
    data: Path, tmp_path: Path, name: str, rank: int, change: Any, why: str
) -> None:
    copy = copied(sample(data, name), tmp_path)
    (file,) = copy.rglob(f"*pp_rank_{rank}_mp_rank_00_optim_states.pt")
    content = torch.load(file, weights_only=False, pickle_module=PLAIN_PICKLE)
    change(inner_optimizer(content))
    torch.save(content, file)
    error = error_of(copy)
    assert "do not belong to one save" in error.what and why in str(error.why)
    if "has no" in why:
        assert str(error.where).endswith(file.name)


def test_missing_optimizer_states_leave_module_weights_readable(data: Path, tmp_path: Path) -> None:
    copy = copied(sample(data, "z2_align"), tmp_path)
    for path in copy.rglob("*optim_states.pt"):
        path.unlink()
    error = error_of(copy)
    assert "optimizer states of all ranks are missing" in error.what
    assert "--weights module" in str(error.hint)
    catalog = formats.open_checkpoint(copy, options=ReadOptions(weights="module"))
    assert catalog.notes == ("the optimizer states of all ranks are missing",)
    assert not differences(chosen(copy, tmp_path, "module"), stored(data, "z2_align", "live"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["param_shapes"][0].update(scale=torch.Size([2])), "elements of `scale`"),
        (lambda c: c["param_shapes"][0].update(more=torch.Size([5000])), "end before `more`"),
        (lambda c: c["param_shapes"][0].pop("frz.weight"), "does not match the parameters"),
        (lambda c: c["param_shapes"].append({"x": torch.Size([1])}), "do not match"),
        (lambda c: c["shared_params"].update({"head.weight": "nowhere"}), "`nowhere`"),
        (lambda c: c.update(param_shapes=None), "parameter names are missing"),
        (lambda c: c.update(param_shapes=[{"scale": "x"}]), "expected a list"),
        (lambda c: c.update(module=[1]), "`module` is a list, expected a dict"),
        (lambda c: c.pop("module"), "not contain model states"),
        (lambda c: c.update(dp_world_size=4), "do not belong to one save"),
    ],
)
def test_contradicting_model_states_are_an_error(
    data: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    copy = copied(sample(data, "z1_bf16opt"), tmp_path)
    resaved(copy / "global_step2/mp_rank_00_model_states.pt", change)
    error = error_of(copy)
    assert isinstance(error, DamagedError if said.startswith("end before") else UnsupportedError)
    assert said in f"{error.what} {error.why}"


# ---------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "expert"),
        ("expp_rank_1_mp_rank_00_optim_states.pt", "expert"),
        ("layer_03-model_00-model_states.pt", "pipeline"),
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism"),
        ("offloaded_tensors", "NVMe"),
    ],
)
def test_unsupported_parallel_file_names_are_refused(
    data: Path, tmp_path: Path, file: str, said: str
) -> None:
    copy = copied(sample(data, "z1_bf16"), tmp_path)
    (copy / "global_step2" / file).write_bytes(b"")
    error = error_of(copy)
    assert isinstance(error, FormatError)
    assert said in error.what
    assert error.why


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mp_world_size": 2}, "tensor parallelism"),
        ({"module": None}, "do not contain the model"),
        ({"ds_autoep_layers": [{}]}, "expert"),
    ],
)
def test_unsupported_model_states_are_refused(
    data: Path, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    copy = copied(sample(data, "z1_bf16"), tmp_path)
    resaved(copy / "global_step2/mp_rank_00_model_states.pt", lambda c: c.update(change))
    error = error_of(copy)
    assert isinstance(error, FormatError)
    assert said in error.what


def test_legacy_torch_files_are_refused(data: Path, tmp_path: Path) -> None:
    copy = copied(sample(data, "z1_bf16"), tmp_path)
    path = copy / "global_step2/mp_rank_00_model_states.pt"
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)
    error = error_of(copy)
    assert isinstance(error, FormatError)
    assert "legacy torch file" in error.what


def test_single_rank_file_is_not_a_checkpoint(data: Path) -> None:
    error = error_of(
        sample(data, "z1_bf16") / "global_step2/mp_rank_00_model_states.pt", "deepspeed"
    )
    assert error.what == "this is the file of a single rank"


def test_flat_part_across_segments_is_split_into_extents() -> None:
    tensors = [
        StoredTensor("float32", (size,), None, offset, 4 * size, 7, str(offset), False)
        for offset, size in ((100, 2), (200, 0), (300, 5))
    ]
    strip = FlatVector([Segment(f"f{n}", tensor) for n, tensor in enumerate(tensors)])
    found = locate_extents(FlatLocation((2, 3), ((0, 1, 7),), 0), [strip])
    assert [(e.file, e.offset, e.nbytes, e.box.offsets, e.box.sizes) for e in found] == [
        ("f0", 104, 4, (0, 0), (1, 1)),
        ("f2", 300, 8, (0, 1), (1, 2)),
        ("f2", 308, 12, (1, 0), (1, 3)),
    ]
    assert [e.crc32 for e in found] == [None, None, None]
    (whole,) = locate_extents(FlatLocation((5,), ((0, 2, 7),), 0), [strip])
    assert (whole.file, whole.offset, whole.crc32) == ("f2", 300, 7)


def test_differing_step_across_ranks_is_not_one_save(data: Path, tmp_path: Path) -> None:
    copy = copied(sample(data, "z3_fp32"), tmp_path)
    step = formats.open_checkpoint(copy).tensors["optimizer.state.scale.step"].extents[0]
    path = copy / step.file
    content = bytearray(path.read_bytes())
    content[step.offset : step.offset + 4] = bytes(4)
    path.write_bytes(content)
    error = error_of(copy)
    assert "do not belong to one save" in error.what
    assert "`step` differs" in str(error.why)


def test_partition_share_mismatch_is_an_error(data: Path, tmp_path: Path) -> None:
    copy = copied(sample(data, "z3_fp32"), tmp_path) / "global_step2"
    for path in copy.glob("*model_states.pt"):
        resaved(path, lambda content: content["param_shapes"][0].update(more=torch.Size([3])))
    error = error_of(copy)
    assert "partition does not match its share" in error.what


def test_empty_parameters_convert_exactly(data: Path, tmp_path: Path) -> None:
    """All of them have address zero, so DeepSpeed takes the second for a copy of the first."""
    copy = copied(sample(data, "z1_bf16opt"), tmp_path)
    empty = {"none": torch.empty(0, 5), "none2": torch.empty(3, 0)}

    def add(content: dict[str, Any]) -> None:
        content["module"].update(empty)
        content["shared_params"]["none2"] = "none"

    resaved(copy / "global_step2/mp_rank_00_model_states.pt", add)
    expected = {**master(data, "z1_bf16opt"), **empty}
    assert not differences(converted(copy, tmp_path), expected)
