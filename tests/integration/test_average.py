"""``ckptctl average``, compared with a loop in torch."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ckptctl
from ckptctl.cli.app import app
from ckptctl.errors import MappingError, RefusedError, UsageError
from ckptctl.verbs.average_weights import compute_ema_weights, compute_schedule_weights
from tests.checkpoints import load_any_reference, save_dcp, save_hf, tiny_llama
from tests.sweeps import one_in

State = dict[str, torch.Tensor]
STEPS = (100, 200, 300, 400)


def states(dtype: torch.dtype = torch.bfloat16) -> list[State]:
    """Return the weights after each of the steps."""
    generator = torch.Generator().manual_seed(0)
    state, _ = tiny_llama()
    return [
        {
            name: (tensor.float() + torch.randn(tensor.shape, generator=generator)).to(dtype)
            for name, tensor in state.items()
        }
        for _ in STEPS
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with a checkpoint for each step."""
    for step, state in zip(STEPS, states(), strict=True):
        shards = 2 if step == STEPS[0] else 1
        save_hf(tmp_path / "run" / f"step-{step}", state, tiny_llama()[1], shards)
    return tmp_path / "run"


def read(folder: Path) -> State:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def loop(
    inputs: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float], dtype: Any = None
) -> State:
    """Return the weighted average that a loop in torch computes in float64."""
    average = {}
    for name, tensor in inputs[0].items():
        total = torch.zeros(tensor.shape, dtype=torch.float64)
        for weight, state in zip(weights, inputs, strict=True):
            total = total + weight * state[name].double()
        average[name] = (total / math.fsum(weights)).to(dtype or tensor.dtype)
    return average


def require_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("options", "weights"),
    one_in(
        3,
        [
            ({}, (1, 1, 1, 1)),
            ({"weights": [1, 2, 3, 5.5]}, (1, 2, 3, 5.5)),
            ({"ema": 0.9}, (0.9**3, 0.1 * 0.9**2, 0.1 * 0.9, 0.1)),
            ({"schedule": "linear"}, (1, 1, 1, 1)),
            ({"schedule": "1-sqrt"}, compute_schedule_weights(4, "1-sqrt")),
            ({"dtype": "fp32"}, (1, 1, 1, 1)),
        ],
    ),
)
def test_average_equals_loop_in_float64(
    tmp_path: Path, run: Path, options: dict[str, Any], weights: Sequence[float]
) -> None:
    paths = [run / f"step-{step}" for step in STEPS]
    if "ema" in options:
        weights = compute_ema_weights(4, 0.9)
    ckptctl.average(paths, tmp_path / "out", **options)
    dtype = torch.float32 if "dtype" in options else None
    require_equal(read(tmp_path / "out"), loop(states(), weights, dtype))
    assert (tmp_path / "out" / "config.json").exists()


def test_ema_weights_equal_recursion() -> None:
    values, average = [3.0, 5.0, 2.0, 8.0], 3.0
    for value in values[1:]:
        average = 0.75 * average + 0.25 * value
    weights = compute_ema_weights(4, 0.75)
    assert math.isclose(sum(map(math.prod, zip(weights, values, strict=True))), average)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "1-sqrt"])
def test_schedule_weights_have_the_effect_of_a_decay(schedule: Any) -> None:
    """An update counts as much as the learning rate of the schedule when it was made."""
    weights = compute_schedule_weights(5, schedule)
    rates = [sum(weights[number:]) for number in range(5)]
    assert math.isclose(rates[0], 1) and rates == sorted(rates, reverse=True)
    halfway = {"linear": 0.6, "cosine": (1 + math.cos(0.4 * math.pi)) / 2, "1-sqrt": 1 - 0.4**0.5}
    assert math.isclose(rates[2], halfway[schedule])


def test_sources_may_have_different_formats_and_layouts(tmp_path: Path, run: Path) -> None:
    ckptctl.convert(run / "step-100", tmp_path / "meta", to="meta")
    ckptctl.convert(run / "step-200", tmp_path / "dcp", to="dcp", to_layout="torchtitan@0.3")
    paths = [tmp_path / "meta", tmp_path / "dcp", run / "step-300", run / "step-400"]
    ckptctl.average(paths, tmp_path / "out", to="hf")
    expected = loop(states(), (1, 1, 1, 1))
    require_equal(read(tmp_path / "out"), expected)
    ckptctl.average(paths[::-1], tmp_path / "other", to="meta", verify=True)
    ckptctl.convert(tmp_path / "other", tmp_path / "back", to="hf")
    require_equal(read(tmp_path / "back"), loop(states()[::-1], (1, 1, 1, 1)))


