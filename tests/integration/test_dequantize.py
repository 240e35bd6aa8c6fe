"""``--dequantize`` from end to end, held against torch's own reader and transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

import ckptctl
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.convert import plan_conversion, run_conversion
from ckptctl.errors import ChangedError, UsageError
from ckptctl.storage.execution.worker import Worker
from tests.checkpoints import differences, load_any_reference, save_hf
from tests.checkpoints.mxfp4 import decoded
from tests.contract.support import WRITABLE, place
from tests.integration.test_imports import run
from tests.sweeps import one_in

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
REPOSITORY = Path(__file__).parents[2]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CONFIG = {
    "model_type": "unknown",
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
FP8 = {"l.0.up.weight": (300, 200), "l.0.down.weight": (128, 257), "l.1.up.weight": (1, 1)}
EXPERTS = {"l.0.mlp.experts.gate_up_proj": (3, 64, 5), "l.0.mlp.experts.down_proj": (3, 10, 2)}


def quantized_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    state = {"embed.weight": torch.randn(11, 5, dtype=torch.bfloat16), "n": torch.arange(3)}
    for name, (rows, columns) in FP8.items():
        state[name] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.01
    for name, shape in EXPERTS.items():
        state[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(90, 160, shape, dtype=torch.uint8)
    return state


STATE = quantized_state()
PLAIN = {name: STATE[name] for name in ("embed.weight", "n")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "source"
    save_hf(folder, STATE, CONFIG, shards=2)
    return folder


@pytest.fixture(scope="module", params=DTYPES)
def expected(request: pytest.FixtureRequest, source: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """What torch's reader of quantized checkpoints makes of it; experts as transformers does."""
    dtype = DTYPES[request.param]
    state = {name: torch.zeros(shape, dtype=dtype) for name, shape in FP8.items()}
    load(state, storage_reader=QuantizedHuggingFaceStorageReader(str(source), target_dtype=dtype))
    for name in EXPERTS:
        blocks, scales = STATE[f"{name}_blocks"], STATE[f"{name}_scales"]
        state[name] = decoded(blocks, scales, dtype).contiguous()
    return request.param, {**PLAIN, **state}


@pytest.mark.parametrize("target", one_in(4, [name for name in WRITABLE if name != "meta"]))
@pytest.mark.parametrize("checksum", [True, False])
def test_dequantized_output_matches_reference_in_every_format(
    tmp_path: Path,
    source: Path,
    expected: tuple[str, dict[str, torch.Tensor]],
    target: str,
    checksum: bool,
) -> None:
    name, state = expected
    out = place(tmp_path, target)
    done = ckptctl.convert(
        source, out, to=target, dequantize=name, checksum=checksum, verify=checksum
    )
    assert not differences(load_any_reference(out), state)
    assert done.plan.arithmetic
    if out.is_dir():
        config = json.loads((out / "config.json").read_text())
        dtype = str(DTYPES[name]).removeprefix("torch.")
        assert config == {"model_type": "unknown", "torch_dtype": dtype}


def test_stock_dcp_loads_one_dequantized_tensor(tmp_path: Path, source: Path) -> None:
    ckptctl.convert(source, tmp_path / "out", to="dcp", dequantize="bf16", max_shard_size="20KB")
    whole = load_any_reference(tmp_path / "out")
    state: dict[str, Any] = {"l.0.up.weight": torch.zeros(300, 200, dtype=torch.bfloat16)}
    load(state, storage_reader=FileSystemReader(tmp_path / "out"))
    assert not differences(state, {"l.0.up.weight": whole["l.0.up.weight"]})


def test_dequantizing_from_dcp_matches_hf_source(tmp_path: Path, source: Path) -> None:
    ckptctl.convert(source, tmp_path / "dcp", to="dcp")
    ckptctl.convert(tmp_path / "dcp", tmp_path / "late", to="hf", dequantize="bf16")
    ckptctl.convert(source, tmp_path / "early", to="hf", dequantize="bf16")
    late, early = (load_any_reference(tmp_path / name) for name in ("late", "early"))
    assert not differences(late, early)


def test_memory_and_jobs_do_not_change_output(tmp_path: Path, source: Path) -> None:
    other: dict[str, Any] = {"jobs": 3, "memory": "1MiB"}
    for name, options in (("a", {}), ("b", other)):
        ckptctl.convert(source, tmp_path / name, to="dcp", dequantize="fp32", **options)
    for file in (tmp_path / "a").iterdir():
        assert (tmp_path / "b" / file.name).read_bytes() == file.read_bytes()


