"""Adapters against the programs that train them: peft 0.21 on transformers 5.24, torchtune 0.6.1.

Both programs compute their merged weights and logits themselves. torchtune exports adapters for
PEFT, wrongly for Qwen (it permutes rows that its model does not) and for DoRA (it leaves lengths
where rows are permuted): the negative controls show that these tests would see that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.errors import RefusedError
from tests.checkpoints import load_any_reference
from tests.oracle import hf_models
from tests.oracle.models import distance, tokens
from tests.oracle.tiny import TINY

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
KINDS = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "phi3": "Phi3Config"}
ALPHA, RANK = 10, 4
TOLERANCE = 2e-6


def transformers_model(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model, saved as *folder*."""
    import transformers

    config = getattr(transformers, KINDS[kind])(**SIZES, pad_token_id=0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, value in model.named_parameters():
        value.data = torch.randn_like(value) * (1.0 if "bias" in name else 0.1)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    return model


def trained(model: Any, folder: Path, **config: Any) -> Any:
    """Return *model* with a random adapter of PEFT's, saved as *folder*."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        model,
        LoraConfig(r=8, lora_alpha=12, task_type="CAUSAL_LM", init_lora_weights=False, **config),
    )
    for name, value in adapted.named_parameters():
        if "magnitude" in name:
            value.data *= 1 + 0.3 * torch.rand_like(value)
        if "lora_embedding" in name:  # which PEFT draws much larger than others
            value.data *= 0.1
        if "modules_to_save" in name or (name.endswith(".bias") and value.requires_grad):
            value.data += 0.25
    adapted.eval().save_pretrained(str(folder))
    return adapted


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {"target_modules": ["q_proj", "k_proj", "down_proj", "lm_head"]}),
        ("llama", {"target_modules": "all-linear", "use_dora": True}),
        ("phi3", {"target_modules": "all-linear", "use_dora": True}),
        ("qwen2", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
        ("llama", {"target_modules": ["v_proj"], "layers_to_transform": [1]}),
        ("qwen2", {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
        ("qwen2", {"target_modules": ["q_proj"], "bias": "all", "use_dora": True}),
        ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
        ("qwen2", {"target_modules": ["embed_tokens"]}),
        (
            "llama",
            {
                "target_modules": "all-linear",
                "use_rslora": True,
                "rank_pattern": {"q_proj": 4, r"layers\.1\..*down_proj": 6},
                "alpha_pattern": {"v_proj": 3, "^model.layers.0.mlp.up_proj": 5},
            },
        ),
    ],
)
def test_merged_adapter_matches_peft_merge(
    kind: str, config: dict[str, Any], tmp_path: Path
) -> None:
    model = transformers_model(kind, tmp_path / "base")
    adapted = trained(model, tmp_path / "adapter", **config)
    with torch.no_grad():
        logits = adapted(tokens()).logits
    ckptctl.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    expected = adapted.merge_and_unload().state_dict()
    found = load_any_reference(tmp_path / "merged")
    assert found.keys() == expected.keys()
    assert max(distance(found[name], expected[name]) for name in expected) <= TOLERANCE
    assert distance(logits_of(tmp_path / "merged"), logits) < 2e-5
    verification = ckptctl.verify(tmp_path / "adapter")
    plan = ckptctl.plan_merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "none")
    assert verification.verdict == "complete" and not verification.findings
    assert not [note for note in (*plan.conversion.notes, *verification.notes) if "select" in note]


def test_merge_without_the_factors_of_a_layer_matches_peft_merge(tmp_path: Path) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file, save_file

    model = transformers_model("llama", tmp_path / "base")
    trained(model, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    factors = load_file(file)
    save_file({name: f for name, f in factors.items() if "1.self_attn.q_proj" not in name}, file)
    config = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"init_lora_weights": True}))
    again = transformers_model("llama", tmp_path / "base")
    with pytest.warns(UserWarning, match=r"missing adapter keys.*layers\.1\.self_attn\.q_proj"):
        adapted = PeftModel.from_pretrained(again, tmp_path / "adapter")
    expected = adapted.merge_and_unload().state_dict()
    done = ckptctl.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert any("`model.layers.1.self_attn.q_proj`" in note for note in done.plan.notes)
    found = load_any_reference(tmp_path / "merged")
    assert max(distance(found[name], expected[name]) for name in expected) <= TOLERANCE


def test_every_field_of_peft_is_known() -> None:
    from dataclasses import fields

    from peft import LoraConfig

    from ckptctl.adapters.peft import list_unknown_fields

    assert not list_unknown_fields({field.name: True for field in fields(LoraConfig)})


SELECTIONS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "mlp.down_proj", "model.layers.1.self_attn.v_proj"]},
    {"target_modules": r".*\.(0|2)\..*(q|k)_proj"},
    {"target_modules": ["proj"]},
    {"target_modules": ["q_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": []},
    {"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": [1, 2]},
    {"target_modules": ["q_proj", "fc"], "layers_to_transform": [1], "layers_pattern": "layers"},
    {
        "target_modules": ["q_proj", "fc"],
        "layers_to_transform": [1],
        "layers_pattern": ["h", "l.*"],
    },
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["0.self_attn.q_proj", "v_proj"]},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.1\..*"},
    {"target_modules": ["q_proj", "lm_head", "fc"], "modules_to_save": ["lm_head", "h"]},
    {"target_parameters": ["mlp.experts.down_proj"]},
]
MODULES = [
    *(
        f"{top}.{layer}.{name}"
        for top in ("model.layers", "h", "model.visual.layers")
        for layer in range(3)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
    ),
    *("q_proj", "lm_head", "proj", "h.1.fc", "layers.1.fc", "model.layers.1.experts.2.q_proj"),
]


@pytest.mark.parametrize("config", SELECTIONS)
def test_selected_modules_match_peft_selection(config: dict[str, Any]) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    from ckptctl.adapters.target_modules import TargetSelection

    selection = TargetSelection.parse(config)
    assert selection is not None
    peft_config = LoraConfig(**config)
    for module in MODULES:
        expected = bool(check_target_module_exists(peft_config, module))
        assert selection.has_module(module) == expected, module


EXPERTS: dict[str, Any] = {
    **SIZES,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "head_dim": 16,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(("kind", "layout"), [("GptOss", None), ("Qwen3Moe", "hf-v5")])
@pytest.mark.parametrize("names", [["gate_up_proj", "down_proj"], ["down_proj"], []])
def test_merged_stacked_experts_match_peft_merge(
    kind: str, layout: str | None, names: list[str], tmp_path: Path
) -> None:
    """Without *names*, PEFT selects all linear layers and stacks, and lists the stacks' names."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**EXPERTS)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for value in model.parameters():
        value.data = torch.randn_like(value) * 0.1
    base = tmp_path / "base"
    model.save_pretrained(base)
    if layout:  # one tensor for each expert in files, all in one where PEFT sees them
        ckptctl.convert(base, tmp_path / "stacked", to="hf", to_layout=layout)
        base = tmp_path / "stacked"
    selected: dict[str, Any] = {
        "target_modules": ["q_proj"] if names else "all-linear",
        "target_parameters": [f"mlp.experts.{name}" for name in names] or None,
    }
    adapted = trained(model, tmp_path / "adapter", **selected)
    ckptctl.merge(base, tmp_path / "adapter", tmp_path / "merged")
    adapted.merge_and_unload().save_pretrained(tmp_path / "expected")
    expected = load_any_reference(tmp_path / "expected")
    found = load_any_reference(tmp_path / "merged")
    assert found.keys() == expected.keys()
    assert max(distance(found[name], expected[name]) for name in expected) <= TOLERANCE


def logits_of(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return torch.as_tensor(model.eval()(tokens()).logits)


VERSIONS: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "target_modules": ["query_key_value", "embed_in"],
        "bias": "lora_only",
        "modules_to_save": ["final_layer_norm"],
        "rank_pattern": {r"gpt_neox\.layers\.0\.attention\.query_key_value": 3},
    },
    "qwen2_5_vl": {
        "target_modules": r".*language_model.*\.(q_proj|v_proj)",
        "bias": "all",
        "modules_to_save": ["lm_head"],
    },
    "mistral3": {
        "target_modules": r".*language_model.*(q_proj|v_proj|embed_tokens)",
        "modules_to_save": ["lm_head"],
        "alpha_pattern": {"language_model.layers.1.self_attn.q_proj": 7},
    },
}


