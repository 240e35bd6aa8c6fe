"""Universal checkpoints: what DeepSpeed's converter wrote, and where it is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError, DamagedError, FormatError, UsageError
from ckptctl.formats.base import ReadOptions
from tests.checkpoints.readers import differences
from tests.unit.formats.damage import converted

SAMPLES = ("universal_z2_w3", "universal_z3_sub_w3")
FOLDER = "global_step2_universal"
BUFFERS = ("mask", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked")

State = dict[str, torch.Tensor]


def sample(data: Path, name: str) -> Path:
    return data / "deepspeed" / name / "ckpt"


def stored(source: Path, key: str) -> State:
    """Return what stock torch finds under ``zero``, flat tensors as they are."""
    found: State = {}
    for file in (source / FOLDER / "zero").glob(f"*/{key}.pt"):
        content: Any = torch.load(file, weights_only=True)
        found[file.parent.name] = content["param"] if isinstance(content, dict) else content
    return found


def alike(found: Any, expected: State) -> list[str]:
    return differences(
        {name: found[name].view(-1) for name in expected},
        {name: value.view(-1) for name, value in expected.items()},
    )


def copied(data: Path, folder: Path, name: str = "universal_z2_w3") -> Path:
    shutil.copytree(sample(data, name), folder / "copy")
    return folder / "copy"


def error_of(source: Path, **asked: Any) -> CkptError:
    with pytest.raises(CkptError) as caught:
        formats.open_checkpoint(source, "deepspeed-universal", ReadOptions(**asked))
    assert caught.value.exit_code in (2, 3, 4, 9)
    return caught.value


@pytest.mark.parametrize("name", SAMPLES)
def test_universal_samples_match_reference(data: Path, tmp_path: Path, name: str) -> None:
    source = sample(data, name)
    for path in (source, source / FOLDER):
        assert list(formats.sniff_formats(path)) == ["deepspeed-universal"]
        assert ckptctl.inspect(path).verdict == "complete"
        found = converted(path, tmp_path)
        expected = {
            key: value for key, value in stored(source, "fp32").items() if key not in BUFFERS
        }
        assert not alike(found, expected)
        assert found["mask"].dtype == torch.bool  # type: ignore[attr-defined]
        assert found["bn.num_batches_tracked"].dtype == torch.int64  # type: ignore[attr-defined]
        assert found["emb.weight"].shape == (37, 13)  # type: ignore[attr-defined]
        assert len(found) == 14


def test_universal_checkpoint_matches_zero_ranks(data: Path, tmp_path: Path) -> None:
    ranks = converted(sample(data, "z3_sub_w3"), tmp_path, only="all")
    whole = converted(sample(data, "universal_z3_sub_w3"), tmp_path, only="all")
    assert not differences(whole, ranks)
    assert found_step(whole) == torch.tensor(2.0)


def found_step(state: dict[str, Any]) -> torch.Tensor:
    step = state["optimizer.state.emb.weight.step"]
    assert isinstance(step, torch.Tensor)
    return step


def test_universal_moments_match_reference(data: Path, tmp_path: Path) -> None:
    source = sample(data, "universal_z2_w3")
    found = converted(source, tmp_path, only="all")
    for key in ("exp_avg", "exp_avg_sq", "step"):
        expected = stored(source, key)
        assert len(expected) == 9
        assert not differences(
            {name: found[f"optimizer.state.{name}.{key}"] for name in expected}, expected
        )


def test_module_weights_need_mp_rank_model_states(data: Path) -> None:
    module = formats.open_checkpoint(
        sample(data, "universal_z2_w3"), options=ReadOptions(weights="module")
    )
    assert "mp_rank_00" in module.tensors["module.emb.weight"].extents[0].file
    error = error_of(sample(data, "universal_z3_sub_w3"), weights="module")
    assert isinstance(error, UsageError)


def test_round_robin_gradients_are_refused(data: Path) -> None:
    """The converter is silently wrong there; ``z2_rr`` is the same save, read rightly."""
    source = sample(data, "universal_z2_rr")
    right = load_file(data / "deepspeed" / "z2_rr" / "expected.safetensors")
    assert differences(stored(source, "fp32"), {"fc1.bias": right["fc1.bias"]})
    error = error_of(source)
    assert isinstance(error, FormatError)
    assert "round_robin_gradients" in str(error.why)
    assert formats.open_checkpoint(source, options=ReadOptions(weights="module")).tensors


def divided(data: Path, tmp_path: Path) -> Path:
    """What the converter leaves of two tensor-parallel ranks: each with half of the module."""
    copy = copied(data, tmp_path)
    first = copy / FOLDER / "mp_rank_00_model_states.pt"
    content = torch.load(first, weights_only=True)
    content["mp_world_size"] = 2
    for name, value in content["module"].items():
        if name not in content["buffer_names"]:
            content["module"][name] = value[: len(value) // 2]
    torch.save(content, first)
    torch.save(content, first.with_name("mp_rank_01_model_states.pt"))
    return copy


def test_tensor_parallel_slices_are_joined(data: Path, tmp_path: Path) -> None:
    copy = divided(data, tmp_path)
    found = converted(copy, tmp_path)
    assert not differences(found, converted(sample(data, "universal_z2_w3"), tmp_path))
    error = error_of(copy, weights="module")
    assert isinstance(error, UsageError)
    shutil.rmtree(copy / FOLDER / "zero" / "frz.weight")
    error = error_of(copy)
    assert isinstance(error, DamagedError)
    assert "frz.weight" in f"{error.what} {error.why}"


def test_pipeline_states_without_module_note_missing_buffers(data: Path, tmp_path: Path) -> None:
    copy = copied(data, tmp_path)
    states = copy / FOLDER / "mp_rank_00_model_states.pt"
    content = torch.load(states, weights_only=True)
    content["module"] = None
    torch.save(content, states)
    catalog = formats.open_checkpoint(copy)
    assert any("buffers are missing" in note for note in catalog.notes)
    assert catalog.tensors["module.emb.weight"].shape == (37, 13)


def test_original_deepspeed_save_takes_precedence_over_universal(
    data: Path, tmp_path: Path
) -> None:
    copy = copied(data, tmp_path)
    original = sample(data, "z1_bf16")
    shutil.copytree(original / "global_step2", copy / "global_step2")
    shutil.copy(original / "latest", copy / "latest")
    assert list(formats.sniff_formats(copy)) == ["deepspeed"]
    assert formats.open_checkpoint(copy, "deepspeed-universal").tensors
    error = error_of(copy, tag="global_step2")
    assert FOLDER in str(error.why)


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("zero/emb.weight/fp32.pt", "emb.weight/fp32.pt"),
        ("zero/optimizer_state.pt", "not finished"),
        ("mp_rank_00_model_states.pt", "not finished"),
    ],
)
def test_missing_universal_files_are_damaged(
    data: Path, tmp_path: Path, gone: str, said: str
) -> None:
    copy = copied(data, tmp_path)
    (copy / FOLDER / gone).unlink()
    error = error_of(copy)
    assert isinstance(error, DamagedError)
    assert said in f"{error.what} {error.why}"


def test_missing_stage_3_rank_file_is_named(data: Path, tmp_path: Path) -> None:
    copy = copied(data, tmp_path, "universal_z3_sub_w3")
    (copy / FOLDER / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    assert "zero_pp_rank_2" in str(error_of(copy).why)


def test_swapped_universal_parameter_files_are_an_error(data: Path, tmp_path: Path) -> None:
    folder = copied(data, tmp_path) / FOLDER / "zero"
    shutil.copy(folder / "scale/exp_avg.pt", folder / "scale/fp32.pt")
    assert "saved as `exp_avg.pt`" in str(error_of(tmp_path / "copy").why)
    shutil.copy(folder / "fc1.bias/fp32.pt", folder / "scale/fp32.pt")
    assert "the shape" in error_of(tmp_path / "copy").what
    (folder / "scale/fp32.pt").write_bytes(b"PK\3\4")
    assert isinstance(error_of(tmp_path / "copy"), DamagedError)
