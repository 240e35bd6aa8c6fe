"""What trainers record beside Megatron-Core's checkpoint: the model type, sizes, config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl import families, formats
from ckptctl.errors import CkptError, MappingError, UnsupportedError
from ckptctl.facts import MEGATRON
from ckptctl.facts.megatron_files import build_megatron_arguments, build_run_config
from ckptctl.storage.yaml_text import dump_yaml, parse_yaml
from tests.checkpoints.mcore import write

FAMILY = families.family("llama3")
CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
LAYER = {
    "self_attention.linear_qkv.weight": (48, 16),
    "self_attention.linear_qkv.layer_norm_weight": (16,),
    "self_attention.linear_proj.weight": (16, 24),
    "mlp.linear_fc1.weight": (48, 16),
    "mlp.linear_fc1.layer_norm_weight": (16,),
    "mlp.linear_fc2.weight": (16, 24),
}
SHAPES = {
    "embedding.word_embeddings.weight": (32, 16),
    **{f"decoder.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()},
    "decoder.final_layernorm.weight": (16,),
    "output_layer.weight": (32, 16),
}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def bridge(folder: Path, tensors: dict[str, torch.Tensor], **told: Any) -> Path:
    """Write a checkpoint as Megatron-Bridge does: without arguments, beside ``run_config.yaml``."""
    saved = write(folder / "iter_0000010", tensors)
    (saved / "run_config.yaml").write_bytes(dump_yaml(build_run_config(FAMILY, CONFIG | told)))
    return saved


def test_config_json_is_generated_from_run_config(tmp_path: Path, tensors: Any) -> None:
    saved = bridge(tmp_path, tensors)
    assert ckptctl.inspect(saved).model_type == "llama3"
    result = ckptctl.convert(saved, tmp_path / "hf", to="hf")
    made = json.loads((tmp_path / "hf/config.json").read_text())
    assert {name: made.get(name) for name in CONFIG} == CONFIG
    assert made["architectures"] == ["LlamaForCausalLM"]
    notes = " ".join(result.all_notes)
    assert "config.json is generated from Megatron's configuration for llama3" in notes
    assert "max_position_embeddings 8192" in notes


def test_config_json_that_contradicts_run_config_is_an_error(tmp_path: Path, tensors: Any) -> None:
    saved = bridge(tmp_path, tensors, rope_theta=10000.0)
    assert ckptctl.verify(saved).verdict == "complete"
    (saved / "config.json").write_text(json.dumps(CONFIG))
    found = ckptctl.verify(saved)
    assert found.exit_code == 9
    (one,) = found.unknown
    assert one.what == "the descriptions of the model contradict each other"
    assert "run_config.yaml" in str(one.why)
    with pytest.raises(MappingError, match="contradict each other") as caught:
        ckptctl.convert(saved, tmp_path / "hf", to="hf")
    assert str(one.why) in str(caught.value.why).replace(f"{saved}/", "")
    (saved / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 10000.0}))
    assert ckptctl.verify(saved).verdict == "complete"


def test_config_json_is_generated_from_megatron_args(tmp_path: Path, tensors: Any) -> None:
    saved = write(tmp_path / "iter_0000010", tensors, build_megatron_arguments(FAMILY, CONFIG))
    ckptctl.convert(saved, tmp_path / "hf", to="hf", model_type="llama3")
    made = json.loads((tmp_path / "hf/config.json").read_text())
    assert {name: made.get(name) for name in CONFIG} == CONFIG


def test_missing_norm_epsilon_is_a_mapping_error(tmp_path: Path, tensors: Any) -> None:
    told = build_megatron_arguments(FAMILY, CONFIG)
    del told["norm_epsilon"]
    saved = write(tmp_path / "iter_0000010", tensors, told)
    with pytest.raises(MappingError, match="requires `rms_norm_eps`") as raised:
        ckptctl.convert(saved, tmp_path / "hf", to="hf", model_type="llama3")
    assert "assets" in str(raised.value.hint)


def test_all_padding_vocab_rows_are_noted(tmp_path: Path, tensors: Any) -> None:
    saved = write(tmp_path / "iter_0000010", tensors)
    asked: dict[str, Any] = {"to": "torch", "to_layout": "hf", "model_type": "llama3"}
    result = ckptctl.convert(saved, tmp_path / "out.pt", sizes={"h": 4, "k": 2}, **asked)
    assert any("the 32 rows of the vocabulary are padding" in note for note in result.all_notes)


def test_assets_that_contradict_run_config_are_refused(tmp_path: Path, tensors: Any) -> None:
    saved = bridge(tmp_path, tensors)
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 10000.0}))
    with pytest.raises(MappingError, match="contradict each other") as raised:
        ckptctl.convert(saved, tmp_path / "hf", to="hf", assets=assets, model_type="llama3")
    assert "run_config.yaml" in str(raised.value.where)
    assert "as `rotary_base`" in str(raised.value.why)


def test_nemo_model_yaml_sets_model_type(tmp_path: Path, tensors: Any) -> None:
    step = tmp_path / "step=10-last"
    step.mkdir()
    write(step / "weights", tensors)
    (step / "context").mkdir()
    (step / "context/model.yaml").write_text(
        "_target_: nemo.collections.llm.gpt.model.llama.LlamaModel\n"
        "config:\n  _target_: nemo.collections.llm.gpt.model.llama.Llama3Config8B\n"
        "  num_layers: 2\n  rotary_base: 500000\n"
        "  params_dtype: !!python/object/apply:os.system [id]\n"
    )
    found = formats.open_checkpoint(step)
    assert set(found.extensions[MEGATRON]) == {"../context/model.yaml"}
    assert ckptctl.inspect(step).model_type == "llama3"


def fiddle(module: str, name: str, **given: object) -> dict[str, object]:
    """Return a configuration as Fiddle 0.3.1 serializes it; what it builds lies in *module*."""
    made = {"type": "pyref", "module": module, "name": name}
    said = {"type": {"type": "pyref", "module": "m", "name": "Metadata"}, "metadata": None}
    return {
        "type": {"type": "pyref", "module": "fiddle._src.config", "name": "Config"},
        "items": [[f"Attr(name='{key}')", value] for key, value in given.items()],
        "metadata": {**said, "items": [["Attr(name='fn_or_cls')", made]]},
    }


def test_nemo_model_json_sets_model_type(tmp_path: Path, tensors: Any) -> None:
    (tmp_path / "context").mkdir()
    write(tmp_path / "weights", tensors)
    home, module = "nemo.collections.llm.gpt.model.llama", "os"
    config: dict[str, Any] = {
        "num_layers": {"type": "leaf", "value": 2, "paths": []},
        "rotary_base": 500000,
        "params_dtype": {"type": "pyref", "module": module, "name": "system"},
    }
    objects = {
        "config_1": fiddle(home, "Llama3Config8B", **config),
        "model_1": fiddle(home, "LlamaModel", config={"type": "ref", "key": "config_1"}),
        "context_1": fiddle("nemo", "Context", model={"type": "ref", "key": "model_1"}),
    }
    said = {"root": {"type": "ref", "key": "context_1"}, "objects": objects, "version": "0.0.1"}
    (tmp_path / "context/io.json").write_text(json.dumps(said))
    (record,) = formats.open_checkpoint(tmp_path).extensions[MEGATRON].values()
    target = "_target_"
    assert record == {
        target: f"{home}.LlamaModel",
        "config": {
            target: f"{home}.Llama3Config8B",
            "num_layers": 2,
            "rotary_base": 500000,
            "params_dtype": {target: "os.system"},
        },
    }
    assert ckptctl.inspect(tmp_path).model_type == "llama3"
    objects["config_1"] = {"type": "ref", "key": "config_1"}
    objects["model_1"] = fiddle(
        home, "LlamaModel", config={"items": [["0", {"type": "ref", "key": "model_1"}]]}
    )
    (tmp_path / "context/io.json").write_text(json.dumps(said))
    with pytest.raises(UnsupportedError, match="this JSON is not a configuration"):
        formats.open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["[1, 2", "- 1\n", "a: &a [*a]\n"])
def test_malformed_run_config_yaml_is_unsupported(tmp_path: Path, tensors: Any, text: str) -> None:
    saved = bridge(tmp_path, tensors)
    (saved / "run_config.yaml").write_text(text)
    with pytest.raises(UnsupportedError, match="this YAML is not a configuration") as raised:
        formats.open_checkpoint(saved)
    assert "run_config.yaml" in str(raised.value.where)


def test_run_config_with_wrong_layer_count_is_refused(tmp_path: Path, tensors: Any) -> None:
    saved = bridge(tmp_path, tensors, num_hidden_layers=4)
    with pytest.raises(CkptError):
        ckptctl.convert(saved, tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()


def test_tensors_excluded_by_record_keep_their_names(tmp_path: Path, tensors: Any) -> None:
    """Without a gate, ``linear_fc1`` of these shapes is no Llama's."""
    told = {**build_megatron_arguments(FAMILY, CONFIG), "swiglu": False, "add_bias_linear": False}
    saved = write(tmp_path / "iter_0000010", tensors, told)
    assert ckptctl.inspect(saved).model_type is None
    ckptctl.convert(saved, tmp_path / "out.pt", to="torch")
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(MappingError, match="unknown model type") as caught:
        ckptctl.convert(saved, tmp_path / "hf", to="hf")
    assert "Megatron's records contradict every model type" in str(caught.value.why)


