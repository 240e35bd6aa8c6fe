"""Every writable format to every writable format and back, read with other people's readers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from tests.checkpoints import (
    differences,
    load_any_reference,
    rename,
    tiny_llama,
    to_meta_names,
)
from tests.checkpoints.llama import Kind
from tests.checkpoints.meta import ffn_size
from tests.contract.support import (
    SIDE,
    WRITABLE,
    build,
    message,
    place,
    read,
    refused,
    save_side_files,
    single_file,
)
from tests.sweeps import one_in

MODELS: dict[str, tuple[Kind, str]] = {
    "llama2": ("llama2", "bfloat16"),
    "llama3": ("llama3", "bfloat16"),
    "llama3-fp32": ("llama3", "float32"),
    "llama3_2": ("llama3_2", "bfloat16"),
}
NAMED = tuple(name for name in WRITABLE if name != "meta")


@pytest.fixture(scope="module", params=MODELS)
def model(request: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    kind, dtype = MODELS[request.param]
    return tiny_llama(kind, dtype)


@pytest.mark.parametrize(("first", "second"), one_in(7, itertools.product(WRITABLE, repeat=2)))
def test_round_trip_between_formats_preserves_tensors(
    tmp_path: Path, model: Any, first: str, second: str
) -> None:
    state, config = model
    papers = tmp_path / "papers"
    papers.mkdir()
    save_side_files(papers, config)
    source = build(first, tmp_path, state, config)
    there = place(tmp_path, second, "there")
    back = place(tmp_path, first, "back")
    # Meta's params.json does not say that a model of unusual size is a Llama 3.2.
    named = config["tie_word_embeddings"] and "meta" in (first, second)
    options: dict[str, Any] = {"model_type": "llama3_2"} if named else {}
    ckptctl.convert(source, there, to=second, **options, **_papers(first, second, papers))
    assert not differences(read(there, config), state)
    layout = None if first in ("hf", "meta") else "hf"
    options |= {"to_layout": layout, "verify": True}
    ckptctl.convert(there, back, to=first, **options, **_papers(second, first, papers))
    assert not differences(read(back, config), state)
    if not any(map(single_file, (first, second))):
        _same_papers(source, back)


def _papers(source: str, target: str, papers: Path) -> dict[str, Any]:
    return {"assets": papers} if single_file(source) and not single_file(target) else {}


def _same_papers(source: Path, back: Path) -> None:
    assert {name: (back / name).read_bytes() for name in SIDE} == SIDE
    if (source / "config.json").exists():
        assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()
    else:
        ours, theirs = (json.loads((path / "params.json").read_text()) for path in (back, source))
        assert _meant(ours) == _meant(theirs)


def _meant(params: dict[str, Any]) -> dict[str, Any]:
    """Return *params* with the feed-forward size in place of what it is computed from.

    An unstated number of key/value heads is the number of heads, Llama 2's -1 any vocabulary, and
    its rotary base of 10000 is not stated in Meta's own files.
    """
    derived = ("multiple_of", "ffn_dim_multiplier")
    ffn = ffn_size(params["dim"], params["multiple_of"], params.get("ffn_dim_multiplier"))
    rest = {name: value for name, value in params.items() if name not in derived}
    heads = params.get("n_kv_heads", params["n_heads"])
    theta = params.get("rope_theta", 10000.0)
    vocabulary = -1 if theta == 10000.0 else params["vocab_size"]
    meant = {"n_kv_heads": heads, "vocab_size": vocabulary, "rope_theta": theta}
    return rest | meant | {"ffn": ffn}


@pytest.mark.parametrize(("first", "second"), list(itertools.product(NAMED, repeat=2)))
def test_unknown_model_family_keeps_tensor_names(tmp_path: Path, first: str, second: str) -> None:
    state = {
        "blocks.0.mixer.weight": torch.randn(6, 4),
        "blocks.0.mixer.bias": torch.randn(6, dtype=torch.float64),
        "head": torch.arange(5),
        "scale": torch.tensor(2.5, dtype=torch.bfloat16),
    }
    source = build(first, tmp_path, state, None)
    target = place(tmp_path, second)
    done = ckptctl.convert(source, target, to=second)
    assert not differences(read(target, {}), state)
    assert done.plan.model_type is None


@pytest.mark.parametrize("first", NAMED)
def test_unknown_model_family_to_meta_is_refused(tmp_path: Path, first: str) -> None:
    source = build(first, tmp_path, {"blocks.0.mixer.weight": torch.randn(6, 4)}, None)
    with refused(source, tmp_path / "out", 5) as caught:
        ckptctl.convert(source, tmp_path / "out", to="meta")
    assert "blocks.0.mixer.weight" in message(caught.value) or "model type" in message(caught.value)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["llama2", "llama3", "llama3_2"])
def test_meta_shards_per_rank_convert_back_to_hf(tmp_path: Path, kind: Any, ranks: int) -> None:
    """Four ranks are more than Llama 3's two key/value heads."""
    state, config = tiny_llama(kind)
    source = build("hf", tmp_path, state, config)
    ckptctl.convert(source, tmp_path / "meta", to="meta", mp=ranks)
    assert len(list((tmp_path / "meta").glob("*.pth"))) == ranks
    params = json.loads((tmp_path / "meta" / "params.json").read_text())
    heads = params.get("n_kv_heads", params["n_heads"])
    assert heads == max(config["num_key_value_heads"], ranks)
    if ranks <= config["num_key_value_heads"]:
        assert not differences(read(tmp_path / "meta", config), state)
    ckptctl.convert(tmp_path / "meta", tmp_path / "back", to="hf")
    assert not differences(read(tmp_path / "back", config), state)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