@pytest.mark.parametrize("name", VERSIONS)
def test_peft_adapter_round_trips_between_key_versions(name: str, tmp_path: Path) -> None:
    """Embeddings, biases and whole modules, as published, and as transformers 5 has them."""
    from peft import PeftModel

    model = hf_models.random_model(TINY[name]())
    model.save_pretrained(tmp_path / "base")
    adapted = trained(model, tmp_path / "adapter", **VERSIONS[name])
    want = {key: v.clone() for key, v in adapted.merge_and_unload().state_dict().items()}
    options: Any = {"to": "peft", "assets": tmp_path / "base"}
    ckptctl.convert(tmp_path / "adapter", tmp_path / "kept", **options)
    ckptctl.convert(tmp_path / "adapter", tmp_path / "hf", to_layout="peft", **options)
    ckptctl.convert(tmp_path / "hf", tmp_path / "back", to_layout="peft-v5", **options)
    for folder in ("kept", "back"):
        base = type(model).from_pretrained(tmp_path / "base", dtype=torch.float32)
        found = PeftModel.from_pretrained(base, str(tmp_path / folder)).merge_and_unload()
        assert all(torch.equal(value, want[key]) for key, value in found.state_dict().items())
    ckptctl.merge(tmp_path / "base", tmp_path / "hf", tmp_path / "merged")
    merged = type(model).from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert merged.keys() == want.keys()
    assert max(distance(merged[key], value) for key, value in want.items()) <= TOLERANCE


