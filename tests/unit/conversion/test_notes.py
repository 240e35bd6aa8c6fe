"""What a plan says beside its files, and what an error says of a model that is not known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl.errors import MappingError, MissingTensorsError, SourceNotFoundError
from tests.checkpoints import save_hf, save_meta, save_torch, tiny_llama
from tests.checkpoints.golden import Golden

CLASSLESS = "config.json has no `architectures`, which vLLM needs to find the model class"


def test_mismatched_model_type_is_noted_or_refused(tmp_path: Path) -> None:
    source = Golden.read("mixtral").save(tmp_path / "mixtral")
    (source / "config.json").unlink()
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="dcp", model_type="qwen3_moe")
    assert "keys are copied unchanged: no layout of `qwen3_moe` has them" in plan.notes
    assert plan.model_type is None and "unknown model" in plan.statement
    with pytest.raises(MappingError, match="unknown model type") as caught:
        ckptctl.plan_conversion(
            source, tmp_path / "out", to="dcp", to_layout="hf-v5", model_type="qwen3_moe"
        )
    assert caught.value.why == "no layout of `qwen3_moe` has these keys"


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (None, None),
        ("hf", None),
        ("hf-v5", "transformers 5 reads layout hf-v5; earlier versions may not"),
        ("mistral", "transformers expects layout hf, but this is layout mistral"),
    ],
)
def test_layouts_unreadable_by_transformers_are_noted(
    tmp_path: Path, layout: str, said: str | None
) -> None:
    source = Golden.read("mixtral").save(tmp_path / "mixtral")
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="hf", to_layout=layout)
    assert [note for note in plan.notes if "transformers" in note] == ([said] if said else [])
    other = ckptctl.plan_conversion(source, tmp_path / "out", to="dcp", to_layout=layout)
    assert not any("transformers" in note for note in other.notes)


@pytest.mark.parametrize("name", ["tokenizer.json", "spiece.model"])
def test_missing_tokenizer_is_noted(tmp_path: Path, name: str) -> None:
    state, config = tiny_llama("llama3")
    source, plan = save_meta(tmp_path / "meta", state, config), ckptctl.plan_conversion
    said = "no tokenizer is written; pass `assets=DIR` to copy it from the trained model's folder"
    out = tmp_path / "out"
    assert said in plan(source, out, to="hf").notes
    hf = save_hf(tmp_path / "hf", state, config)
    for notes in (plan(source, out, to="hf", assets=hf).notes, plan(hf, out, to="hf").notes):
        assert said not in notes
    assert said not in plan(source, out, to="dcp").notes
    (source / name).touch()
    assert said not in plan(source, out, to="hf").notes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ("lamma", "`lamma` (did you mean `llama`?)"),
        ("zzz", "unknown `model_type` `zzz`"),
        ("qwen3", "no known model type has these keys"),
        (None, "no known model type has these keys"),
    ],
)
def test_unknown_model_type_error_names_reason(tmp_path: Path, stated: object, said: str) -> None:
    state, config = tiny_llama("llama3")
    source = save_hf(tmp_path / "in", {"no": state["lm_head.weight"]}, config)
    (source / "config.json").write_text(json.dumps({**config, "model_type": stated}))
    with pytest.raises(MappingError, match="unknown model type") as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="meta")
    assert (caught.value.why or "").endswith(said)


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({}, []),
        ({"architectures": None}, [' (for llama3: `["LlamaForCausalLM"]`)']),
        ({"architectures": None, "model_type": None}, []),
    ],
)
def test_config_without_architectures_is_noted(
    tmp_path: Path, stated: dict[str, object], said: list[str]
) -> None:
    state, config = tiny_llama("llama3")
    told = {"architectures": ["LlamaForCausalLM"], **config, **stated}
    source = save_hf(tmp_path / "in", state, {k: v for k, v in told.items() if v is not None})
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="hf")
    found = [note for note in plan.notes if "architectures" in note]
    assert found == [CLASSLESS + one for one in said]
    other = ckptctl.plan_conversion(source, tmp_path / "out", to="dcp")
    assert not any("architectures" in note for note in other.notes)


def test_class_of_unknown_model_type_is_not_invented(tmp_path: Path) -> None:
    state, config = tiny_llama("llama3")
    odd = {key: value for key, value in config.items() if key != "architectures"}
    source = save_hf(tmp_path / "in", {"no": state["lm_head.weight"]}, {**odd, "model_type": "no"})
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="hf")
    assert CLASSLESS in plan.notes


def test_assets_that_are_not_a_folder_are_an_error(tmp_path: Path) -> None:
    state, config = tiny_llama("llama3")
    source = save_hf(tmp_path / "in", state, config)
    other = (source / "config.json", "is a file"), (tmp_path / "inn", f"did you mean `{source}`?")
    for named, hint in other:
        with pytest.raises(SourceNotFoundError, match="no such directory") as caught:
            ckptctl.plan_conversion(source, tmp_path / "out", to="hf", assets=named)
        assert (caught.value.why or "").endswith(
            "must name a folder with config.json or params.json"
        )
        assert (caught.value.hint or "").endswith(hint)


def test_folder_of_a_torch_file_describes_its_model(tmp_path: Path) -> None:
    """Only ``assets`` makes the configuration next to a single file that of its model."""
    state, config = tiny_llama("llama3")
    source = save_torch(
        tmp_path / "model.pt", {key: one for key, one in state.items() if ".1." not in key}
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MissingTensorsError, match="the model is missing 9 tensors"):
        ckptctl.plan_conversion(source, tmp_path / "out", to="hf", assets=tmp_path)
    save_torch(source, state)
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="hf", assets=tmp_path)
    assert plan.model_type == "llama3"


def test_ambiguous_family_hints_at_assets(tmp_path: Path) -> None:
    """Without a configuration, a folder with one is what helps most: it states the heads, too."""
    state, config = tiny_llama("llama3")
    source = save_meta(tmp_path / "meta", state, config)
    (source / "params.json").unlink()
    with pytest.raises(MappingError, match="ambiguous") as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="hf")
    assert (caught.value.why or "").startswith("the tensors match")
    assert (caught.value.hint or "").startswith(
        "pass `assets=DIR` with the trained model's config.json"
    )
    with pytest.raises(MappingError, match="num_attention_heads") as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="hf", model_type="llama3")
    assert (caught.value.hint or "").startswith(
        "pass `assets=DIR` with the trained model's config.json"
    )


def test_plan_warnings_name_python_keywords(tmp_path: Path) -> None:
    torch.save({"net": {"encoder.w": torch.zeros(2)}}, tmp_path / "own.pt")
    plan = ckptctl.plan_conversion(tmp_path / "own.pt", tmp_path / "out", to="hf")
    assert plan.warnings == (
        "unknown model type; keys are copied unchanged "
        "(set it with `model_type=NAME`, or its prefix with `root=PREFIX`)",
    )