@pytest.mark.parametrize("layout", one_in(3, ["torchtune", "torchtitan@0.2", "torchtitan@0.3"]))
@pytest.mark.parametrize("target", ["dcp", "torch"])
def test_torchtune_and_torchtitan_layouts_round_trip(
    tmp_path: Path, layout: Any, target: str
) -> None:
    state, config = tiny_llama("llama3")
    source = build("hf", tmp_path, state, config)
    path = place(tmp_path, target)
    ckptctl.convert(source, path, to=target, to_layout=layout)
    expected = rename(to_meta_names(state, config), "meta", layout)
    assert not differences(load_any_reference(path), expected)
    ckptctl.convert(path, tmp_path / "back", to="hf", assets=source, from_layout=layout)
    assert not differences(read(tmp_path / "back", config), state)


@pytest.mark.parametrize("target", WRITABLE)
def test_duplicate_tied_head_is_dropped(tmp_path: Path, target: str) -> None:
    """The copy is dropped by the rule of the tie, once it is proven to be one."""
    state, config = tiny_llama("llama3_2")
    twice = state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    source = build("dcp", tmp_path, to_meta_names(twice, config), config)
    out = place(tmp_path, target)
    done = ckptctl.convert(source, out, to=target, to_layout=None if target == "meta" else "hf")
    assert not differences(read(out, config), state)
    assert target == "meta" or "output.weight" in done.plan.dropped


@pytest.mark.parametrize("target", NAMED)
def test_differing_tied_tensors_are_refused_without_untie(tmp_path: Path, target: str) -> None:
    """The configuration calls two tensors one, and they differ."""
    state, config = tiny_llama("llama3_2")
    other = state | {"lm_head.weight": state["model.embed_tokens.weight"] + 1}
    source = build("torch", tmp_path, to_meta_names(other, config), None)
    assets = tmp_path / "papers"
    assets.mkdir()
    save_side_files(assets, config)
    out = place(tmp_path, target)
    options: dict[str, Any] = {"to": target, "to_layout": "hf", "assets": assets}
    with refused(source, out, 5) as caught:
        ckptctl.convert(source, out, **options)
    assert "output.weight" in message(caught.value)
    assert "untie=True" in message(caught.value)
    ckptctl.convert(source, out, **options, untie=True)
    assert not differences(load_any_reference(out), other)
    if out.is_dir():
        written = json.loads((out / "config.json").read_text())
        assert written == config | {"tie_word_embeddings": False}


def test_shared_storage_is_written_twice_without_config(tmp_path: Path) -> None:
    state, _ = tiny_llama("llama3_2")
    shared = state | {"lm_head.weight": state["model.embed_tokens.weight"]}
    source = build("torch", tmp_path, shared, None)
    ckptctl.convert(source, tmp_path / "plain", to="hf")
    assert not differences(load_any_reference(tmp_path / "plain"), shared)