def test_bf16_merge_rounds_only_once(tmp_path: Path) -> None:
    model = transformers_model("llama", tmp_path / "base", torch.bfloat16)
    trained(model, tmp_path / "adapter", target_modules="all-linear")
    wide = transformers_model("llama", tmp_path / "again", torch.bfloat16).float()
    from peft import PeftModel

    exact = PeftModel.from_pretrained(wide, tmp_path / "adapter").merge_and_unload().state_dict()
    ckptctl.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    found = load_any_reference(tmp_path / "merged")
    for name, value in found.items():
        step = exact[name].abs() * 2**-8 + 1e-7
        assert value.dtype == torch.bfloat16
        assert ((value.float() - exact[name]).abs() <= step).all(), name


def torchtune_adapted(kind: str, base: Path, folder: Path, dora: bool) -> Any:
    """Return torchtune's model with a random adapter, which is saved as *folder*."""
    from torchtune.models.llama3 import lora_llama3
    from torchtune.models.phi3 import lora_phi3
    from torchtune.models.qwen2 import lora_qwen2
    from torchtune.modules.peft import get_adapter_params
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(base)
    build: Any = {"llama": lora_llama3, "qwen2": lora_qwen2, "phi3": lora_phi3}[kind]
    theta = {} if kind == "phi3" else {"rope_base": config.rope_parameters["rope_theta"]}
    model = build(
        ["q_proj", "k_proj", "v_proj", "output_proj"],
        apply_lora_to_mlp=True,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        embed_dim=config.hidden_size,
        intermediate_dim=config.intermediate_size,
        max_seq_len=256,
        norm_eps=config.rms_norm_eps,
        lora_rank=RANK,
        lora_alpha=ALPHA,
        use_dora=dora,
        **theta,
    )
    file = folder.parent / "base-torchtune.pt"
    ckptctl.convert(base, file, to="torch", to_layout="torchtune")
    unexpected = model.load_state_dict(torch.load(file), strict=False)[1]
    assert not unexpected
    torch.manual_seed(1)
    for module in model.modules():
        if hasattr(module, "lora_b"):
            torch.nn.init.normal_(module.lora_a.weight, std=0.1)
            torch.nn.init.normal_(module.lora_b.weight, std=0.1)
        if hasattr(module, "initialize_dora_magnitude"):
            module.initialize_dora_magnitude()
            module.magnitude.data *= 1 + 0.5 * torch.rand_like(module.magnitude)
    folder.mkdir()
    torch.save(dict(get_adapter_params(model)), folder / "adapter_model.pt")
    return model.eval()


