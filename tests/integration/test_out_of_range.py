"""Casts, dequantization and merges that leave the range of a dtype, held against torch's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from typer.testing import CliRunner, Result

import ckptctl
from ckptctl.cli.app import app
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.distributed import Reader
from ckptctl.errors import RefusedError
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.outcome import OutOfRange
from tests.checkpoints import save_hf, tiny_llama
from tests.checkpoints.adapters import merged_by_hand, random_adapter, save_peft
from tests.sweeps import one_in

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
INF, NAN = float("inf"), float("nan")
CONFIG = {
    "model_type": "unknown",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def weights(rows: int = 1500) -> dict[str, torch.Tensor]:
    """Two tensors, one of which has elements that are too large for fp16, and others that are not
    finite to begin with."""
    torch.manual_seed(0)
    large = torch.randn(rows, 1000).to(torch.bfloat16)
    large[rows - 1, :5] = torch.tensor([1e5, -1e5, INF, -INF, NAN])
    large[0, 0] = 7e4
    return {"a.weight": torch.randn(4, 4).to(torch.bfloat16), "b.weight": large}


def torchs(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, OutOfRange]:
    """What torch's own casts make of *state*."""
    found: dict[str, OutOfRange] = {}
    for name, value in state.items():
        made = value.to(dtype)
        largest, tie = torch.finfo(dtype).max, {torch.float8_e4m3fn: 464}.get(dtype, INF)
        counts = OutOfRange(
            int((made.float().isinf() & ~value.isinf()).sum()),
            int((made.isnan() & ~value.isnan()).sum()),
            int(((made.float().abs() == largest) & (value.float().abs() > tie)).sum()),
        )
        found |= {name: counts} if counts else {}
    return found


