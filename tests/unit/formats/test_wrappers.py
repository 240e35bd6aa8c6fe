"""What trainers put around a checkpoint: Lightning, accelerate, HF Trainer, Megatron, ..."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError, DamagedError, FormatError, UnsafePickleError, UsageError
from tests.checkpoints.readers import differences
from tests.sweeps import one_in
from tests.unit.formats.damage import converted, damaged

SAMPLES = {
    "lightning_fsdp1": ("dcp", "epoch=0-step=2.ckpt"),
    "lightning_fsdp2": ("dcp", "."),
    "accelerate_dcp": ("dcp", "."),
    "megatron": ("mcore", "."),
    "bytecheckpoint": ("bytecheckpoint", "global_step_1"),
    "hf_trainer": ("hf", "checkpoint-6"),
}


def sample(data: Path, name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = data / "wrappers" / name
    source = folder / "ckpt" / SAMPLES[name][1]
    expected = folder / "expected.safetensors"
    return source, load_file(expected if expected.exists() else source / "model.safetensors")


@pytest.mark.parametrize("name", one_in(3, SAMPLES))
def test_wrapper_samples_match_reference(data: Path, tmp_path: Path, name: str) -> None:
    source, expected = sample(data, name)
    assert formats.open_checkpoint(source).format == SAMPLES[name][0]
    assert ckptctl.inspect(source).verdict == "complete"
    if name != "megatron":  # which is no whole model: nothing says how `hf` would name its tensors
        assert not differences(converted(source, tmp_path, "hf"), expected)
    found = converted(source, tmp_path, "torch")
    assert not differences({key: found.get(key) for key in expected}, expected)


def test_plain_lightning_checkpoints_are_read(data: Path, tmp_path: Path) -> None:
    source = data / "wrappers" / "lightning_plain" / "ckpt"
    saved = torch.load(source / "last.ckpt", weights_only=True)
    assert not differences(converted(source / "last.ckpt", tmp_path, "hf"), saved["state_dict"])
    members = ckptctl.inspect(source).checkpoints
    assert [(Path(one.path).name, one.problems) for one in members] == [
        ("epoch=0-step=3.ckpt", ()),
        ("last.ckpt", ()),
    ]


def test_plain_accelerate_checkpoint_matches_model_safetensors(data: Path, tmp_path: Path) -> None:
    source = data / "wrappers" / "accelerate_plain" / "ckpt" / "checkpoints" / "checkpoint_1"
    found = converted(source, tmp_path, "torch")
    assert not differences(found, load_file(source / "model.safetensors"))


def test_lightning_meta_pt_is_converted_with_shards(data: Path, tmp_path: Path) -> None:
    source, _ = sample(data, "lightning_fsdp2")
    found = converted(source, tmp_path, only="all")
    beside = torch.load(source / "step-2" / "meta.pt", weights_only=True)
    assert beside
    assert not differences({key: found.get(key) for key in beside}, beside)


def test_unknown_classes_in_meta_pt_are_refused_on_write(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sample(data, "lightning_fsdp2")[0] / "step-2", copy)
    torch.save({"hparams": SAMPLES.keys, "epoch": 1}, copy / "meta.pt")
    found = ckptctl.inspect(copy)
    assert found.verdict == "complete"
    assert any("can be read but not written: `hparams" in note for note in found.notes)
    ckptctl.convert(copy, tmp_path / "model", to="hf")
    with pytest.raises(UnsafePickleError, match="references"):
        ckptctl.convert(copy, tmp_path / "all", to="dcp", only="all")
    ckptctl.convert(copy, tmp_path / "some", to="dcp", only="all", exclude=["hparams"])


def test_single_inner_checkpoint_is_opened_with_note(data: Path, tmp_path: Path) -> None:
    source, _ = sample(data, "accelerate_dcp")
    notes = ckptctl.inspect(source).notes
    assert any("read from `pytorch_model_fsdp_0`" in note for note in notes)
    twice = tmp_path / "twice"
    shutil.copytree(source, twice)
    shutil.copytree(twice / "pytorch_model_fsdp_0", twice / "pytorch_model_fsdp_1")
    with pytest.raises(FormatError, match="folder of 3 checkpoints"):
        formats.open_checkpoint(twice)


@pytest.mark.parametrize(
    ("name", "model", "part"),
    [
        ("wrappers/accelerate_dcp/ckpt", "pytorch_model_fsdp_0", "optimizer_0"),
        ("wrappers/bytecheckpoint/ckpt/global_step_1", "model", "optimizer"),
    ],
)
def test_optimizer_next_to_only_model_is_verified_and_not_ignored(
    data: Path, tmp_path: Path, name: str, model: str, part: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(data / name, copy)
    verified = ckptctl.verify(copy, level="full")
    alone = ckptctl.verify(copy / model, level="full")
    assert verified.verdict == "complete" and verified.tensors > alone.tensors
    assert any(file.startswith(f"../{part}/") for file in verified.files)

    def list_uncompared(only: Literal["model", "all"]) -> list[str]:
        notes = ckptctl.diff(copy, copy, only=only).notes
        return [note for note in notes if note.startswith("A and B: not compared")]

    assert f"`{part}`" in list_uncompared("all")[0]
    assert not list_uncompared("model")

    with pytest.raises(UsageError, match="the training state is in another checkpoint"):
        ckptctl.consolidate(copy, dst=tmp_path / "all", optimizer=True)
    notes = ckptctl.plan_conversion(copy, tmp_path / "model", to="hf").notes
    assert any(note.startswith("not copied (other checkpoints)") for note in notes)

    file = min((copy / part).glob("*.distcp"))
    file.write_bytes(bytes(100))
    damaged = ckptctl.verify(copy)
    assert damaged.verdict == "damaged"
    assert f"../{part}/{file.name}" in {finding.file for finding in damaged.findings}
    (copy / part / ".metadata").unlink()
    assert ckptctl.verify(copy).errors[0].file == f"../{part}/.metadata"


def test_files_of_a_trainer_next_to_the_model_are_named_and_not_ignored(
    data: Path, tmp_path: Path
) -> None:
    folder = data / "wrappers/hf_trainer/ckpt/checkpoint-6"
    with pytest.raises(UsageError, match="in separate files") as caught:
        ckptctl.plan_conversion(folder, tmp_path / "all", to="dcp", only="all")
    assert caught.value.hint == "convert `optimizer.pt` separately"
    (note,) = ckptctl.diff(folder, folder, only="all").notes
    assert note.startswith("A and B: not compared (separate files): `optimizer.pt`, ")
    assert not ckptctl.diff(folder, folder, only="model").notes


def test_option_to_keep_training_state_is_noted_without_effect(data: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(data / "wrappers/hf_trainer/ckpt/checkpoint-6", model)
    (model / "optimizer.pt").unlink()
    plan = ckptctl.plan_conversion(model, tmp_path / "out", to="dcp", only="all")
    assert "the checkpoint contains no training state" in plan.notes


def test_truncated_state_of_a_trainer_next_to_its_folders_is_damaged(
    data: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(data / "wrappers/accelerate_dcp/ckpt", copy)
    assert ckptctl.verify(copy).verdict == "complete"
    (copy / "random_states_0.pkl").write_bytes(b"")
    (finding,) = ckptctl.verify(copy).errors
    assert (finding.file, finding.why) == ("../random_states_0.pkl", "it is empty")


def test_interrupted_megatron_save_is_damaged(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sample(data, "megatron")[0], copy)
    (copy / "iter_0000010" / "metadata.json").unlink()
    with pytest.raises(DamagedError, match="interrupted"):
        formats.open_checkpoint(copy)


@pytest.mark.parametrize(
    ("name", "inner"), one_in(2, [("bytecheckpoint", "model"), ("megatron", "iter_0000010")])
)
def test_damaged_wrappers_never_convert_silently_wrong(
    data: Path, tmp_path: Path, name: str, inner: str
) -> None:
    source, expected = sample(data, name)
    for what, copy in damaged(source / inner, tmp_path):
        if name == "bytecheckpoint" and ".distcp flipped" in what:
            continue  # nothing but elements, and no checksum of them
        error = _model_only(copy, tmp_path, expected, what)
        if what.endswith(".distcp missing"):
            assert isinstance(error, DamagedError), what
            assert what.split()[0] in f"{error.what} {error.why}", (what, error.to_json())


def _model_only(
    source: Path, scratch: Path, expected: dict[str, torch.Tensor], what: str
) -> CkptError | None:
    try:
        found = converted(source, scratch)
        found = {key: value for key, value in found.items() if key in expected}
    except CkptError as error:
        assert error.exit_code in (3, 4, 5, 9), (what, error.to_json())
        return error
    assert not differences(found, expected), what
    return None


def test_bytecheckpoint_optimizer_matches_raw_bytes(data: Path, tmp_path: Path) -> None:
    """Rank 0's first shard of ``exp_avg`` lies behind a pickle and a step of four bytes."""
    import numpy as np

    source = sample(data, "bytecheckpoint")[0] / "optimizer"
    found: dict[str, Any] = converted(source, tmp_path, only="all")
    assert any(name.startswith("param_groups.") for name in found)
    steps = [value for name, value in found.items() if name.endswith(".step")]
    assert steps
    assert len({float(step) for step in steps}) == 1
    raw = (source / "__0_0.distcp").read_bytes()
    local = np.frombuffer(raw, "<f4", 19 * 13, 1581 + 4).reshape(19, 13)
    assert torch.equal(found["state.0.weight.exp_avg"][:19], torch.from_numpy(local.copy()))


def test_rng_states_are_kept_per_rank(data: Path, tmp_path: Path) -> None:
    source = sample(data, "bytecheckpoint")[0] / "extra_state"
    found = converted(source, tmp_path, only="all")
    for rank, prefix in enumerate(("", "rank_1.")):
        saved = torch.load(source / f"extra_state_rank_{rank}.pt", weights_only=False)
        expected = saved["torch_rng_state"]
        assert torch.equal(found[f"{prefix}extra_state.torch_rng_state"], expected)  # type: ignore[arg-type]
