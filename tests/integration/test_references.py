"""A reference determines the tensors of a model without a table, and of no other model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ckptctl
from ckptctl.cli.app import app
from ckptctl.conversion.recognition import references
from ckptctl.conversion.recognition.references import Reference, ReferenceResult, Shapes
from ckptctl.errors import MissingPackageError, MissingTensorsError
from ckptctl.verdict import UNKNOWN_MODEL, Verdict
from tests.checkpoints import save_dcp, save_hf, tiny_llama

SOURCE = "package 1.0 `FooModel`"
CONFIG = {"model_type": "foo", "architectures": ["FooModel"]}
STATE = {f"net.block.{n}.w{m}": torch.ones(4, 3) for n in range(2) for m in (1, 2)}
Calls = list[tuple[Any, Shapes]]


@pytest.fixture
def use_result(monkeypatch: pytest.MonkeyPatch) -> Callable[[ReferenceResult], Calls]:
    """Replace the references by one that returns a result, and list its calls."""

    def use(result: ReferenceResult) -> Calls:
        calls: Calls = []

        def compare(config: Any, shapes: Shapes) -> ReferenceResult:
            calls.append((config, shapes))
            return result

        fake = Reference("transformers", ("torch",), compare)
        monkeypatch.setattr(references, "BUILT_IN", (fake,))
        return calls

    return use


def write(folder: Path, state: Any = STATE, config: Any = CONFIG) -> Path:
    folder.mkdir()
    save_hf(folder, state)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(*arguments: object) -> tuple[int, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout or done.stderr)


def test_complete_model_names_its_source(tmp_path: Path, use_result: Any) -> None:
    calls = use_result(ReferenceResult(SOURCE))
    path = write(tmp_path / "model")
    code, found = run("verify", path)
    assert (code, found["complete"], found["reference"]) == (0, True, SOURCE)
    assert found["notes"] == [f"checked against {SOURCE}"]
    assert calls == [(CONFIG, dict.fromkeys(STATE, (4, 3)))]
    _, converted = run("convert", path, tmp_path / "out", "--to", "dcp")
    assert (converted["notes"], converted["reference"]) == (found["notes"], SOURCE)


def test_missing_tensor_is_damaged_and_not_converted(tmp_path: Path, use_result: Any) -> None:
    use_result(ReferenceResult(SOURCE, missing_names=("net.block.2.w1",), more=1))
    path = write(tmp_path / "model")
    code, found = run("verify", path)
    assert (code, found["verdict"], found["complete"]) == (4, "damaged", False)
    assert [(f["tensor"], f["basis"]) for f in found["findings"]] == [("net.block.2.w1", "model")]
    assert found["findings"][0]["why"] == f"required by {SOURCE}"
    with pytest.raises(MissingTensorsError, match="is missing 2 tensors") as caught:
        ckptctl.convert(path, tmp_path / "out", to="dcp")
    assert f"{SOURCE} requires `net.block.2.w1`" in str(caught.value.why)
    ckptctl.convert(path, tmp_path / "out", to="dcp", reference="none")
    code, plan = run("convert", path, tmp_path / "rest", "--to", "hf", "--allow-missing")
    assert (code, list(plan["missing"])) == (7, ["net.block.2.w1"])


def test_differing_shape_and_unexpected_tensor_are_named(tmp_path: Path, use_result: Any) -> None:
    shapes = {"net.block.0.w1": "the shape is (4, 3), but (4, 5) is expected"}
    use_result(ReferenceResult(SOURCE, unexpected_names=("net.block.1.w2",), shapes=shapes))
    code, found = run("verify", write(tmp_path / "model"))
    assert (code, found["verdict"]) == (9, "unknown")
    assert found["findings"][0]["tensor"] == "net.block.0.w1"
    assert found["findings"][0]["why"] == shapes["net.block.0.w1"]
    assert f"tensors that {SOURCE} does not have: `net.block.1.w2`" in found["notes"]


def test_failure_of_reference_is_structure_complete(tmp_path: Path, use_result: Any) -> None:
    use_result(ReferenceResult(failure="too large"))
    code, found = run("verify", write(tmp_path / "model"))
    assert (code, found["complete"], found["reference"]) == (0, None, None)
    assert found["notes"] == [f"{UNKNOWN_MODEL} (too large)"]


def test_model_that_reference_does_not_know_is_unknown(tmp_path: Path, use_result: Any) -> None:
    calls = use_result(ReferenceResult())
    assert run("verify", write(tmp_path / "model"))[1]["notes"] == [UNKNOWN_MODEL]
    assert len(calls) == 1


def test_inspect_uses_reference_only_on_request(tmp_path: Path, use_result: Any) -> None:
    calls = use_result(ReferenceResult(SOURCE, missing_names=("net.block.2.w1",)))
    path = write(tmp_path / "model")
    assert ckptctl.inspect(path).complete is None
    assert calls == []
    found = ckptctl.inspect(path, reference="transformers")
    assert (found.verdict, found.lacks) == (Verdict.DAMAGED, ("net.block.2.w1",))
    assert found.reference == SOURCE


def test_model_with_table_and_adapter_use_no_reference(tmp_path: Path, use_result: Any) -> None:
    calls = use_result(ReferenceResult(SOURCE))
    state, config = tiny_llama("llama3", layers=1)
    state.pop("model.norm.weight")
    assert ckptctl.verify(write(tmp_path / "llama", state, config)).reference is None
    factors = {f"a.{n}.weight": torch.ones(2, 2) for n in ("lora_A", "lora_B")}
    ckptctl.verify(write(tmp_path / "adapter", factors))
    without_config = tmp_path / "dcp"
    save_dcp(without_config, STATE)
    assert ckptctl.verify(without_config).complete is None
    assert calls == []


def test_tensors_are_compared_without_root_of_training_state(
    tmp_path: Path, use_result: Any
) -> None:
    calls = use_result(ReferenceResult(SOURCE, missing_names=("net.x",)))
    state = {"model": STATE, "optimizer": {"state": {"net.block.0.w1": {"exp_avg": torch.ones(4)}}}}
    path = tmp_path / "dcp"
    save_dcp(path, state)
    (path / "config.json").write_text(json.dumps(CONFIG))
    found = ckptctl.verify(path)
    assert [finding.tensor for finding in found.errors] == ["model.net.x"]
    assert calls[0][1].keys() == STATE.keys()


def test_quantized_weight_is_compared_by_dequantized_name(tmp_path: Path, use_result: Any) -> None:
    calls = use_result(ReferenceResult(SOURCE))
    state = {
        "a.weight": torch.ones(128, 128).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.ones(1, 1),
        "b.weight": torch.ones(8),
    }
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {**CONFIG, "quantization_config": quantization}
    assert ckptctl.verify(write(tmp_path / "model", state, config)).complete is True
    assert dict(calls[0][1]) == {"b.weight": (8,), "a.weight": None}


def test_missing_package_is_an_error_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Reference("transformers", ("no_such_package",), lambda *_: ReferenceResult(SOURCE))
    monkeypatch.setattr(references, "BUILT_IN", (absent,))
    path = write(tmp_path / "model")
    assert ckptctl.verify(path).complete is None
    with pytest.raises(MissingPackageError, match="no_such_package, which is not installed"):
        ckptctl.verify(path, reference="transformers")
