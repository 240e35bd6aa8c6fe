"""One ``torch.save`` file per rank, as verl, accelerate, torch and FSDP1 scripts write them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError, DamagedError, FormatError, UnsafePickleError, UnsupportedError
from ckptctl.formats.rank_files import parse_rank_file_name
from tests.checkpoints.readers import differences
from tests.sweeps import one_in
from tests.unit.formats.damage import converted, damaged, refused_or_right

SAMPLES = {
    "verl": "",
    "accelerate": "",
    "fsdp1_sharded": "",
    "torch_experimental": "step-2",
}


def sample(data: Path, name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = data / "rank_files" / name
    return folder / "ckpt" / SAMPLES[name], load_file(folder / "expected.safetensors")


@pytest.mark.parametrize("to", ["hf", "torch"])
@pytest.mark.parametrize("name", SAMPLES)
def test_rank_file_samples_match_reference(data: Path, tmp_path: Path, name: str, to: str) -> None:
    source, expected = sample(data, name)
    assert list(formats.sniff_formats(source)) == ["rank-files"]
    assert not differences(converted(source, tmp_path, to), expected)
    assert ckptctl.inspect(source).verdict == "complete"


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(3, SAMPLES))
def test_damaged_rank_files_never_convert_silently_wrong(
    data: Path, tmp_path: Path, name: str
) -> None:
    source, expected = sample(data, name)
    root = {"verl": "model.", "accelerate": "model.", "torch_experimental": "model."}.get(name, "")
    named = {root + key: value for key, value in expected.items()}
    count = 0
    for what, copy in damaged(source, tmp_path):
        error = refused_or_right(copy, tmp_path, named, what)
        if what.endswith("missing") and not what.startswith("fsdp_config"):
            assert isinstance(error, DamagedError), what
            assert what.split()[0] in str(error.why), (what, error.to_json())
        count += 1
    assert count > 20


def test_swapped_rank_file_is_unsupported(data: Path, tmp_path: Path) -> None:
    source, _ = sample(data, "verl")
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    names = [copy / f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1)]
    names[0].write_bytes((source / names[1].name).read_bytes())
    with pytest.raises(UnsupportedError, match="is not the file of rank 0"):
        ckptctl.inspect(copy)


def test_fsdp1_flat_parameters_are_unsupported(data: Path, tmp_path: Path) -> None:
    source = data / "rank_files" / "fsdp1_local" / "ckpt"
    with pytest.raises(UnsupportedError, match="FSDP1's LOCAL_STATE_DICT") as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="dcp")
    assert "only the model knows" in str(caught.value.why)
    assert ckptctl.inspect(source).verdict == "unknown"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model_world_size_8_rank_3.pt", ("model", 3, 8)),
        ("extra_state_world_size_2_rank_0.pt", ("extra_state", 0, 2)),
        ("pytorch_model_fsdp_0_rank1.bin", ("model", 1, None)),
        ("pytorch_model_fsdp_1_rank12.bin", ("model_1", 12, None)),
        ("pytorch_model_fsdp_rank1.bin", ("model", 1, None)),
        ("optimizer_0_rank1.bin", ("optimizer", 1, None)),
        ("checkpoint_5.pt", ("", 5, None)),
        ("rank0.pt", ("", 0, None)),
        ("rank_3_model_states.pt", ("model", 3, None)),
        ("rank_3_optimizer_states.pt", ("optimizer", 3, None)),
        ("mp_rank_00_model_states.pt", None),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", None),
        ("model_0.pt", None),
        ("rng_state_0.pth", None),
        ("checkpoint_x.pt", None),
    ],
)
def test_rank_file_names_are_parsed(name: str, expected: Any) -> None:
    found = parse_rank_file_name(name)
    assert (found and (found.group, found.rank, found.world)) == expected


def save_ranks(folder: Path, *states: Any, name: str = "rank{}.pt") -> Path:
    folder.mkdir()
    for rank, state in enumerate(states):
        torch.save(state, folder / name.format(rank))
    return folder


def test_values_that_differ_are_kept_per_rank(tmp_path: Path) -> None:
    same = torch.arange(4.0)
    source = save_ranks(
        tmp_path / "x",
        {"w": same, "rng": torch.tensor([1]), "step": 3, "who": 0},
        {"w": same, "rng": torch.tensor([2]), "step": 3, "who": 1},
    )
    found = converted(source, tmp_path, only="all")
    assert torch.equal(found["rng"], torch.tensor([1]))  # type: ignore[arg-type]
    assert torch.equal(found["rank_1.rng"], torch.tensor([2]))  # type: ignore[arg-type]
    assert (found["step"], found["who"], found["rank_1.who"]) == (3, 0, 1)
    assert "rank_1.w" not in found
    assert any("rank_N" in note for note in ckptctl.inspect(source).notes)


def test_checkpoints_of_several_epochs_are_not_ranks(tmp_path: Path) -> None:
    source = save_ranks(
        tmp_path / "x", *({"w": torch.full((3,), n)} for n in range(3)), name="checkpoint_{}.pt"
    )
    with pytest.raises(FormatError, match="not belong to the ranks of one checkpoint"):
        ckptctl.inspect(source)


def test_views_without_checksums_are_compared_by_bytes(tmp_path: Path) -> None:
    one, other = torch.arange(8.0), torch.arange(8.0)
    other[0] = 9  # outside of the view
    source = save_ranks(tmp_path / "x", {"w": one[2:6]}, {"w": other[2:6]})
    found = converted(source, tmp_path)
    assert not differences(found, {"w": one[2:6]})


def test_pipeline_stages_are_joined(tmp_path: Path) -> None:
    states = [{f"layer{n}.w": torch.full((2,), n)} for n in range(3)]
    source = save_ranks(tmp_path / "x", *states)
    assert set(converted(source, tmp_path)) == {"layer0.w", "layer1.w", "layer2.w"}


def test_rank_states_with_trainer_state_are_read(data: Path, tmp_path: Path) -> None:
    """``rank_0_model_states.pt``, ``rank_0_optimizer_states.pt``, ``trainer_state.pt``."""
    source, expected = sample(data, "verl")
    folder = tmp_path / "x"
    folder.mkdir()
    for rank in range(2):
        for ours, theirs in (("model", "model"), ("optimizer", "optim")):
            name = f"{theirs}_world_size_2_rank_{rank}.pt"
            shutil.copy(source / name, folder / f"rank_{rank}_{ours}_states.pt")
    torch.save({"global_step": 7}, folder / "trainer_state.pt")
    found = converted(folder, tmp_path, only="all")
    model = {name: found[f"model.{name}"] for name in expected}
    assert not differences(model, expected)
    assert found["trainer_state.global_step"] == 7
    assert "optimizer.state.0.exp_avg" in found


def test_verl_config_and_tokenizer_are_copied_next_to_weights(data: Path, tmp_path: Path) -> None:
    source, expected = sample(data, "verl")
    actor = tmp_path / "global_step_5" / "actor"
    shutil.copytree(source, actor)
    (actor / "huggingface").mkdir()
    papers = {"config.json": '{"model_type": "mine"}', "tokenizer.json": "{}"}
    for name, content in {**papers, "model.safetensors": "old"}.items():
        (actor / "huggingface" / name).write_text(content)
    (tmp_path / "global_step_5" / "data.pt").write_bytes(b"")
    ckptctl.convert(tmp_path / "global_step_5", tmp_path / "out", to="hf")
    written = {item.name for item in (tmp_path / "out").iterdir()}
    assert written == {*papers, "model.safetensors", "ckptctl.manifest.json"}
    for name, content in papers.items():
        assert (tmp_path / "out" / name).read_text() == content
    assert not differences(load_file(tmp_path / "out" / "model.safetensors"), expected)
    assert not any("huggingface" in note for note in ckptctl.inspect(actor).notes)


def test_step_with_actor_and_critic_is_ambiguous(data: Path, tmp_path: Path) -> None:
    source, _ = sample(data, "verl")
    for name in ("actor", "critic"):
        shutil.copytree(source, tmp_path / "global_step_5" / name)
    with pytest.raises(FormatError, match="2 checkpoints") as caught:
        formats.open_checkpoint(tmp_path / "global_step_5")
    assert caught.value.why == "`actor`, `critic`"


def test_files_of_two_world_sizes_are_refused(data: Path, tmp_path: Path) -> None:
    source, _ = sample(data, "verl")
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    shutil.copy(copy / "model_world_size_2_rank_0.pt", copy / "model_world_size_4_rank_2.pt")
    with pytest.raises(UnsupportedError, match="several saves"):
        ckptctl.inspect(copy)


def test_more_files_than_ranks_are_refused(data: Path, tmp_path: Path) -> None:
    source, _ = sample(data, "verl")
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    shutil.copy(copy / "model_world_size_2_rank_1.pt", copy / "model_world_size_2_rank_2.pt")
    with pytest.raises(UnsupportedError, match="more than the 2 ranks") as caught:
        ckptctl.inspect(copy)
    assert caught.value.why == "`model_world_size_2_rank_2.pt`"


def test_single_rank_file_hints_at_directory(data: Path) -> None:
    source, _ = sample(data, "verl")
    with pytest.raises(CkptError) as caught:
        ckptctl.inspect(source / "model_world_size_2_rank_0.pt")
    assert "director" in str(caught.value.hint)


def test_hostile_rank_files_are_not_executed(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return print, ("ran",)

    state = {"w": torch.ones(1), "x": Hostile()}
    source = save_ranks(tmp_path / "x", state, state)
    assert any("`x: builtins.print`" in note for note in ckptctl.inspect(source).notes)
    assert converted(source, tmp_path, exclude=("x",)).keys() == {"w"}
    with pytest.raises(UnsafePickleError):
        ckptctl.convert(source, tmp_path / "out.pt", to="torch")
    with pytest.raises(UnsafePickleError):
        ckptctl.inspect(save_ranks(tmp_path / "y", Hostile(), Hostile()))
    with pytest.raises(UnsupportedError):
        ckptctl.inspect(save_ranks(tmp_path / "z", {"w": torch.ones(1)}, {"w": Hostile()}))