def test_interrupted_dequantize_resumes_to_same_result(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Worker.execute_unit
    calls: list[Any] = []

    def stops(self: Worker, unit: Any) -> Any:
        calls.append(unit)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return whole(self, unit)

    options: dict[str, Any] = {"to": "hf", "dequantize": "bf16", "jobs": 1, "resume": True}
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "execute_unit", stops)
        with pytest.raises(KeyboardInterrupt):
            ckptctl.convert(source, tmp_path / "out", **options)
    ckptctl.convert(source, tmp_path / "out", **options)
    ckptctl.convert(source, tmp_path / "once", to="hf", dequantize="bf16")
    found, once = (load_any_reference(tmp_path / name) for name in ("out", "once"))
    assert not differences(found, once)


def test_source_changed_after_planning_is_an_error(tmp_path: Path) -> None:
    names = ("l.0.up.weight", "l.0.up.weight_scale_inv")
    save_hf(tmp_path / "source", {name: STATE[name] for name in names}, CONFIG, shards=1)
    options = ConversionOptions(to="hf", dequantize="bf16")
    plan = plan_conversion(tmp_path / "source", tmp_path / "out", options)
    os.utime(next((tmp_path / "source").glob("*.safetensors")), ns=(1, 1))
    with pytest.raises(ChangedError, match="changed"):
        run_conversion(plan)
    assert not (tmp_path / "out").exists()


def test_plan_digest_depends_on_block_size(tmp_path: Path, source: Path) -> None:
    def digest(folder: Path, **options: Any) -> str:
        return ckptctl.plan_conversion(folder, tmp_path / "o", to="hf", **options).plan.digest

    other: dict[str, Any] = {**CONFIG, "quantization_config": {"weight_block_size": [128, 200]}}
    state = {name: STATE[name] for name in ("l.0.up.weight", "l.0.up.weight_scale_inv")}
    state["l.0.up.weight_scale_inv"] = torch.ones(3, 1)
    save_hf(tmp_path / "a", state, other)
    other["quantization_config"] = {"weight_block_size": [100, 200]}
    save_hf(tmp_path / "b", state, other)
    assert digest(tmp_path / "a", dequantize="bf16") != digest(tmp_path / "b", dequantize="bf16")
    assert digest(source, dequantize="bf16") == digest(source, dequantize="bf16")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dequantize": "bf16", "dtype": "fp32"}, "different dtypes"),
        ({"dequantize": "fp16"}, "unknown dtype `fp16` known: bf16, fp32"),
    ],
)
def test_contradictory_or_unknown_dtypes_are_usage_errors(
    tmp_path: Path, source: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError) as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="hf", **options)
    assert named in f"{caught.value.what} {caught.value.why}"


def test_dequantize_accepts_equal_dtype_option(tmp_path: Path, source: Path) -> None:
    ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="fp32", dtype="fp32")
    found = load_any_reference(tmp_path / "out")
    assert {value.dtype for value in found.values()} == {torch.float32, torch.int64}


PROGRAM = """
import sys, ckptctl
ckptctl.convert(sys.argv[1], sys.argv[2], to="hf", dequantize="fp32", jobs=2)
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


def peak(source: Path, out: Path) -> int:
    command = [sys.executable, "-c", PROGRAM, str(source), str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) * 1024


@pytest.mark.slow
def test_dequantize_memory_is_independent_of_tensor_size(tmp_path: Path) -> None:
    """And tensors of many tiles are right, those that are transposed too."""
    sizes = []
    for scale in (1, 3):
        state = {
            "a.weight": torch.randn(scale * 4096, 2048).to(torch.float8_e4m3fn),
            "a.weight_scale_inv": torch.rand(scale * 32, 16),
            "e_blocks": torch.randint(0, 256, (1, scale * 2048, 90, 16), dtype=torch.uint8),
            "e_scales": torch.randint(90, 160, (1, scale * 2048, 90), dtype=torch.uint8),
        }
        save_hf(tmp_path / f"s{scale}", state, CONFIG)
        sizes.append(peak(tmp_path / f"s{scale}", tmp_path / f"o{scale}"))
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    theirs = fp8.Fp8Dequantize(None)._dequantize_one(
        state["a.weight"], state["a.weight_scale_inv"], torch.float32
    )
    experts = mxfp4.convert_moe_packed_tensors(
        state["e_blocks"], state["e_scales"], dtype=torch.float32
    )
    found = load_any_reference(tmp_path / "o3")
    assert torch.equal(found["a.weight"], theirs)
    assert torch.equal(found["e"], experts)
    assert sizes[1] < 480_000_000
    assert sizes[1] - sizes[0] < 60_000_000, sizes


def test_dequantize_dry_run_needs_no_torch(tmp_path: Path, source: Path) -> None:
    out = str(tmp_path / "out")
    run(["convert", str(source), out, "--to", "dcp", "--dequantize", "bf16", "-n"])
