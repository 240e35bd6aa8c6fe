"""Mistral's format: ``consolidated*`` files with ``params.json``, built without ckptctl."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError, DamagedError, FormatError, UnsupportedError
from tests.checkpoints import differences, load_any_reference
from tests.contract.support import message, refused

State = dict[str, torch.Tensor]
D, HEADS, KV, E, F, V, LAYERS, EXPERTS = 16, 4, 2, 6, 12, 24, 2, 3
PARAMS: dict[str, Any] = {
    "dim": D,
    "n_layers": LAYERS,
    "head_dim": E,
    "hidden_dim": F,
    "n_heads": HEADS,
    "n_kv_heads": KV,
    "norm_eps": 1e-05,
    "vocab_size": V,
    "rope_theta": 1000000.0,
}
MOE = {"moe": {"num_experts": EXPERTS, "num_experts_per_tok": 2}}
ATTENTION = {"q": HEADS * E, "k": KV * E, "v": KV * E}
FIRST_RELEASE = {
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "intermediate_size": F,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": E,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-05,
    "vocab_size": V,
}


def native(experts: bool = False) -> State:
    torch.manual_seed(3)
    state = {"tok_embeddings.weight": torch.randn(V, D), "norm.weight": torch.randn(D)}
    for i in range(LAYERS):
        at = f"layers.{i}."
        state |= {f"{at}attention.w{n}.weight": torch.randn(s, D) for n, s in ATTENTION.items()}
        state[f"{at}attention.wo.weight"] = torch.randn(D, HEADS * E)
        state |= {f"{at}{n}_norm.weight": torch.randn(D) for n in ("attention", "ffn")}
        places = [f"feed_forward.experts.{x}." for x in range(EXPERTS)]
        for place in places if experts else ["feed_forward."]:
            state[f"{at}{place}w1.weight"] = torch.randn(F, D)
            state[f"{at}{place}w2.weight"] = torch.randn(D, F)
            state[f"{at}{place}w3.weight"] = torch.randn(F, D)
        if experts:
            state[f"{at}feed_forward.gate.weight"] = torch.randn(EXPERTS, D)
    return state | {"output.weight": torch.randn(V, D)}


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows in the order of complex rotations in that of ``rotate_half``."""
    return weight.view(heads, E // 2, 2, D).transpose(1, 2).reshape(heads * E, D).contiguous()


NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wo": "self_attn.o_proj",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def hub(state: State) -> State:
    """Return *state* under transformers' names."""
    found = {}
    for name, value in state.items():
        head, stem = "", name.removesuffix(".weight")
        if stem.startswith("layers."):
            _, number, stem = stem.split(".", 2)
            head = f"model.layers.{number}."
        if stem in ("attention.wq", "attention.wk"):
            value = halves(value, HEADS if stem.endswith("q") else KV)
        other = NAMES.get(stem) or stem.replace("feed_forward", "block_sparse_moe")
        found[f"{head}{other}.weight"] = value
    return found


def first_release(state: State) -> State:
    """Return a Mixtral as its first release: the experts of a layer below each other."""
    found = {n: v for n, v in state.items() if "feed_forward" not in n}
    for i in range(LAYERS):
        old, new = f"layers.{i}.feed_forward.", f"layers.{i}.block_sparse_moe."
        found[f"{new}gate.weight"] = state[f"{old}gate.weight"]
        for part in ("w1", "w2", "w3"):
            each = [state[f"{old}experts.{x}.{part}.weight"] for x in range(EXPERTS)]
            found[new + part] = torch.cat([w.T if part == "w2" else w for w in each])
    return found


def described(folder: Path, params: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params))
    (folder / "tekken.json").write_text("{}")
    return folder


def halved(state: State) -> tuple[State, State]:
    names = list(state)
    cut = len(names) // 2
    return {n: state[n] for n in names[:cut]}, {n: state[n] for n in names[cut:]}


def one_file(folder: Path, state: State, params: Mapping[str, Any]) -> Path:
    save_file(state, described(folder, params) / "consolidated.safetensors")
    return folder


def shards(folder: Path, state: State, params: Mapping[str, Any], index: bool = True) -> Path:
    described(folder, params)
    placed: dict[str, str] = {}
    for number, part in enumerate(halved(state), 1):
        name = f"consolidated-{number:05d}-of-00002.safetensors"
        save_file(part, folder / name)
        placed |= dict.fromkeys(part, name)
    if index:
        content = {"metadata": {"total_size": 0}, "weight_map": placed}
        (folder / "consolidated.safetensors.index.json").write_text(json.dumps(content))
    return folder


