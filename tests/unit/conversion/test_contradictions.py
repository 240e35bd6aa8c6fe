"""Files that describe one model in two ways: refused with both named, or decided by the user."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.errors import CkptError, MappingError, SourceNotFoundError, UsageError
from tests.checkpoints import save_hf, save_meta, save_torch, tiny_llama
from tests.checkpoints.llama import Config, StateDict
from tests.contract.tables import FAMILIES, tiny

SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "rope_scaling": None,
    "rope_theta": 1e6,
    "sliding_window": None,
}
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("num_attention_heads", {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}),
    ("rms_norm_eps", {"rms_norm_eps": 1e-2}),
    ("rope_theta", {"rope_theta": 1e4}),
    ("rope.factor", {"rope_scaling": SCALED | {"factor": 32.0}}),
    ("rope.rope_type", {"rope_scaling": None}),
    ("hidden_act", {"hidden_act": "gelu"}),
)


def model(**sizes: Any) -> tuple[StateDict, Config]:
    return tiny_llama("llama3", **({"kv_heads": 4} | sizes))


def folder(path: Path, content: Mapping[str, Any], name: str = "config.json") -> Path:
    path.mkdir(exist_ok=True)
    (path / name).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(("fact", "change"), CHANGES)
@pytest.mark.parametrize("form", ["meta", "hf"])
def test_contradicting_assets_are_refused_or_trusted(
    tmp_path: Path, form: str, fact: str, change: dict[str, Any]
) -> None:
    state, config = model()
    source = (save_meta if form == "meta" else save_hf)(tmp_path / "in", state, config)
    own = source / ("params.json" if form == "meta" else "config.json")
    assets = folder(tmp_path / "assets", config | change)
    with pytest.raises(MappingError) as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="hf", assets=assets)
    error = caught.value
    assert str(own) in str(error.why) and str(assets / "config.json") in str(error.why)
    assert f"`{fact}`" in str(error.why) and "different outputs" in str(error.why)
    assert "trust_assets=True" in str(error.hint)
    plan = ckptctl.plan_conversion(
        source, tmp_path / "out", to="hf", assets=assets, trust_assets=True
    )
    decided = plan.decided
    assert fact in decided and str(own) in decided[fact]
    assert [note for note in plan.notes if note.startswith(f"`{fact}`: ")]


def test_matching_assets_are_accepted_silently(tmp_path: Path) -> None:
    state, config = model()
    expected = config | {"rope_scaling": None, "rope_parameters": {**SCALED, "rope_theta": 5e5}}
    del expected["rope_theta"]
    for form, save in (("meta", save_meta), ("hf", save_hf)):
        source = save(tmp_path / form, state, config)
        assets = folder(tmp_path / "assets", expected | {"_name_or_path": "x", "use_cache": False})
        plan = ckptctl.plan_conversion(source, tmp_path / "out", to="hf", assets=assets)
        assert plan.decided == {}
        assert not [note for note in plan.notes if "assets" in note], plan.notes


def test_trusted_assets_decide_row_permutation(tmp_path: Path) -> None:
    state, config = model(heads=8, kv_heads=8)
    source = save_meta(tmp_path / "in", state, config)
    params = json.loads((source / "params.json").read_text())
    folder(source, params | {"n_heads": 4, "n_kv_heads": 4}, "params.json")
    assets = folder(tmp_path / "assets", config)
    with pytest.raises(MappingError, match="contradict each other"):
        ckptctl.convert(source, tmp_path / "out", to="hf", assets=assets)
    assert not (tmp_path / "out").exists()
    ckptctl.convert(source, tmp_path / "out", to="hf", assets=assets, trust_assets=True)
    read = torch.load(source / "consolidated.00.pth", weights_only=True)
    found: dict[str, Any] = {name: torch.empty_like(value) for name, value in state.items()}
    ckptctl.load(found, tmp_path / "out")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(found[name], state[name])
    assert not torch.equal(found[name], read["layers.0.attention.wq.weight"])


def test_token_id_differences_are_notes(tmp_path: Path) -> None:
    state, config = model()
    source = save_hf(tmp_path / "in", state, config)
    assets = folder(tmp_path / "assets", config | {"eos_token_id": 9})
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="hf", assets=assets)
    said = "\n".join(plan.notes)
    assert f"`eos_token_id` is 2 in {source / 'config.json'} and 9 in {assets}" in said


def test_known_default_counts_as_statement(tmp_path: Path) -> None:
    state, config = model()
    source = save_hf(tmp_path / "in", state, config)
    silent = {name: value for name, value in config.items() if name != "rope_theta"}
    assets = folder(tmp_path / "assets", silent)
    with pytest.raises(MappingError) as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="hf", assets=assets)
    assert "10000.0 in" in str(caught.value.why)
    assert "which does not set it" in str(caught.value.why)


def test_facts_missing_in_assets_are_noted(tmp_path: Path) -> None:
    state, config = model()
    source = save_hf(tmp_path / "in", state, config | {"embedding_multiplier": 12.0})
    assets = folder(tmp_path / "assets", config)
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="hf", assets=assets)
    assert any("states `embedding_multiplier` (12.0)" in note for note in plan.notes)


def test_params_era_determines_rope_theta(tmp_path: Path) -> None:
    state, config = tiny_llama("llama2")
    source = save_meta(tmp_path / "in", state, config)
    params = json.loads((source / "params.json").read_text())
    params.pop("rope_theta", None)
    folder(source, params, "params.json")
    assets = folder(tmp_path / "assets", config | {"rope_theta": 500000.0})
    with pytest.raises(MappingError) as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="hf", assets=assets)
    assert "`rope_theta` is 10000.0" in str(caught.value.why)
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="hf")
    assert any("bos_token_id 1, eos_token_id 2" in note for note in plan.notes)


def test_rope_theta_is_always_written(tmp_path: Path) -> None:
    state, config = tiny_llama("llama2")
    source = save_hf(tmp_path / "in", state, config)
    out = tmp_path / "out"
    ckptctl.convert(source, out, to="meta")
    assert json.loads((out / "params.json").read_text())["rope_theta"] == 10000.0


@pytest.mark.parametrize("biased", [True, False])
def test_attention_bias_must_match_tensors(tmp_path: Path, biased: bool) -> None:
    state, config = model()
    if biased:
        held = {name: len(value) for name, value in state.items() if ".self_attn." in name}
        state |= {name.replace("weight", "bias"): torch.zeros(n) for name, n in held.items()}
    source = save_hf(tmp_path / "in", state, config | {"attention_bias": not biased})
    with pytest.raises(MappingError) as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="dcp")
    assert "`attention_bias` is " in str(caught.value.why)
    assert "the tensors (with" in str(caught.value.why)
    verified = ckptctl.verify(source)
    assert verified.verdict == "unknown"
    why = str(caught.value.why).replace(f"{source}/", "").partition("; with")[0]
    assert [one.why for one in verified.unknown] == [why]
    assert verified.unknown[0].what == "the configuration and the tensors disagree"
    assert verified.unknown[0].basis == "model"
    right = save_hf(tmp_path / "right", state, config | {"attention_bias": biased})
    assert ckptctl.plan_conversion(right, tmp_path / "out", to="dcp")
    assert not ckptctl.verify(right).findings


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text"])
def test_attention_bias_of_gpt_oss_and_llama4_matches_tensors(
    tmp_path: Path, name: str, biased: bool
) -> None:
    family = FAMILIES[name]
    shapes = tiny(family, "hf", optional=biased)
    state = {key: torch.zeros(shape) for key, shape in shapes.items()}
    assert any(key.endswith("q_proj.bias") for key in state) is biased
    sizes = {names[0]: family.tiny[axis] for axis, names in family.sizes.items()}
    config = {**family.config_signs[0], **sizes, "interleave_moe_layer_step": 2}
    source = save_hf(tmp_path / "in", state, config | {"attention_bias": not biased})
    (finding,) = ckptctl.verify(source).unknown
    assert finding.what == "the configuration and the tensors disagree"
    assert "`attention_bias` is " in str(finding.why)
    right = save_hf(tmp_path / "right", state, config | {"attention_bias": biased})
    assert not ckptctl.verify(right).findings


def test_sizes_that_contradict_config_are_usage_errors(tmp_path: Path) -> None:
    state, config = model()
    source = save_hf(tmp_path / "in", state, config)
    with pytest.raises(UsageError) as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="dcp", sizes={"n_heads": 8})
    assert "`sizes={'n_heads': 8}` contradicts" in caught.value.what
    assert str(source / "config.json") in caught.value.what


def test_trust_assets_requires_assets(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "in", *model())
    with pytest.raises(UsageError, match="`trust_assets=True` requires `assets`"):
        ckptctl.plan_conversion(source, tmp_path / "out", to="dcp", trust_assets=True)


def test_self_contradictory_assets_are_refused_even_if_trusted(tmp_path: Path) -> None:
    state, config = model()
    source = save_hf(tmp_path / "in", state, config)
    other = save_meta(tmp_path / "meta", state, config | {"rms_norm_eps": 1e-3})
    assets = folder(other, config)
    with pytest.raises(MappingError) as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="hf", assets=assets, trust_assets=True)
    assert "`rms_norm_eps`" in str(caught.value.why)
    assert "correct the file" in str(caught.value.hint)


def test_assets_that_contradict_tensors_are_refused_even_if_trusted(tmp_path: Path) -> None:
    """Nor is it suggested to trust them: that would end in the same error."""
    state, config = model()
    source = save_hf(tmp_path / "in", state, config)
    (source / "config.json").unlink()
    assets = folder(tmp_path / "assets", config | {"vocab_size": 160})
    for trust in (False, True):
        with pytest.raises(MappingError, match="the configuration and the tensors") as caught:
            ckptctl.plan_conversion(
                source, tmp_path / "out", to="hf", assets=assets, trust_assets=trust
            )
        assert "correct the file" in str(caught.value.hint)


def test_load_refuses_contradicting_assets(tmp_path: Path) -> None:
    state, config = model(heads=8, kv_heads=8)
    source = save_meta(tmp_path / "in", state, config)
    assets = folder(tmp_path / "assets", config | {"num_attention_heads": 4, "head_dim": 16})
    found: dict[str, Any] = {name: torch.empty_like(value) for name, value in state.items()}
    with pytest.raises(MappingError, match="contradict each other"):
        ckptctl.load(found, source, model_type="llama3", assets=assets)


def test_explicit_model_type_is_still_checked(tmp_path: Path) -> None:
    state, config = tiny_llama("llama3", tied=True)
    source = save_hf(tmp_path / "in", state, config | {"intermediate_size": 448})
    with pytest.raises(MappingError):
        ckptctl.plan_conversion(source, tmp_path / "out", to="dcp", model_type="llama3")
    right = save_hf(tmp_path / "right", state, config)
    plan = ckptctl.plan_conversion(right, tmp_path / "out", to="dcp", model_type="llama3")
    assert plan.model_type == "llama3" and plan.from_layout == "hf"


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_trusted_assets_decide_how_shards_are_joined(tmp_path: Path, shards: int) -> None:
    """Heads that ranks repeat, too: by a params.json that is wrong they cannot be read at all."""
    state, config = model(kv_heads=2)
    source = save_meta(tmp_path / "in", state, config, shards)
    params = json.loads((source / "params.json").read_text())
    folder(source, params | {"n_heads": 2 * params["n_heads"], "n_kv_heads": 1}, "params.json")
    assets = folder(tmp_path / "assets", config)
    out = tmp_path / "out"
    for other in (assets, None):
        with pytest.raises(CkptError) as caught:
            ckptctl.plan_conversion(source, out, to="torch", to_layout="hf", assets=other)
        assert "trust_assets=True" in str(caught.value.hint)
    with pytest.raises(SourceNotFoundError, match="no such directory"):
        gone = tmp_path / "gone"
        ckptctl.plan_conversion(source, out, to="hf", assets=gone, trust_assets=True)
    ckptctl.convert(source, out, to="torch", to_layout="hf", assets=assets, trust_assets=True)
    written = torch.load(out, weights_only=True)
    torch.testing.assert_close(written, state, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"rms_norm_eps": 1e-2, "lr": 1e-3}, "`rms_norm_eps` is 0.01 in `hyper_parameters` in"),
        ({"config": {"num_attention_heads": 8}}, "8 in `hyper_parameters.config` in"),
        ({"model": {"model_type": "llama", "hidden_act": "gelu"}}, "'gelu' in `hyper_parameters"),
        ({"rms_norm_eps": "1e-5", "hidden_size": 64, "teacher": {"hidden_size": 9}}, None),
        ({"learning_rate": 1.0, "hidden_size": None, "config": "llama"}, None),
    ],
)
def test_lightning_hyperparameters_are_compared_with_assets(
    tmp_path: Path, arguments: dict[str, Any], named: str | None
) -> None:
    state, config = model()
    source = tmp_path / "epoch=1.ckpt"
    nested = {f"model.{name}": value for name, value in state.items()}
    save_torch(source, {"state_dict": nested, "hyper_parameters": arguments, "epoch": 1})
    assets = folder(tmp_path / "assets", config)
    if named:
        with pytest.raises(MappingError) as caught:
            ckptctl.plan_conversion(source, tmp_path / "out", to="hf", assets=assets)
        assert named in str(caught.value.why) and str(assets) in str(caught.value.why)
    plan = ckptctl.plan_conversion(
        source, tmp_path / "out", to="hf", assets=assets, trust_assets=True
    )
    assert bool(plan.decided) == bool(named)


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ({"rope_parameters": {**SCALED, "rope_theta": 1e4}}, "`rope_theta` is 500000.0"),
        ({"rope_parameters": {**SCALED, "factor": 4.0}}, "`rope.factor` is 4.0"),
    ],
)
def test_contradiction_within_one_config_is_refused(
    tmp_path: Path, added: dict[str, Any], said: str
) -> None:
    state, config = model()
    source = save_hf(tmp_path / "in", state, config | added)
    with pytest.raises(MappingError) as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="dcp")
    why = str(caught.value.why)
    assert said in why and "rope_parameters." in why
    added["rope_parameters"] |= {"rope_theta": 5e5, "factor": 8.0}
    source = save_hf(tmp_path / "same", state, config | added)
    ckptctl.plan_conversion(source, tmp_path / "out", to="dcp")


def test_invalid_description_is_a_warning_not_a_contradiction(tmp_path: Path) -> None:
    """Mistral's ``TransformerArgs._sliding_window`` may be a list, of one window for each layer."""
    state, config = model()
    folder = save_hf(tmp_path / "in", state, config | MISTRAL)
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "head_dim": config["head_dim"],
        "hidden_dim": config["intermediate_size"],
        "rope_theta": 1e6,
        "_sliding_window": [None, 32768, 32768, 32768],
    }
    (folder / "params.json").write_text(json.dumps(params))
    found = ckptctl.verify(folder)
    assert found.verdict == "complete"
    (warning,) = found.warnings
    assert "`_sliding_window` is not a valid size" in str(warning.why)
    (folder / "params.json").write_text(json.dumps(params | {"_sliding_window": 16}))
    (unknown,) = ckptctl.verify(folder).unknown
    assert unknown.what == "the descriptions of the model contradict each other"