def test_average_is_quantized_like_its_unquantized_output(tmp_path: Path, run: Path) -> None:
    paths = [run / f"step-{step}" for step in STEPS]
    ckptctl.average(paths, tmp_path / "plain")
    ckptctl.convert(tmp_path / "plain", tmp_path / "expected", to="hf", quantize="fp8-channel")
    ckptctl.average(paths, tmp_path / "out", quantize="fp8-channel")
    found, expected = read(tmp_path / "out"), read(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].float(), expected[name].float()) for name in expected)


def test_run_options_select_complete_checkpoints(tmp_path: Path, run: Path) -> None:
    plan = ckptctl.plan_average([run], tmp_path / "out", last=2)
    assert plan.sources == (str(run / "step-300"), str(run / "step-400"))
    plan = ckptctl.plan_average([run], tmp_path / "out", every=200)
    assert plan.sources == (str(run / "step-200"), str(run / "step-400"))
    next((run / "step-400").glob("*.safetensors")).write_bytes(b"cut")
    plan = ckptctl.plan_average([run], tmp_path / "out", last=2)
    assert plan.sources == (str(run / "step-200"), str(run / "step-300"))
    with pytest.raises(UsageError, match="selects more"):
        ckptctl.plan_average([run], tmp_path / "out", last=4)
    with pytest.raises(UsageError, match="one run"):
        ckptctl.plan_average([run, run / "step-100"], tmp_path / "out", last=2)
    with pytest.raises(UsageError, match="at least two"):
        ckptctl.plan_average([run / "step-100"], tmp_path / "out")