def pickles(folder: Path, state: State, params: Mapping[str, Any], suffix: str) -> Path:
    described(folder, params)
    parts = halved(state) if suffix == "pt" else (state,)
    for number, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{number:02d}.{suffix}")
    return folder


def build(kind: str, folder: Path, state: State, params: Mapping[str, Any]) -> Path:
    if kind in ("pth", "pt"):
        return pickles(folder, state, params, kind)
    if kind == "one":
        return one_file(folder, state, params)
    return shards(folder, state, params, index=kind == "index")


KINDS = ("one", "index", "shards", "pth", "pt")


@pytest.mark.parametrize("kind", KINDS)
def test_mistral_file_kinds_are_detected_and_converted(tmp_path: Path, kind: str) -> None:
    folder = build(kind, tmp_path / "in", native(), PARAMS)
    assert formats.detect_format(folder).name == "mistral"
    done = ckptctl.convert(folder, tmp_path / "out", to="hf", verify=True)
    assert (done.plan.model_type, done.plan.from_layout) == ("mistral", "mistral")
    assert not differences(load_any_reference(tmp_path / "out"), hub(native()))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["head_dim"]) == ("mistral", E)
    assert (tmp_path / "out" / "tekken.json").exists()


def test_missing_rope_theta_is_noted_with_its_default(tmp_path: Path) -> None:
    silent = {key: value for key, value in PARAMS.items() if key != "rope_theta"}
    folder = one_file(tmp_path / "in", native(), silent | {"sliding_window": 4096})
    done = ckptctl.convert(folder, tmp_path / "out", to="hf")
    assert any("rope_theta 10000.0" in note for note in done.notes or done.plan.notes)


@pytest.mark.parametrize("size", ["5GB", "4KB"])
def test_mistral_output_has_native_tensors_and_params(tmp_path: Path, size: str) -> None:
    folder = build("index", tmp_path / "in", native(), PARAMS)
    ckptctl.convert(folder, tmp_path / "hf", to="hf")
    out = tmp_path / "out"
    ckptctl.convert(tmp_path / "hf", out, to="mistral", max_shard_size=size, verify=True)
    found: State = {}
    for file in sorted(out.glob("consolidated*.safetensors")):
        found |= load_file(file)
    assert not differences(found, native())
    names = {item.name for item in out.iterdir()}
    assert ("consolidated.safetensors" in names) is (size == "5GB")
    assert ("consolidated.safetensors.index.json" in names) is (size != "5GB")
    params = json.loads((out / "params.json").read_text())
    assert {key: params[key] for key in PARAMS} == PARAMS
    assert formats.detect_format(out).name == "mistral"


def test_params_json_is_copied_unchanged(tmp_path: Path) -> None:
    extra = PARAMS | {"quantization": None, "max_batch_size": 4}
    folder = build("pth", tmp_path / "in", native(), extra)
    ckptctl.convert(folder, tmp_path / "out", to="mistral")
    assert json.loads((tmp_path / "out" / "params.json").read_text()) == extra


@pytest.mark.parametrize("kind", KINDS)
def test_mixtral_experts_convert_to_hf(tmp_path: Path, kind: str) -> None:
    state = native(experts=True)
    folder = build(kind, tmp_path / "in", state, PARAMS | MOE)
    ckptctl.convert(folder, tmp_path / "out", to="hf")
    assert not differences(load_any_reference(tmp_path / "out"), hub(state))


@pytest.mark.parametrize("params", [PARAMS | MOE, FIRST_RELEASE], ids=["today", "then"])
def test_first_mixtral_release_converts_to_hf_and_mistral(
    tmp_path: Path, params: dict[str, Any]
) -> None:
    state = native(experts=True)
    folder = build("pt", tmp_path / "in", first_release(state), params)
    done = ckptctl.convert(folder, tmp_path / "out", to="hf", verify=True)
    assert done.plan.from_layout == "mistral@2023"
    assert not differences(load_any_reference(tmp_path / "out"), hub(state))
    ckptctl.convert(folder, tmp_path / "native", to="mistral")
    assert not differences(load_file(tmp_path / "native" / "consolidated.safetensors"), state)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_local_experts"], config["num_key_value_heads"]) == (EXPERTS, KV)