@pytest.mark.parametrize(("kind", "dora"), [("llama", False), ("llama", True), ("qwen2", False)])
def test_torchtune_adapter_keeps_logits_in_peft(kind: str, dora: bool, tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "tune"
    transformers_model(kind, base)
    model = torchtune_adapted(kind, base, folder, dora)
    with torch.no_grad():
        expected = model(tokens())
    source = folder / "adapter_model.pt"
    ckptctl.convert(source, tmp_path / "peft", to="peft", assets=base, lora_alpha=ALPHA)
    assert distance(logits_of(base, tmp_path / "peft"), expected) < 2e-5
    assert distance(logits_of(base), expected) > 1e-2
    ckptctl.convert(
        tmp_path / "peft", tmp_path / "back.pt", to="torch", to_layout="torchtune", assets=base
    )
    again, first = torch.load(tmp_path / "back.pt"), torch.load(source)
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize(("kind", "dora"), [("qwen2", False), ("llama", True)])
def test_torchtune_export_to_peft_changes_logits(kind: str, dora: bool, tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from torchtune.models.convert_weights import tune_to_peft_adapter_weights

    base, folder = tmp_path / "base", tmp_path / "tune"
    transformers_model(kind, base)
    model = torchtune_adapted(kind, base, folder, dora)
    with torch.no_grad():
        expected = model(tokens())
    source = folder / "adapter_model.pt"
    ckptctl.convert(source, tmp_path / "peft", to="peft", assets=base, lora_alpha=ALPHA)
    exported = tune_to_peft_adapter_weights(torch.load(source), num_heads=4, num_kv_heads=2, dim=64)
    renamed = {
        name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector"): value.contiguous()
        for name, value in exported.items()
    }
    save_file(renamed, tmp_path / "peft" / "adapter_model.safetensors")
    assert distance(logits_of(base, tmp_path / "peft"), expected) > 1e-4


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3"])
def test_merged_torchtune_adapter_keeps_logits(kind: str, dora: bool, tmp_path: Path) -> None:
    from torchtune.modules.peft import get_merged_lora_ckpt

    base, folder = tmp_path / "base", tmp_path / "tune"
    transformers_model(kind, base)
    model = torchtune_adapted(kind, base, folder, dora)
    with torch.no_grad():
        logits = model(tokens())
    expected = get_merged_lora_ckpt(dict(model.state_dict()), RANK, ALPHA)
    scaled = {name for name in expected if dora and name.endswith("_proj.bias")}
    assert bool(scaled) == (dora and kind == "qwen2")
    source = folder / "adapter_model.pt"
    ckptctl.merge(
        base, source, tmp_path / "out.pt", to="torch", to_layout="torchtune", lora_alpha=ALPHA
    )
    found = torch.load(tmp_path / "out.pt")
    assert found.keys() <= expected.keys()
    # Its forward pass scales biases by the lengths of DoRA, its merge does not.
    assert all(distance(found[name], expected[name]) > 0.1 for name in scaled)
    same = found.keys() - scaled
    assert max(distance(found[name], expected[name]) for name in same) <= TOLERANCE
    ckptctl.merge(base, source, tmp_path / "hf", lora_alpha=ALPHA)
    assert distance(logits_of(tmp_path / "hf"), logits) < 2e-5


def test_dora_with_bias_between_torchtune_and_peft_is_refused(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "tune"
    model = transformers_model("qwen2", base)
    torchtune_adapted("qwen2", base, folder, dora=True)
    source = folder / "adapter_model.pt"
    with pytest.raises(RefusedError, match="layers that have a bias"):
        ckptctl.convert(source, tmp_path / "p", to="peft", assets=base, lora_alpha=ALPHA)
    adapter = tmp_path / "adapter"
    adapted = trained(model, adapter, target_modules=["q_proj", "v_proj"], use_dora=True)
    with torch.no_grad():
        logits = adapted(tokens()).logits
    with pytest.raises(RefusedError, match="layers that have a bias"):
        ckptctl.convert(adapter, tmp_path / "p", to="torch", to_layout="torchtune", assets=base)
    ckptctl.merge(base, adapter, tmp_path / "merged")
    assert distance(logits_of(tmp_path / "merged"), logits) < 2e-5


def test_differing_phi3_qkv_factors_to_peft_are_refused(tmp_path: Path) -> None:
    """phi3's queries, keys and values have one A in PEFT, three in torchtune."""
    base, folder = tmp_path / "base", tmp_path / "tune"
    transformers_model("phi3", base)
    torchtune_adapted("phi3", base, folder, dora=False)
    with pytest.raises(ckptctl.CkptError, match="different values"):
        ckptctl.convert(
            folder / "adapter_model.pt", tmp_path / "p", to="peft", assets=base, lora_alpha=ALPHA
        )


def test_alpha_pattern_lookup_matches_peft() -> None:
    from peft.utils.other import get_pattern_key

    from ckptctl.adapters.peft import parse_adapter_settings

    module = "model.layers.1.self_attn.q_proj"
    for patterns in (
        {"q_proj": 2},
        {"proj": 2},
        {"layers.0.self_attn.q_proj": 2},
        {r".*\.1\..*q_proj": 2},
        {"^model.layers.1.self_attn.q_proj": 2},
        {"^layers.1.self_attn.q_proj": 2},
        {"v_proj": 8, "q_proj": 2, "self_attn.q_proj": 8},
    ):
        alpha = patterns.get(get_pattern_key(list(patterns), module), 5)
        known = parse_adapter_settings({"lora_alpha": 5, "alpha_pattern": patterns})
        assert known.compute_scale(f"base_model.model.{module}.lora_A.weight", 1) == alpha