def test_integer_tensors_must_be_equal(tmp_path: Path) -> None:
    for name, table in (("a", 0), ("b", 0), ("c", 1)):
        state = {"w": torch.full((3, 2), float(len(name))), "table": torch.arange(5) + table}
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
    plan = ckptctl.plan_average([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert (plan.averaged, plan.equal) == (1, 1)
    ckptctl.average([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert torch.equal(read(tmp_path / "out")["table"], torch.arange(5))
    with pytest.raises(MappingError, match="`table` differs between the checkpoints"):
        ckptctl.average([tmp_path / "a", tmp_path / "c"], tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("config", "contradict"),
        ("shape", "different shapes"),
        ("dtype", "different dtypes"),
        ("missing", "missing"),
        ("extra", "missing"),
    ],
)
def test_checkpoints_of_different_models_are_refused(
    tmp_path: Path, run: Path, change: str, message: str
) -> None:
    state, config = states()[0], tiny_llama()[1]
    other: dict[str, Any] = dict(config)
    if change == "config":
        other["rms_norm_eps"] = 0.25
    state, first = dict(state), next(iter(state))
    if change == "dtype":
        state = {name: tensor.float() for name, tensor in state.items()}
    if change in ("shape", "missing", "extra"):  # of tensors that no model type has
        config = other = {}
        save_hf(tmp_path / "first", state, config, shards=1)
        if change == "missing":
            del state[first]
        else:
            state["x" if change == "extra" else first] = state[first][:-1].clone()
    save_hf(tmp_path / "other", state, other, shards=1)
    paths = [tmp_path / "other", run / "step-100" if config else tmp_path / "first"]
    with pytest.raises(MappingError) as error:
        ckptctl.average(paths, tmp_path / "out")
    assert message in f"{error.value.what} {error.value.why}"
    assert not (tmp_path / "out").exists()


def test_trusted_assets_decide_contradictions(tmp_path: Path, run: Path) -> None:
    state, config = tiny_llama()
    assets = save_hf(tmp_path / "assets", state, config | {"rms_norm_eps": 0.25})
    paths = [run / "step-100", run / "step-200"]
    with pytest.raises(MappingError):
        ckptctl.plan_average(paths, tmp_path / "out", assets=assets)
    plan = ckptctl.plan_average(paths, tmp_path / "out", assets=assets, trust_assets=True)
    assert any("rms_norm_eps" in note for note in plan.conversion.notes)


def test_nan_is_refused_unless_allowed(tmp_path: Path, run: Path) -> None:
    state = states()[0]
    state["model.norm.weight"][3] = math.nan
    save_hf(tmp_path / "nan", state, tiny_llama()[1], shards=1)
    paths = [tmp_path / "nan", run / "step-100"]
    with pytest.raises(RefusedError):
        ckptctl.average(paths, tmp_path / "out")
    result = ckptctl.average(paths, tmp_path / "out", allow_overflow=True)
    assert result.out_of_range.keys() == {"model.norm.weight"}
    assert read(tmp_path / "out")["model.norm.weight"].isnan().sum() == 1


def test_moments_are_averaged_and_counters_come_from_the_last(tmp_path: Path) -> None:
    saved: list[dict[str, Any]] = []
    for step in (10, 20):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(step):
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
        state = {
            "model": model.state_dict(),
            "optimizer": {
                f"state.{name}.{key}": value
                for name, parameter in model.named_parameters()
                for key, value in optimizer.state[parameter].items()
            },
            "step": step,
        }
        save_dcp(tmp_path / f"step-{step}", state)
        saved.append(state)
    paths = [tmp_path / "step-10", tmp_path / "step-20"]
    plan = ckptctl.plan_average(paths, tmp_path / "out", only="all")
    assert len(plan.from_last) == 2 and plan.averaged == 6
    ckptctl.average(paths, tmp_path / "out", only="all")
    found = load_any_reference(tmp_path / "out")
    assert found["step"] == 20
    for part in ("model", "optimizer"):
        for name in saved[0][part]:
            values = [state[part][name] for state in saved]
            average = loop([{"": value} for value in values], (1, 1))[""]
            is_counter = name.endswith("step")
            assert torch.equal(found[f"{part}.{name}"], values[1] if is_counter else average)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "1,2"], "2 weights for 4 checkpoints"),
        (["--weights", "1,1,1,-1"], "not a positive number"),
        (["--weights", "1e308,1e308,1,1"], "sum of the weights is too large"),
        (["--weights", "1,1,1,x"], "`x` is not a number"),
        (["--weights", "1,1,1,1", "--ema", "0.9"], "conflicts with"),
        (["--ema", "0.9", "--schedule", "cosine"], "conflicts with"),
        (["--ema", "1.5"], ""),
        (["--schedule", "square"], "unknown value"),
    ],
)
def test_wrong_weights_are_usage_errors(
    tmp_path: Path, run: Path, arguments: list[str], message: str
) -> None:
    paths = [str(run / f"step-{step}") for step in STEPS]
    result = CliRunner().invoke(app, ["average", *paths, str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_same_checkpoint_twice_is_an_error(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UsageError, match="given twice"):
        ckptctl.average([run / "step-100", run / "step-100"], tmp_path / "out")
    (tmp_path / "link").symlink_to(run / "step-100")
    for again in (tmp_path / "link", run / ".." / "run" / "step-100"):
        with pytest.raises(UsageError, match="given twice"):
            ckptctl.average([run / "step-100", again], tmp_path / "out")


def test_differences_of_configurations_are_noted(tmp_path: Path, run: Path) -> None:
    path = run / "step-200" / "config.json"
    config = {**json.loads(path.read_text()), "max_position_embeddings": 77, "use_cache": False}
    config["rope_scaling"] = dict(reversed(config["rope_scaling"].items()))
    path.write_text(json.dumps(config))
    plan = ckptctl.average([run / "step-100", run / "step-200"], tmp_path / "out").plan
    (note,) = (note for note in plan.notes if "config.json differs" in note)
    assert "`max_position_embeddings`" in note and "`use_cache`" in note
    assert "rope_scaling" not in note, "the order of keys is no difference"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is False


def test_interrupted_average_resumes(tmp_path: Path, run: Path) -> None:
    paths = [run / f"step-{step}" for step in STEPS]

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckptctl.average(paths, tmp_path / "out", progress=interrupt)
    assert not (tmp_path / "out").exists()
    ckptctl.average(paths, tmp_path / "out", resume=True)
    require_equal(read(tmp_path / "out"), loop(states(), (1, 1, 1, 1)))
    shutil.rmtree(tmp_path / "out")