def test_cast_overflow_is_refused(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_hf(source, weights(), {})
    with pytest.raises(RefusedError) as caught:
        ckptctl.convert(source, out, to="hf", dtype="fp16")
    assert caught.value.what == "elements became infinite, NaN or saturated"
    assert caught.value.why == "`b.weight`: 3 infinite"
    assert "allow_overflow=True" in (caught.value.hint or "")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("target", ["hf", "dcp", "torch"])
@pytest.mark.parametrize(
    "dtype", one_in(4, ["float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
)
def test_overflow_counts_match_torch(tmp_path: Path, dtype: str, target: str) -> None:
    state, source = weights(), tmp_path / "source"
    save_hf(source, state, {})
    done = ckptctl.convert(
        source, tmp_path / "out", to=target, dtype=dtype, allow_overflow=True, jobs=2
    )
    assert done.out_of_range == torchs(state, getattr(torch, dtype)) != {}


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
def test_infinities_of_source_are_not_counted(tmp_path: Path, dtype: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_hf(source, weights(4), {})
    done = ckptctl.convert(source, out, to="hf", dtype=dtype)
    assert done.out_of_range == {}
    assert int(load_file(out / "model.safetensors")["b.weight"].isinf().sum()) == 2


def test_float32_beyond_bfloat16_range_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_hf(source, {"a": torch.tensor([3.4e38, 1.0, -3.4e38, 3.38e38])}, {})
    with pytest.raises(RefusedError, match="became infinite"):
        ckptctl.convert(source, tmp_path / "out", to="hf", dtype="bf16")


@pytest.mark.parametrize("scale", [NAN, INF])
def test_non_finite_scale_is_refused(tmp_path: Path, scale: float) -> None:
    source = tmp_path / "source"
    weight = torch.randn(256, 200).to(torch.float8_e4m3fn)
    weight.view(torch.uint8)[0, 0] = weight.view(torch.uint8)[200, 0] = 0x7F  # NaN in both
    scales = torch.ones(2, 2)
    scales[1, 0] = scale
    save_hf(source, {"a.weight": weight, "a.weight_scale_inv": scales}, CONFIG)
    block = weight[128:, :128].float() * scale
    nan = int(block.isnan().sum()) - 1
    with pytest.raises(RefusedError) as caught:
        ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")
    counts = OutOfRange(int(block.isinf().sum()), nan)
    assert caught.value.why == f"`a.weight`: {counts}"
    assert counts.total == 128 * 128 - 1
    done = ckptctl.convert(
        source, tmp_path / "out", to="torch", dequantize="bf16", allow_overflow=True
    )
    assert done.out_of_range == {"a.weight": counts}


def test_unscaled_float8_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_hf(source, {"a": torch.ones(3), "b": torch.ones(3).to(torch.float8_e4m3fn)}, {})
    with pytest.raises(RefusedError, match="without scales") as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="hf", dtype="f8e4m3")
    assert "`a`" in (caught.value.why or "") and "`b`" not in (caught.value.why or "")
    save_file({"b": torch.ones(3).to(torch.float8_e4m3fn)}, source / "model.safetensors")
    ckptctl.convert(source, tmp_path / "out", to="hf", dtype="f8e4m3")


def test_resumed_run_keeps_overflow_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is refused leaves its journal where ``--resume`` asked for it."""
    monkeypatch.setattr(
        ConversionOptions,
        "to_execution_options",
        lambda asked: ExecutionOptions(jobs=1, resume=asked.resume, journal_every=1),
    )
    state, source, out = weights(), tmp_path / "source", tmp_path / "out"
    save_hf(source, state, {})
    for _ in range(2):
        with pytest.raises(RefusedError, match="became infinite"):
            ckptctl.convert(source, out, to="hf", dtype="fp16", resume=True)
    done = ckptctl.convert(source, out, to="hf", dtype="fp16", resume=True, allow_overflow=True)
    assert done.resumed_bytes > 2_500_000
    assert done.out_of_range == torchs(state, torch.float16)
    assert not list(tmp_path.glob(".*"))


def test_merge_overflow_is_refused(tmp_path: Path) -> None:
    """What the model has itself may stay; what the adapter makes of it may not."""
    state, config = tiny_llama("llama3", "float16")
    name = "model.layers.0.self_attn.q_proj"
    state[f"{name}.weight"][0, 0] = INF
    adapter = random_adapter(state, ("layers.0.self_attn.q_proj",))
    adapter[f"base_model.model.{name}.lora_B.weight"][:2] = 1e6
    save_hf(tmp_path / "base", state, config)
    save_peft(tmp_path / "adapter", adapter)
    base, folder, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    expected = merged_by_hand(state, adapter, 2.0)[f"{name}.weight"].to(torch.float16)
    count = int(expected.isinf().sum()) - 1
    with pytest.raises(RefusedError) as caught:
        ckptctl.merge(base, folder, out)
    assert caught.value.why == f"`{name}.weight`: {count} infinite"
    done = ckptctl.merge(base, folder, out, allow_overflow=True)
    assert done.out_of_range == {f"{name}.weight": OutOfRange(count)}


def test_commands_refuse_and_report_overflow(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_hf(source, weights(4), {})

    def run(*words: str) -> Result:
        return CliRunner().invoke(app, [*words], prog_name="ckptctl")

    words = ["convert", str(source), str(out), "--to", "hf", "--dtype", "fp16"]
    refused = run(*words)
    assert refused.exit_code == 6
    assert "`b.weight`: 3 infinite" in refused.stderr
    found = run(*words, "--allow-overflow", "--json")
    counts = {"infinite": 3, "nan": 0, "saturated": 0}
    assert json.loads(found.stdout)["out_of_range"] == {"b.weight": counts}
    shown = run(*words, "--allow-overflow", "--overwrite")
    assert "elements became infinite, NaN or saturated: `b.weight`: 3 infinite" in shown.stderr
    column = ["extract", str(source), "b.weight[:, 0]", "-o", str(tmp_path / "b.npy")]
    assert run(*column, "--dtype", "fp16").exit_code == 6
    written = run(*column, "--dtype", "fp16", "--allow-overflow", "--json")
    column_counts = counts | {"infinite": 2}
    assert json.loads(written.stdout)["out_of_range"] == {"b.weight": column_counts}
    shown = run(*column, "--dtype", "fp16", "--allow-overflow", "--overwrite")
    assert "elements became infinite, NaN or saturated: `b.weight`: 2 infinite" in shown.stderr


def test_load_and_reader_refuse_overflow(tmp_path: Path) -> None:
    source, held = tmp_path / "source", weights(4)
    save_hf(source, held, {})
    state = {name: torch.zeros(value.shape, dtype=torch.float16) for name, value in held.items()}
    with pytest.raises(RefusedError, match="became infinite") as caught:
        ckptctl.load(state, source, cast=True)
    assert "allow_overflow=True" in (caught.value.hint or "")
    report = ckptctl.load(state, source, cast=True, allow_overflow=True)
    assert report.out_of_range == {"b.weight": OutOfRange(3)}
    torch.testing.assert_close(state["b.weight"], held["b.weight"].half(), equal_nan=True)
    reader = Reader(source, cast=True)
    with pytest.raises(CheckpointException, match="became infinite"):
        load(state, storage_reader=reader)
    load(state, storage_reader=Reader(source, cast=True, allow_overflow=True))
