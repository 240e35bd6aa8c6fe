"""DeepSpeed, every stage on one to four ranks: the live weights, and what its own tools say."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptctl
from ckptctl.errors import FormatError, UsageError
from tests.checkpoints.readers import differences
from tests.gloo import run_on_ranks
from tests.oracle.trainers.deepspeed_cases import CASES, MOMENTS, ROUND_ROBIN
from tests.oracle.trainers.model import FROZEN, TIED
from tests.oracle.trainers.outcome import CHECKPOINT, check, error, kept, tensors
from tests.unit.formats.damage import converted

pytestmark = [pytest.mark.oracle, pytest.mark.trainer("deepspeed")]

JOB = "tests.oracle.trainers.jobs.deepspeed_zero:save_all"
BUFFERS = ("counter", "mask", "norm.batches", "norm.mean")
INTEGERS = ("counter", "mask", "norm.batches")
MOMENT = "optimizer.state."
ACCESSIBLE = [name for name in CASES if name not in ROUND_ROBIN]
"""Where ``safe_get_full_fp32_param`` is right: it ignores ``round_robin_gradients``."""


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def world(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def saved(world: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what ``world`` ranks trained and saved."""
    folder = tmp_path_factory.mktemp("deepspeed")
    run_on_ranks(JOB, [world], str(folder))
    return folder / str(world)


@pytest.mark.parametrize("name", ACCESSIBLE)
def test_converted_weights_equal_live_masters(saved: Path, tmp_path: Path, name: str) -> None:
    check(saved / name, tmp_path, "master")


@pytest.mark.parametrize("name", CASES)
def test_converted_masters_round_to_live_module(saved: Path, tmp_path: Path, name: str) -> None:
    module = kept(saved / name, "module")
    found = tensors(converted(saved / name / CHECKPOINT, tmp_path))
    rounded = {key: value.to(module[key].dtype) for key, value in found.items()}
    assert not differences(rounded, module)


@pytest.mark.parametrize("name", CASES)
def test_module_weights_equal_live_module_except_stage_3(
    saved: Path, tmp_path: Path, name: str
) -> None:
    if CASES[name].stage == 3:
        with pytest.raises(UsageError, match="does not store weights"):
            check(saved / name, tmp_path, weights="module")
    else:
        check(saved / name, tmp_path, "module", weights="module")


@pytest.mark.parametrize("name", [name for name in ACCESSIBLE if CASES[name].stage])
def test_converted_moments_equal_live_optimizer(saved: Path, tmp_path: Path, name: str) -> None:
    found = converted(saved / name / CHECKPOINT, tmp_path, only="all")
    moments = {
        key.removeprefix(MOMENT): value
        for key, value in found.items()
        if key.startswith(MOMENT) and key.endswith(MOMENTS)
    }
    assert not differences(moments, kept(saved / name, "moments"))


@pytest.mark.parametrize("name", [name for name in ACCESSIBLE if CASES[name].stage])
def test_universal_checkpoint_equals_live_masters(saved: Path, tmp_path: Path, name: str) -> None:
    source = saved / name / "universal" / CHECKPOINT
    assert ckptctl.inspect(source).format == "deepspeed-universal"
    assert not differences(converted(source, tmp_path), kept(saved / name, "master"))


# ---------------------------------------------------------------- where DeepSpeed's own tools fail


@pytest.mark.parametrize("name", ["z0_bf16", "bf16_optimizer", "bf16_optimizer_hard"])
def test_zero_to_fp32_fails_for_z0_and_bf16_optimizer(saved: Path, name: str) -> None:
    assert error(saved / name, "zero_to_fp32")


@pytest.mark.parametrize("name", ["z1_bf16_hard", "z1_fp32_hard"])
def test_zero_to_fp32_drops_frozen_parameter_in_stage_1(saved: Path, name: str) -> None:
    theirs = kept(saved / name, "zero_to_fp32")
    assert differences(theirs, kept(saved / name, "master")) == [f"missing: {FROZEN}"]


@pytest.mark.parametrize("name", [f"z{stage}_bf16_hard" for stage in (1, 2, 3)])
def test_zero_to_fp32_cannot_write_tied_weights_as_safetensors(saved: Path, name: str) -> None:
    assert "Some tensors share memory" in error(saved / name, "safetensors")


@pytest.mark.parametrize("name", ["z1_bf16", "z2_fp32_hard", "bf16_optimizer"])
def test_ds_to_universal_turns_integer_buffers_into_floats(saved: Path, name: str) -> None:
    theirs, live = kept(saved / name, "universal"), kept(saved / name, "master")
    for buffer in INTEGERS:
        assert theirs[buffer].dtype.is_floating_point
        assert not live[buffer].dtype.is_floating_point


@pytest.mark.parametrize("name", ["z2_bf16_hard", "bf16_optimizer_hard"])
def test_ds_to_universal_takes_tied_weight_from_module(saved: Path, name: str) -> None:
    theirs, module = kept(saved / name, "universal"), kept(saved / name, "module")
    assert theirs[TIED].equal(module[TIED].float())
    assert not theirs[TIED].equal(kept(saved / name, "master")[TIED])


@pytest.mark.parametrize("name", ["z3_bf16", "z3_fp32_hard"])
def test_ds_to_universal_loses_buffers_and_shapes_in_stage_3(saved: Path, name: str) -> None:
    theirs = kept(saved / name, "universal")
    assert not theirs.keys() & set(BUFFERS)
    assert {value.dim() for value in theirs.values()} == {1}


def test_mixed_up_round_robin_universal_checkpoint_is_refused(
    saved: Path, tmp_path: Path, world: int
) -> None:
    case = saved / "z2_fp32_round_robin"
    live = kept(case, "module")
    check(case, tmp_path, "module")
    assert not differences(kept(case, "zero_to_fp32"), live)
    wrong = [name for name, value in kept(case, "universal").items() if value.ne(live[name]).any()]
    if world == 1:
        assert not wrong
        return
    assert len(wrong) >= 8
    with pytest.raises(FormatError, match="mixed up"):
        ckptctl.inspect(case / "universal" / CHECKPOINT)