def test_tied_model_type_is_detected_from_run_config(tmp_path: Path) -> None:
    family = families.family("qwen2")
    told = CONFIG | {"model_type": "qwen2", "tie_word_embeddings": True}
    shapes = {name: shape for name, shape in SHAPES.items() if name != "output_layer.weight"}
    shapes |= {f"decoder.layers.{i}.self_attention.linear_qkv.bias": (48,) for i in range(2)}
    saved = write(tmp_path / "iter_0000010", {n: torch.ones(s) for n, s in shapes.items()})
    (saved / "run_config.yaml").write_bytes(dump_yaml(build_run_config(family, told)))
    found = ckptctl.inspect(saved)
    assert (found.model_type, found.layout) == ("qwen2", "mcore")


def test_megatron_records_are_copied_to_output(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Plain values as they are; of whatever else there is, the name alone is known."""
    args = build_megatron_arguments(FAMILY, CONFIG) | {
        "tensor_model_parallel_size": 2,
        "save": "/runs/1",
    }
    told = {**args, "params_dtype": torch.bfloat16}
    saved = write(tmp_path / "run" / "iter_0000010", tensors, told)
    yaml = {
        **build_run_config(FAMILY, CONFIG),
        "train": {"train_iters": 5},
        "scheduler": {"end": 0.5},
    }
    (saved / "run_config.yaml").write_bytes(dump_yaml(yaml) + b"dataset: !!python/name:os.system\n")
    found = ckptctl.convert(saved, tmp_path / "out", to="mcore", dtype="bfloat16")
    left = [note for note in found.plan.notes if "plain values" in note]
    assert ["`params_dtype`" in left[0], "`dataset`" in left[1]] == [True, True]
    common = torch.load(tmp_path / "out" / "release" / "common.pt", weights_only=False)
    new = {"tensor_model_parallel_size": 1, "bf16": True, "padded_vocab_size": 32}
    assert vars(common["args"]) == args | new
    written = parse_yaml((tmp_path / "out" / "release" / "run_config.yaml").read_text(), "")
    model = build_run_config(FAMILY, CONFIG, dtype="bfloat16", padded_rows=32)["model"]
    assert written == {**yaml, "model": model}