def test_hf_output_with_mistral_layout_has_mistral_names(tmp_path: Path) -> None:
    """``--to hf`` implies layout hf only where nothing else is said."""
    folder = build("one", tmp_path / "in", native(), PARAMS)
    ckptctl.convert(folder, tmp_path / "hf", to="hf")
    ckptctl.convert(tmp_path / "hf", tmp_path / "out", to="hf", to_layout="mistral")
    assert not differences(load_file(tmp_path / "out" / "model.safetensors"), native())


def test_folder_with_hf_and_mistral_weights_is_hf(tmp_path: Path) -> None:
    folder = build("one", tmp_path / "in", native(), PARAMS)
    save_file(hub(native()), folder / "model.safetensors")
    assert formats.detect_format(folder).name == "hf"
    found = formats.open_checkpoint(folder, "mistral")
    assert set(found.tensors) == set(native())


def test_meta_params_are_detected_as_meta(tmp_path: Path) -> None:
    params = {"dim": D, "n_layers": LAYERS, "n_heads": HEADS, "multiple_of": 4, "vocab_size": V}
    folder = build("pth", tmp_path / "in", native(), params)
    assert formats.detect_format(folder).name == "meta"
    (folder / "params.json").unlink()
    assert formats.detect_format(folder).name == "meta"


@pytest.mark.parametrize("name", ["consolidated.safetensors", "consolidated.00.pth"])
def test_single_mistral_file_is_detected_and_opened(tmp_path: Path, name: str) -> None:
    kind = "pth" if name.endswith("pth") else "one"
    folder = build(kind, tmp_path / "in", native(), PARAMS)
    assert formats.detect_format(folder / name).name == "mistral"
    assert set(formats.open_checkpoint(folder / name).tensors) == set(native())


def test_missing_mistral_shard_is_damaged(tmp_path: Path) -> None:
    for kind in ("index", "shards"):
        folder = build(kind, tmp_path / kind, native(), PARAMS)
        (folder / "consolidated-00002-of-00002.safetensors").unlink()
        with pytest.raises(DamagedError, match="shards"):
            formats.open_checkpoint(folder)
    folder = build("pt", tmp_path / "pt", native(), PARAMS)
    (folder / "consolidated.00.pt").unlink()
    with pytest.raises(DamagedError) as caught:
        formats.open_checkpoint(folder)
    assert "consolidated.00.pt" in message(caught.value)


def test_tensor_in_two_mistral_shards_is_unsupported(tmp_path: Path) -> None:
    folder = build("pt", tmp_path / "in", native(), PARAMS)
    torch.save({"norm.weight": torch.zeros(D)}, folder / "consolidated.02.pt")
    with pytest.raises(UnsupportedError, match="two shards"):
        formats.open_checkpoint(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"dim": 1}'])
def test_invalid_params_json_is_refused_as_meta(tmp_path: Path, content: str) -> None:
    folder = build("pth", tmp_path / "in", native(), PARAMS)
    (folder / "params.json").write_text(content)
    assert formats.detect_format(folder).name == "meta"
    with pytest.raises(CkptError):
        ckptctl.convert(folder, tmp_path / "out", to="hf")


def test_mistral_folder_without_weights_is_a_format_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no weights"):
        formats.open_checkpoint(described(tmp_path / "in", PARAMS), "mistral")


def test_other_model_types_to_mistral_are_refused(tmp_path: Path) -> None:
    folder = build("one", tmp_path / "in", native(), PARAMS)
    ckptctl.convert(folder, tmp_path / "work" / "hf", to="hf")
    hf = tmp_path / "work" / "hf"
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with refused(hf, tmp_path / "out", 2, 5):
        ckptctl.convert(hf, tmp_path / "out", to="mistral")
    (hf / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with refused(hf, tmp_path / "out", 5) as caught:
        ckptctl.convert(hf, tmp_path / "out", to="mistral")
    assert "hidden_act" in message(caught.value)


def test_mistral_to_hf_layout_is_refused(tmp_path: Path) -> None:
    folder = build("one", tmp_path / "in", native(), PARAMS)
    with refused(folder, tmp_path / "out", 2):
        ckptctl.convert(folder, tmp_path / "out", to="mistral", to_layout="hf")
